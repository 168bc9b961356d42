"""Bit masks: the words themselves, and kernels that read them, up to 64 rows in a tile."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, forests, plan_by_row_classes, schedule_counts, visible_slot_counts
from support.h200 import H200
from treegen import Shape, Tree, strategies
from treegen.backends import oracle
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import TritonProgram
from treegen.ir.groups import Group, Segment
from treegen.ir.kernel_config import MOST_BIT_ROWS
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify
from treegen.schedule.lower import lower
from treegen.schedule.segment_runs import bit_words
from treegen.target.problem import Problem

SHAPE = Shape(2, 2, 16, dtype="fp16")  # a head row per query row: 64 rows in the large tile
BACKENDS = {"torch": TorchProgram, "triton": TritonProgram}

_generator = torch.Generator().manual_seed(0)
_KEYS, _VALUES = (torch.randn(8_192, 2, 16, generator=_generator).half() for _ in range(2))
_QUERIES = torch.randn(1_024, 2, 16, generator=_generator).half()


def result(schedule: Schedule, tree: Tree, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    slots = tree.kv.last_slot + 1
    q, keys, values = _QUERIES[: tree.num_rows], _KEYS[:slots], _VALUES[:slots]
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan)
    BACKENDS[backend](schedule, SHAPE, q.device)(q, keys, values, out, lse, 0.25, 1.0)
    return out, lse


def assert_attention(schedule: Schedule, tree: Tree, backend: str) -> None:
    slots = tree.kv.last_slot + 1
    expected = oracle.reference(tree, _QUERIES[: tree.num_rows], _KEYS[:slots], _VALUES[:slots])
    for found, right in zip(result(schedule, tree, backend), expected, strict=True):
        assert oracle.error(found, right) <= oracle.TOLERANCE["fp16"]


def in_bits(plan: Plan, tree: Tree) -> Schedule:
    schedule = lower(dataclasses.replace(plan, mask="token-bits"), Problem(tree, SHAPE, H200))
    assert schedule.configs[0].mask == "bits"
    return schedule


def test_words_of_every_interval() -> None:
    lo, hi = (column.ravel() for column in np.meshgrid(np.arange(65), np.arange(65)))
    lo, hi = lo[lo <= hi], hi[lo <= hi]
    low, high = bit_words(lo, hi)
    for column in (low, high):
        assert np.array_equal(column.astype(np.int32), column)
    words = [(int(b) % 2**32 << 32) + int(a) % 2**32 for a, b in zip(low, high, strict=True)]
    assert words == [
        sum(1 << bit for bit in range(*interval)) for interval in zip(lo.tolist(), hi.tolist(), strict=True)
    ]
    assert len(words) == 65 * 66 // 2


def wide_tree(own: int) -> Tree:
    """64 rows below one root, apart at rows 1, 31, 32, 33 and 63; nodes of `own` tokens are seen by these parts."""
    parts = [1, 30, 1, 1, 30, 1]
    parents, tokens = [-1, *[0] * len(parts)], [70, *[own] * len(parts)]
    attached = [(node + 1, own) for node, count in enumerate(parts) for _ in range(count)]
    return Tree.from_parents(parents, tokens, rows=attached)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own", [128, 20, 5, 258])
def test_sixty_four_rows_in_one_tile(backend: str, own: int) -> None:
    """Full tiles (128 tokens), packed ones (20 and 5), and both, each seen on one side of bit 32."""
    tree = wide_tree(own)
    schedule = in_bits(strategies.deft_flatten(block=10_000).plan(Problem(tree, SHAPE, H200)), tree)
    (item,) = schedule.work_items
    assert item.rows == 64 == schedule.configs[0].rows
    assert item.tiles == 6 * (own // 128)
    assert item.packed_tiles > 0
    assert_attention(schedule, tree, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("step", "block"), [(1, 1), (16, 16), (128, 16)])
def test_rows_that_end_inside_a_node(backend: str, step: int, block: int) -> None:
    """Row i sees i + 1 steps: every word from all bits to the last alone, slot by slot, in blocks and in full tiles."""
    tree = Tree.from_parents([-1], [64 * step], rows=[(0, step * (i + 1)) for i in range(64)])
    schedule = in_bits(strategies.deft_node().plan(Problem(tree, SHAPE, H200)), tree)
    assert schedule.configs[0].run_tokens == block
    entries = [entry for entry in [*schedule.tiles.tolist(), *schedule.packed_runs.tolist()] if entry[1]]
    words = {((hi % 2**32) << 32) + lo % 2**32 for _, _, lo, hi in entries}
    assert words == {2**64 - 2**bit for bit in range(64)}
    assert_attention(schedule, tree, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unseen_runs_are_read_and_ignored(backend: str) -> None:
    """Full and packed tiles that no row of the item sees, before and behind those that some see."""
    tree = Tree.from_parents([-1, -1, -1], [150, 90, 64], rows=[(1, 90)] * 40 + [(2, 64)] * 24 + [(0, 150)])
    node = [(0, 0, 150), (1, 0, 90), (2, 0, 64)]
    ranks = {1: (1, 41), 2: (41, 65)}
    both = Group(((1, 65),), tuple(Segment(*node[v], seen) for v, seen in ((0, (0, 0)), (1, (0, 40)), (0, (0, 0)))))
    last = Group((ranks[2],), tuple(Segment(*node[v], seen) for v, seen in ((1, (0, 0)), (2, (0, 24)), (0, (0, 0)))))
    first = Group(((0, 1),), (Segment(*node[0], (0, 1)), Segment(*node[1], (0, 0))))
    plan = Plan.from_groups("by hand", [both, last, first])
    verify(plan, tree)
    schedule = in_bits(plan, tree)
    assert sorted(item.rows for item in schedule.work_items) == [1, 24, 64]
    unseen = [
        entry
        for entry in [*schedule.tiles.tolist(), *schedule.packed_runs.tolist()]
        if entry[1] and entry[2:] == [0, 0]
    ]
    assert {length for _, length, _, _ in unseen} >= {128, 16}
    assert_attention(schedule, tree, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_rows_than_a_word_has_bits(backend: str) -> None:
    """150 rows are cut every 64, also where the plan asks for tiles of 128 rows."""
    tree = Tree.from_parents([-1, 0, 0], [70, 30, 40], rows=[(1, 1 + i % 30) for i in range(90)] + [(2, 40)] * 60)
    plan = strategies.deft_flatten(block=1000).plan(Problem(tree, SHAPE, H200))
    for tiles in ((), ((128, 32),)):
        schedule = in_bits(dataclasses.replace(plan, tiles=tiles), tree)
        assert schedule.configs[0].rows == (128 if tiles else 64)
        assert sorted(item.rows for item in schedule.work_items) == [22, 64, MOST_BIT_ROWS]
        assert_attention(schedule, tree, backend)


@examples(70)
@given(
    tree=forests(30, 90, salt=800),
    seed=st.integers(0, 2**20),
    wide=st.booleans(),
    mask=st.sampled_from(("token-bits", "row-bits")),
)
def test_bits_say_what_intervals_say(tree: Tree, seed: int, wide: bool, mask: str) -> None:
    """Any lawful plan, groups of several rank intervals and runs that nobody sees included."""
    plan = plan_by_row_classes(tree, seed, 1 + seed % 3, unseen=True)
    plan = dataclasses.replace(plan, tiles=((128, 32), (32, 16)) if wide else ())
    schedule = lower(dataclasses.replace(plan, mask=mask), Problem(tree, SHAPE, H200))
    assert all(item.rows <= MOST_BIT_ROWS for item in schedule.work_items)
    assert all(tile.mask in ("none", "bits") for tile in schedule.configs)
    slots = tree.kv.last_slot + 1
    assert np.array_equal(schedule_counts(schedule, tree.num_rows, slots), visible_slot_counts(tree, slots))
    if tree.num_rows:
        assert_attention(schedule, tree, "torch")


@examples(6)
@given(tree=forests(12, 90, rows=("inside", "every", "mixed"), salt=801), seed=st.integers(0, 2**20))
def test_random_bits_in_the_kernels(tree: Tree, seed: int) -> None:
    if tree.num_rows:
        plan = plan_by_row_classes(tree, seed, 2, unseen=True)
        assert_attention(lower(dataclasses.replace(plan, mask="row-bits"), Problem(tree, SHAPE, H200)), tree, "triton")


@examples(70)
@given(tree=forests(40, 90, salt=802), block=st.sampled_from((1, 16, 100, 128, 4096)))
def test_flatten_with_bits_is_flatten_with_intervals(tree: Tree, block: int) -> None:
    """To the last bit: the same tiles in the same order, only who sees them is stored in another way."""
    schedules = [
        lower(strategies.deft_flatten(block, mask).plan(Problem(tree, SHAPE, H200)), Problem(tree, SHAPE, H200))
        for mask in ("interval", "bits")
    ]
    assert {tile.mask for tile in schedules[0].configs} <= {"none", "interval"}
    assert {tile.mask for tile in schedules[1].configs} <= {"none", "bits"}
    assert np.array_equal(schedules[0].items, schedules[1].items)
    if tree.num_rows:
        for one, other in zip(*(result(schedule, tree, "torch") for schedule in schedules), strict=True):
            assert torch.equal(one, other)


def test_flatten_with_bits_is_flatten_with_intervals_in_the_kernels() -> None:
    tree = wide_tree(20)
    found = [
        result(
            lower(strategies.deft_flatten(96, mask).plan(Problem(tree, SHAPE, H200)), Problem(tree, SHAPE, H200)),
            tree,
            "triton",
        )
        for mask in ("interval", "bits")
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
