"""Merge kernels: how many partials rows have, and how thread blocks divide the work."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import treegen
from support.batch_events import Server
from support.batch_loops import Case, check_step, made
from support.kv_caches import tensors
from treegen import Shape, Tree
from treegen.backends import triton_program
from treegen.codegen.merge_forms import merge_key, merge_key_of
from treegen.ir.arena import SURPLUS_MERGE
from treegen.ir.keys import MergeKey
from treegen.runtime.batch_kernel import BatchKernel
from treegen.strategies import query


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("partials", [2, 4, 5, 16, 17, 32, 33, 64, 70])
def test_rows_of_any_number_of_partials(partials: int, head_dim: int) -> None:
    """Few rows are merged in one load for each thread block, which takes a slice of the elements if they are many."""
    shape = Shape(3, 1, head_dim, dtype="fp32")
    key = merge_key(shape, several_rounds=False, rows=2, longest=partials)
    assert key.parts >= min(partials, 64)
    assert key.slices > 1 or partials <= 4
    tree = Tree.from_levels([1, 2], [16 * (partials - 1), 9])
    kernel = treegen.compile(tree, strategy=query(split=16), shape=shape, backend="triton")
    report = kernel.verify(*tensors(tree, sum(tree.tokens), shape))
    assert report.passed, str(report)
    lists = kernel.schedule.merge_indptr[1:] - kernel.schedule.merge_indptr[:-1]
    assert lists.tolist() == [partials, partials]


def arrive(server: Server, tokens: int) -> None:
    """A request of this length comes."""
    pages = [server.take() for _ in range(server.room(tokens))]
    seat = server.batch.add(tokens)
    server.of_seat[seat], server.length[seat] = pages, tokens
    server.fill(pages, 0, tokens)


def lists_of(kernel: BatchKernel) -> tuple[list[int], list[int]]:
    """The number of partials of each merge, of the plan and of requests alone."""
    tables, room = kernel.program.tables, kernel.form.room
    rows, indptr = (tables[name][: room.merges + 1].numpy() for name in ("merge_rows", "merge_indptr"))
    counts = np.where((rows[:-1] != SURPLUS_MERGE) & (indptr[1:] >= 0), indptr[1:] - indptr[:-1], 0).tolist()
    return [count for count in counts[: room.rows] if count], [count for count in counts[room.rows + 1 :] if count]


FEW = [400]
MANY = [130] * 8


@pytest.mark.parametrize(
    ("planned", "alone", "at_once"),
    [(FEW, [700], None), (MANY, [700], None), (FEW, [400, 90], None), (MANY, [], None), (MANY, [700, 600], 1)],
    ids=["both divided", "only the second", "only the first", "none", "too few thread blocks"],
)
def test_lists_of_a_running_batch(
    planned: list[int], alone: list[int], at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of merges is divided if it is short, and its rows have more partials than a thread block takes."""

    def short(*arguments: Any, **options: Any) -> MergeKey:
        return replace(merge_key_of(*arguments, **options), heads=1, parts=2)

    monkeypatch.setattr(triton_program, "merge_key_of", short)
    if at_once is not None:
        monkeypatch.setattr("treegen.runtime.batch_room.items_at_once", lambda sms, lanes: at_once)
    shape = Shape(4, 2, 64, dtype="fp32", page_size=16)
    case = Case(shape, strategy=query(split=64), rows=10, most_tokens=720, sms=24)
    server, kernel = made(case, 1, "triton")
    for tokens in planned:
        arrive(server, tokens)
    kernel.update(server.batch)
    for tokens in alone:
        arrive(server, tokens)
    kernel.seat(server.batch)
    lengths = server.write()
    kernel.step()
    q = torch.randn(server.query_rows, 4, 64, generator=torch.Generator().manual_seed(1))
    check_step(server, case, kernel, lengths, "the step", q)
    first, second = lists_of(kernel)
    assert min(first) > 1
    assert len(first) == len(planned)
    assert second == [math.ceil(max(alone, default=0) / 256)] * len(alone)
