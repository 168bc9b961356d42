"""Integers of NumPy are taken where ints are, and become ints; NumPy's booleans and fractions are refused."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import treegen
from support.rejections import rejected
from treegen import KVRuns, LiveBatch, PageTable, Shape, Tree, TreeAttentionWrapper, TreegenError
from treegen.runtime.limits import WantedLimits
from treegen.scoring.options import ScoreOptions

SHAPE, TREE = Shape(2, 1, 32, page_size=16), Tree.parse("40(20*2)")


def pages(num_pages: Any = 8) -> PageTable:
    lengths = torch.ones(2, dtype=torch.int32)
    return PageTable(torch.zeros(2, 2, dtype=torch.int32), lengths, num_pages, qo_indptr=torch.arange(3).int())


def batch_kernel(max_tokens: Any, max_rows: Any = 2) -> list[int]:
    kernel = treegen.compile_batch(SHAPE, pages(), max_tokens=max_tokens, max_rows=max_rows)
    return [kernel.workspace_size()]


def live(page_size: Any, max_seats: Any) -> list[int]:
    batch = LiveBatch(page_size, max_seats)
    return [batch.page_size, len(batch.row)]


def tree(made: Tree) -> list[int]:
    return [made.num_rows, made.kv.last_slot]


CASES: dict[str, tuple[Callable[..., Sequence[int]], tuple[int, ...]]] = {
    "compile_batch": (batch_kernel, (100, 4)),
    "LiveBatch": (live, (16, 8)),
    "num_pages": (lambda size: [pages(size).num_pages], (8,)),
    "window_left": (lambda left: [ScoreOptions(window_left=left).window_left], (5,)),
    "Shape": (lambda *sizes: [getattr(Shape(*sizes), name) for name in ("num_qo_heads", "head_dim", "head_dim_v")],
              (8, 4, 64, 32)),
    "limits": (lambda rows: [WantedLimits(rows, None, None).max_rows or 0], (8,)),
    "page table": (lambda size: tree(Tree.from_page_table([0, 2], [3, 1], [5], size)), (16,)),
    "block table": (lambda size: tree(Tree.from_block_table([[3, 1]], [20], size)), (16,)),
    "requests": (lambda size: tree(Tree.from_requests([20, 40], [-1, 0], [0, 16], page_size=size)), (16,)),
    "paths": (lambda size: tree(Tree.from_paths([[1, 2], [1, 3]], block_size=size)), (16,)),
    "KV": (lambda size: [KVRuns.from_pages([20], [[3, 100]], size).last_slot], (16,)),
    "edits": (lambda tokens, copies: tree(TREE.appended([1], tokens).branched(0, copies)), (3, 4)),
}  # fmt: skip
KINDS = [np.int64, np.int32, np.int8, np.uint8]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_same_results(name: str, kind: Callable[[int], Any]) -> None:
    make, numbers = CASES[name]
    made = make(*map(kind, numbers))
    assert made == make(*numbers)
    assert {*map(type, made)} == {int}


@pytest.mark.parametrize("wrong", [np.True_, np.float64(16), np.array([16])])
@pytest.mark.parametrize("name", CASES)
def test_others_are_refused(name: str, wrong: Any) -> None:
    make, numbers = CASES[name]
    rejected(lambda: make(wrong, *numbers[1:]), TreegenError)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_and_wrappers(kind: Callable[[int], Any]) -> None:
    assert "window of 5 tokens" in treegen.compile(TREE, window_left=kind(5), max_rows=kind(100)).explain()
    wrapper = TreeAttentionWrapper(by_request=False, max_tokens=kind(64))
    wrapper.plan([0, 2], [3, 1], [5], kind(8), kind(4), kind(64), kind(16), window_left=kind(5))
    assert "rows" in str(wrapper)
