"""Final merge in kernels: what they are specialised for, extreme partials, and room to spare."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from support.final_merges import PROGRAMS, SHAPE, assert_attention, cut, scheduled, tensors
from treegen import KVRuns, Shape, Tree
from treegen.backends import oracle
from treegen.backends.triton_program import ProgramRoom, TritonProgram
from treegen.ir.errors import PlanError
from treegen.ir.verify import verify_schedule


def paged(tree: Tree, page_size: int) -> Tree:
    """The tree with its tokens in shuffled pages; a page of one token leaves it as it is."""
    if page_size == 1:
        return tree
    counts = -(-tree.tokens // page_size)
    pages = np.random.default_rng(page_size).permutation(int(counts.sum()) + 2)
    return tree.with_kv(KVRuns.from_pages(tree.tokens, np.split(pages, np.cumsum(counts))[:-1], page_size))


ATTACHED = [(0, 40), (1, 20), (1, 3), (2, 0), (3, 33), (3, 20), (4, 7), (5, 0), (6, 0), (6, 12), *[(7, 25)] * 8]
"""Rows at and above the cut, inside nodes, and such that see nothing; more than fit into a tile."""


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("mask", ["none", "interval", "token-bits"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_kernels_are_specialised_for(group: int, mask: str, page_size: int) -> None:
    tree = Tree.from_parents([-1, 0, 0, 1, 1, -1, 5, 2], [40, 20, 9, 33, 7, 0, 12, 25], rows=ATTACHED)
    tree = paged(tree, page_size)
    shape = Shape(2 * group, 2, 24, dtype="fp32", page_size=page_size)
    plan = cut(tree, 2, 1 if mask == "none" else 8, trim=True, mask="interval" if mask == "none" else mask)
    schedule = scheduled(plan, tree, shape)
    merging = [tile for tile in schedule.configs if tile.epilogue_merge]
    assert [tile.mask for tile in merging] == ["bits" if mask == "token-bits" else mask]
    assert len(schedule.merge_rows)
    for program in PROGRAMS:
        assert_attention(schedule, tree, shape, program)


@pytest.mark.parametrize("page_size", [1, 16])
def test_more_query_heads_than_tile_rows(page_size: int) -> None:
    """80 query heads per KV head take two or more tiles per row, the last one in part."""
    tree = paged(Tree.from_parents([-1, 0, 0, -1], [20, 5, 7, 0], rows=[(0, 20), (1, 5), (2, 7), (3, 0)]), page_size)
    shape = Shape(160, 2, 16, dtype="fp32", page_size=page_size)
    schedule = scheduled(cut(tree, 1, 2), tree, shape)
    assert [tile.epilogue_merge for tile in schedule.configs] == [False, True]
    for program in PROGRAMS:
        assert_attention(schedule, tree, shape, program)


@pytest.mark.parametrize("steps", [False, True])
def test_several_kernel_configs_merge(steps: bool) -> None:
    """The first tree's cohort takes the large tile, the second one's the small, in both rounds."""
    tree = Tree.parse("50(20(3*40))+30(9(5,6))")
    plan = dataclasses.replace(cut(tree, 2, 40, steps=steps), tiles=((32, 32), (16, 16)))
    schedule = scheduled(plan, tree)
    assert [tile.epilogue_merge for tile in schedule.configs] == [False] * (4 if steps else 2) + [True, True]
    assert schedule.launches == (6 if steps else 4)
    verify_schedule(schedule, tree.num_rows)
    for program in PROGRAMS:
        assert_attention(schedule, tree, SHAPE, program)


def test_reduce_and_final_give_the_same() -> None:
    tree = Tree.parse("70(33(20*3),9(40,1))")
    q, keys, values = tensors(tree)
    results = []
    for merge in ("reduce", "final"):
        schedule = scheduled(dataclasses.replace(cut(tree, 2, 2), merge=merge), tree)
        out, lse = torch.empty_like(q), torch.empty(5, 4)
        TritonProgram(schedule, SHAPE, q.device)(q, keys, values, out, lse, 0.25, 1.0)
        results.append((out, lse))
    torch.testing.assert_close(*results)


def test_extreme_partials() -> None:
    """Partials of scores near 200 and -200 on either side of the cut: one vanishes beside the other, without NaN."""
    tree = Tree.parse("40(20,30)")
    q, keys, values = torch.ones(2, 4, 16), torch.zeros(90, 2, 16), torch.randn(90, 2, 16)
    for above, below in ((200.0, -200.0), (-200.0, 200.0), (-200.0, -200.0)):
        keys[:40, :, 0], keys[40:, :, 0] = above, below
        expected = oracle.reference(tree, q, keys, values, oracle.OracleOptions(sm_scale=1.0))
        for program in PROGRAMS:
            out, lse = torch.empty_like(q), torch.empty(2, 4)
            program(scheduled(cut(tree, 1, 2), tree), SHAPE, q.device)(q, keys, values, out, lse, 1.0, 1.0)
            assert oracle.error(out, expected[0]) < 1e-4
            assert oracle.error(lse, expected[1]) < 1e-5


def test_surplus_room_changes_nothing() -> None:
    tree = Tree.parse("40(20(5,6),30(7,8))")
    schedule = scheduled(cut(tree, 2, 2), tree)
    size = schedule.size
    assert (size.epilogue_rows, size.epilogue_partials) == (4, 8)
    larger = dataclasses.replace(
        size, items=tuple(n + 3 for n in size.items), rows=9, epilogue_rows=20, epilogue_partials=50, slots=60
    )
    q, keys, values = tensors(tree)
    results = []
    for capacity in (size, larger):
        out, lse = torch.full_like(q, math.nan), torch.full((4, 4), math.nan)
        TritonProgram(schedule, SHAPE, q.device, ProgramRoom(capacity))(q, keys, values, out, lse, 0.25, 1.0)
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    for field in ("epilogue_rows", "epilogue_partials"):
        with pytest.raises(PlanError, match=rf"^capacity\.{field} = "):
            schedule.pack(dataclasses.replace(size, **{field: 1}))
