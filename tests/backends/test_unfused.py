"""Unfused attention (medusa): chunks of heads, grouped heads, pages, rows that see nothing, and nothing to emit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import examples, forests
from support.h200 import H200
from treegen import KVRuns, Shape, Tree, cli, strategies
from treegen.backends import oracle, unfused
from treegen.codegen.emit import emit
from treegen.ir.schedule import UNFUSED_LAUNCHES
from treegen.schedule.lower import lower
from treegen.strategies import Pipeline, groupings
from treegen.strategies.passes import StoreMask
from treegen.target.problem import Problem

BACKENDS = ("torch", "triton")
TREE = Tree.from_parents([-1, 0, -1, 1], [30, 7, 4, 12], rows=[(3, 12), (0, 0), (1, 7), (1, 3), (2, 0), (0, 30)])
"""49 tokens that four rows see, 4 tokens that nobody sees, and rows 1 and 4, which see nothing."""


def tensors(tree: Tree, heads: tuple[int, int], dtype: torch.dtype, page_size: int = 1) -> tuple[torch.Tensor, ...]:
    """Standard-normal q and caches of head_dim 16."""
    generator = torch.Generator().manual_seed(tree.num_rows + heads[0])
    pages = -(-(tree.kv.last_slot + 1) // page_size) + 1
    q = torch.randn(tree.num_rows, heads[0], 16, generator=generator).to(dtype)
    caches = torch.randn(2, pages, page_size, heads[1], 16, generator=generator).to(dtype)
    return (q, *(caches if page_size > 1 else caches[:, :, 0]))


def assert_attention(tree: Tree, inputs: tuple[torch.Tensor, ...], backend: str = "torch") -> None:
    report = treegen.compile(tree, strategy="medusa", backend=backend).verify(*inputs)
    assert report.passed, str(report)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_heads_and_types(backend: str, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    assert_attention(TREE, tensors(TREE, heads, dtype), backend)


@examples(150)
@given(tree=forests(30, 60, salt=900), heads=st.sampled_from(((1, 1), (3, 3), (4, 2), (8, 1))))
def test_any_tree(tree: Tree, heads: tuple[int, int]) -> None:
    kernel = treegen.compile(tree, strategy="medusa", backend="torch", shape=Shape(*heads, 16, dtype="fp32"))
    inputs = tensors(tree, heads, torch.float32)
    if tree.num_rows:
        assert kernel.verify(*inputs).passed
    seeing = bool((tree.unique_tokens > 0) and tree.num_rows)
    blind = tree.num_rows - int(kernel.plan.group_rows.sum())
    assert kernel.schedule.launches == UNFUSED_LAUNCHES * seeing + (blind > 0)  # a merge writes rows without any token


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_in_any_order(backend: str, page_size: int) -> None:
    counts = -(-TREE.tokens // page_size)
    order = np.random.default_rng(page_size).permutation(int(counts.sum()))
    pages = np.split(order, np.cumsum(counts)[:-1])
    tree = TREE.with_kv(KVRuns.from_pages(TREE.tokens, pages, page_size))
    assert_attention(tree, tensors(tree, (4, 2), torch.float32, page_size), backend)


@pytest.mark.parametrize(
    ("most", "at_once"),
    [(1, 1), (4 * 49 * 2 - 1, 1), (4 * 49 * 2, 1), (2 * 4 * 49 * 2, 2), (3 * 4 * 49 * 2 + 1, 3), (10**9, 5)],
)
def test_heads_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, most: int, at_once: int) -> None:
    """5 KV heads of 2 query heads, 4 rows that see something, 49 tokens: as many KV heads as `most` scores allow."""
    sizes: list[tuple[int, ...]] = []
    logsumexp = torch.logsumexp

    def recorded(scores: torch.Tensor, dim: int) -> torch.Tensor:
        if dim == -1:  # not of a merge
            sizes.append(tuple(scores.shape))
        return logsumexp(scores, dim)

    inputs = tensors(TREE, (10, 5), torch.float32)
    kernel = treegen.compile(TREE, strategy="medusa", backend="torch")
    whole = kernel(*inputs, return_lse=True)
    monkeypatch.setattr(unfused, "MOST_SCORES", most)
    monkeypatch.setattr(torch, "logsumexp", recorded)
    out, lse = kernel(*inputs, out=torch.full_like(inputs[0], math.nan), return_lse=True)
    expected = [min(at_once, 5 - head) for head in range(0, 5, at_once)]
    assert sizes == [(heads, 2, 4, 49) for heads in expected]
    assert math.prod(sizes[0]) <= max(most, 2 * 4 * 49)
    torch.testing.assert_close((out, lse), whole)
    assert oracle.error(out, oracle.reference(TREE, *inputs)[0]) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_nothing(backend: str) -> None:
    """Rows 1 and 4 see nothing: zero and minus infinity, over whatever was in the output."""
    inputs = tensors(TREE, (4, 2), torch.float32)
    out = torch.full_like(inputs[0], math.nan)
    kernel = treegen.compile(TREE, strategy="medusa", backend=backend)
    out, lse = kernel(*inputs, out=out, return_lse=True)
    assert kernel.plan.group_rows.tolist() == [4]
    assert out[[1, 4]].eq(0).all()
    assert lse[[1, 4]].eq(-math.inf).all()
    assert out.isfinite().all()
    assert lse[[0, 2, 3, 5]].isfinite().all()


def test_rows_that_see_nothing_inside_the_group() -> None:
    """A plan may keep them in the dense mask: they are written all the same."""
    shape = Shape(4, 2, 16, dtype="fp32")
    untrimmed = Pipeline("untrimmed", groupings.whole_tree, (StoreMask("dense"),))
    kernel = treegen.compile(TREE, strategy=untrimmed, shape=shape, backend="torch")
    assert kernel.plan.group_rows.tolist() == [6]
    assert len(kernel.schedule.merge_rows) == 0
    inputs = tensors(TREE, (4, 2), torch.float32)
    out, lse = kernel(*inputs, out=torch.full_like(inputs[0], math.nan), return_lse=True)
    for found, expected in zip((out, lse), oracle.reference(TREE, *inputs), strict=True):
        assert oracle.error(found, expected) <= 1e-5
    assert lse[[1, 4]].eq(-math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_to_base_two(backend: str) -> None:
    inputs = tensors(TREE, (4, 2), torch.float32)
    kernel = treegen.compile(TREE, strategy="medusa", backend=backend)
    _, natural = kernel(*inputs, return_lse=True)
    _, binary = kernel(*inputs, return_lse=True, lse_base="log2")
    seeing = natural.isfinite()
    torch.testing.assert_close(binary[seeing], natural[seeing] / math.log(2))
    assert binary[~seeing].eq(-math.inf).all()
    assert oracle.error(natural, oracle.reference(TREE, *inputs)[1]) < 1e-5


def test_large_scores_do_not_overflow() -> None:
    q, keys, values = tensors(TREE, (4, 2), torch.float32)
    q[..., 0], keys[..., 0] = 1.0, 500.0
    kernel = treegen.compile(TREE, strategy="medusa", backend="torch", sm_scale=1.0)
    out, lse = kernel(q, keys, values, return_lse=True)
    expected_out, expected_lse = oracle.reference(TREE, q, keys, values, oracle.OracleOptions(sm_scale=1.0))
    assert oracle.error(out, expected_out) < 1e-3  # scores of magnitude 500 leave float32 four digits
    assert oracle.error(lse, expected_lse) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [[], [(0, 0), (0, 0)]])
def test_nothing_to_attend_to(backend: str, rows: list[tuple[int, int]]) -> None:
    tree = Tree.from_parents([-1, 0], [5, 3], rows=rows)
    kernel = treegen.compile(tree, strategy="medusa", backend=backend, shape=Shape(4, 2, 16, dtype="fp32"))
    out, lse = kernel(*tensors(tree, (4, 2), torch.float32), return_lse=True)
    assert out.shape == (len(rows), 4, 16)
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()


def test_nothing_is_emitted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["emit", "1,4/100,10", "--strategy", "medusa"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "nothing to emit: the plan launches no kernel, or runs unfused in PyTorch\n"
    assert cli.main(["emit", "1,4/100,10", "--strategy", "medusa", "-o", str(tmp_path / "made")]) == 0
    assert capsys.readouterr().out == ""
    assert list((tmp_path / "made").iterdir()) == []


def test_a_merge_alone_is_emitted_for_rows_that_see_nothing() -> None:
    """Rows outside the dense mask are written by the merge kernel, the only one."""
    shape = Shape(4, 2, 16, dtype="fp32")
    schedule = lower(strategies.medusa().plan(Problem(TREE, shape, H200)), Problem(TREE, shape, H200))
    assert [source.kernel for source in emit(schedule, shape)] == ["merge"]
    trimmed = Tree.from_parents([-1], [30], rows=[(0, 30)])
    assert (
        emit(lower(strategies.medusa().plan(Problem(trimmed, shape, H200)), Problem(trimmed, shape, H200)), shape) == []
    )


def test_a_dense_class_says_what_it_is() -> None:
    shape = Shape(4, 2, 16, dtype="fp32")
    (config,) = lower(strategies.medusa().plan(Problem(TREE, shape, H200)), Problem(TREE, shape, H200)).configs
    assert (config.rows, config.mask, config.fused) == (4 * 2, "dense", False)
    assert (config.num_warps, config.num_stages) == (0, 0)
    assert str(config) == "8 head rows, unfused"
    assert dataclasses.replace(config, mask="bits").fused
