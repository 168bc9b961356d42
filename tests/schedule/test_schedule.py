"""Lowering: row tiles, launch order, packed runs and kernel configs; schedules as JSON and as text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, forests
from support.h200 import H200
from support.lowered_trees import SHAPE, entries, rows_of, schedule_of, tokens_of
from treegen import KVRuns, Shape, Tree, strategies
from treegen.ir.errors import FormatError, PlanError, ShapeError
from treegen.ir.groups import Group, Segment
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify_schedule
from treegen.schedule import pack_runs
from treegen.schedule.lower import lower
from treegen.strategies import cohort, strategy_from, strategy_names
from treegen.target.problem import Problem
from treegen.target.targets import target_from

# Items


def test_a_group_is_cut_into_row_tiles() -> None:
    schedule = schedule_of("500(0*100)")
    assert [item.rows for item in schedule.work_items] == [16] * 6 + [4]
    assert [row for item in range(7) for row in rows_of(schedule, item)] == list(range(100))
    assert {item.group for item in schedule.work_items} == {0}


@pytest.mark.parametrize(("heads", "rows"), [(8, 64), (24, 21), (32, 16), (64, 8), (512, 1), (1024, 1)])
def test_rows_of_a_tile_follow_from_the_heads(heads: int, rows: int) -> None:
    """A tile holds 64 head rows: whole rows of them, and at least one."""
    schedule = schedule_of("500(0*100)", shape=Shape(heads, 8, 128))
    assert schedule.work_items[0].rows == rows
    assert len(schedule.items) == -(-100 // rows)


def test_items_hold_rows_in_the_callers_order() -> None:
    tree = Tree.from_parents([-1, 0, 0], [50, 5, 6], rows=[(2, 6), (1, 5), (0, 50), (1, 3)])
    schedule = schedule_of(tree)
    found = {schedule.work_items[item].group: rows_of(schedule, item) for item in range(3)}
    assert found == {0: [2, 3, 1, 0], 1: [3, 1], 2: [0]}  # by rank: node 0, node 1 after 3 and 5 tokens, node 2


def test_the_longest_items_come_first() -> None:
    schedule = schedule_of("100(900*3,20,3000(40,1))")
    assert tokens_of(schedule) == [3000, 900, 900, 900, 100, 40, 20, 1]
    assert [item.group for item in schedule.work_items] == [5, 1, 2, 3, 0, 6, 4, 7]


@examples(60)
@given(tree=forests(30, salt=1), name=st.sampled_from(strategy_names()))
def test_order_and_no_empty_items(tree: Tree, name: str) -> None:
    schedule = schedule_of(tree, strategy_from(name))
    tokens = tokens_of(schedule)
    assert all(tokens)
    for begin, end in pairwise(schedule.config_indptr.tolist()):
        assert tokens[begin:end] == sorted(tokens[begin:end], reverse=True)


def test_full_tiles_and_packed_runs() -> None:
    """150 tokens are two tiles of 64 and packed runs of 16 and 6; those of several short nodes share a tile."""
    schedule = schedule_of(Tree.parse("150(20,70(64),13)+11"), strategies.deft_flatten(block=1000))
    (tile,) = schedule.configs
    assert (tile.tokens, tile.run_tokens, tile.runs_per_tile, tile.mask) == (32, 16, 2, "interval")
    assert [entry[:2] for entry in entries(schedule, 0)] == [
        *((slot, 32) for slot in (0, 32, 64, 96, 170, 202, 240, 272)),
        (128, 16),
        (144, 6),
        (150, 16),
        (166, 4),
        (234, 6),
        (304, 13),
        (317, 11),
    ]
    item = schedule.work_items[0]
    assert (item.tiles, item.packed_tiles) == (8, 4)
    assert schedule.packed_runs[item.run0 + 7].tolist() == [0, 0, 0, 0]  # the last tile is padded


def test_tiles_never_cross_a_run() -> None:
    """A node in two places of 40 slots: each run has its own full tile and its own packed runs."""
    tree = Tree.parse("80")
    tree = tree.with_kv(KVRuns.from_runs(tree.tokens, [[(100, 40), (0, 40)]]))
    schedule = schedule_of(tree)
    assert list(entries(schedule, 0)) == [(100, 32, 0, 1), (0, 32, 0, 1), (132, 8, 0, 1), (32, 8, 0, 1)]


@pytest.mark.parametrize("page_size", [16, 32])
def test_pages_keep_runs_of_16(page_size: int) -> None:
    tree = Tree.parse("100(20*8)")
    pages = [list(range(50, 50 - 2 * -(-int(count) // page_size), -2)) for count in tree.tokens]
    schedule = schedule_of(tree.with_kv(KVRuns.from_pages(tree.tokens, pages, page_size)))
    assert schedule.configs[0].run_tokens == 16


def test_scattered_slots_are_read_one_by_one() -> None:
    """Blocks of 16 would be nearly empty: every entry of a tile is then one slot."""
    tree = Tree.parse("50(30,30)")
    slots = np.random.default_rng(0).permutation(110)
    schedule = schedule_of(tree.with_kv([slots[:50], slots[50:80], slots[80:]]))
    (tile,) = schedule.configs
    assert (tile.run_tokens, tile.runs_per_tile) == (1, tile.tokens)
    assert len(schedule.tiles) == 0
    assert all(length == 1 for _, length, _, _ in entries(schedule, 0))
    assert sorted(tokens_of(schedule)) == [30, 30, 50]
    verify_schedule(schedule, 2)


@examples(60)
@given(tree=forests(30, salt=63), name=st.sampled_from(strategy_names()))
def test_tables_of_many_pieces_are_those_of_few(tree: Tree, name: str) -> None:
    """Where most of many pieces are whole runs, only those of the others are gone through."""
    expected = schedule_of(tree, strategy_from(name))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pack_runs, "MANY_RUNS", 0)
        found = schedule_of(tree, strategy_from(name))
    assert np.array_equal(found.tiles, expected.tiles)
    assert np.array_equal(found.packed_runs, expected.packed_runs)


def test_masks_are_intervals_of_the_items_own_rows() -> None:
    """20 rows after 1 to 20 tokens of a node, in tiles of 16 and 4: the second tile counts its own rows from 0."""
    tree = Tree.from_parents([-1], [20], rows=[(0, sees) for sees in range(1, 21)])
    schedule = schedule_of(tree)
    assert schedule.configs[0].mask == "interval"
    seen = {
        len(rows_of(schedule, item)): {slot: (lo, hi) for slot, _, lo, hi in entries(schedule, item)}
        for item in range(2)
    }
    assert seen[16] == {slot: (slot, 16) for slot in range(16)}
    assert seen[4] == {**dict.fromkeys(range(17), (0, 4)), 17: (1, 4), 18: (2, 4), 19: (3, 4)}


def test_unmasked_plans_run_in_an_unmasked_class() -> None:
    assert schedule_of("100(20,30)").configs[0].mask == "none"
    assert schedule_of("100(20,30)", strategies.deft_flatten()).configs[0].mask == "interval"
    assert schedule_of("100(20,30)", strategies.deft_flatten(mask="bits")).configs[0].mask == "bits"
    assert schedule_of("100(20,30)", strategies.query()).configs[0].mask == "none"


def test_row_tiles_that_see_nothing_are_dropped() -> None:
    """40 rows of which only the last four see the second segment: no item for the first two row tiles of it."""
    tree = Tree.from_parents([-1, -1], [64, 64], rows=[(0, 0)] * 36 + [(1, 64)] * 4)
    plan = Plan.from_groups("by-hand", [Group(((0, 40),), (Segment(1, 0, 64, (36, 40)),))])
    schedule = lower(plan, Problem(tree, SHAPE, H200))
    assert [item.rows for item in schedule.work_items] == [8]
    assert rows_of(schedule, 0) == list(range(32, 40))
    assert schedule.merge_rows.tolist() == list(range(32))  # rows without any item are written by the merge
    assert schedule.merge_partials.tolist() == []
    verify_schedule(schedule, 40)


# Kernel configs


@pytest.mark.parametrize(
    ("shape", "leaves", "rows", "tokens"),
    [
        (SHAPE, 100, 64, 64),
        (SHAPE, 5, 64, 64),
        (SHAPE, 4, 16, 32),
        (Shape(8, 8, 64), 16, 16, 32),
        (Shape(32, 8, 256), 100, 64, 32),
        (Shape(32, 8, 128, dtype="fp32"), 100, 32, 32),
        (Shape(32, 8, 128, dtype="fp32"), 4, 16, 32),
    ],
)
def test_tiles_on_an_h200(shape: Shape, leaves: int, rows: int, tokens: int) -> None:
    """16 head rows where the widest group has no more, else 64; less where registers or shared memory are short."""
    (tile,) = schedule_of(f"900(16*{leaves})", shape=shape).configs
    assert (tile.rows, tile.tokens, tile.run_tokens) == (rows, tokens, 16)


def test_shapes_that_fit_nowhere_are_rejected() -> None:
    tree, tiny = Tree.parse("900(9*100)"), dataclasses.replace(H200, name="tiny", shared_bytes=16_384)
    with pytest.raises(ShapeError, match="head_dim = 128: needs more than the 16384 bytes of shared memory of tiny"):
        lower(strategies.deft_node().plan(Problem(tree, SHAPE, tiny)), Problem(tree, SHAPE, tiny))


# Forms


@examples(60)
@given(tree=forests(25, salt=3), name=st.sampled_from(strategy_names()))
def test_json_round_trip(tree: Tree, name: str) -> None:
    schedule = schedule_of(tree, strategy_from(name))
    back = Schedule.from_json(schedule.to_json())
    assert back.configs == schedule.configs
    assert back.to_json() == schedule.to_json()
    assert back.text() == schedule.text()
    assert back.pack().array.tolist() == schedule.pack().array.tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, ("schedule.format = 2", "newer")),
        ({"kind": "plan"}, ("schedule.kind", "another kind")),
        ({"extra": 0}, ("schedule.extra = 0", "unknown field")),
        ({"items": [[1, 2, 3]]}, ("schedule.items", "8 columns")),
        ({"items": [1]}, ("schedule.items", "8 columns")),
        ({"items": [["a"] * 8]}, ("schedule.items", "not an integer")),
        ({"tiles": 5}, ("schedule.tiles", "4 columns")),
        ({"tiles": [None]}, ("schedule.tiles", "4 columns")),
        ({"rows": "01"}, ("schedule.rows", "not a list")),
        ({"configs": [{"rows": 16}]}, ("schedule.configs",)),
        ({"configs": [5]}, ("schedule.configs",)),
        ({"configs": 5}, ("schedule.configs",)),
        ({"configs": []}, ("config_indptr",)),
        ({"config_indptr": [0, 1]}, ("config_indptr",)),
        ({"config_indptr": []}, ("config_indptr",)),
        ({"merge_partials": []}, ("merge_indptr",)),
        ({"merge_indptr": []}, ("merge_indptr",)),
    ],
)
def test_bad_json_is_rejected(change: dict[str, object], words: tuple[str, ...]) -> None:
    form = json.loads(schedule_of("200(20,30)").to_json())
    with pytest.raises((FormatError, PlanError)) as caught:
        Schedule.from_json(json.dumps({**form, **change}))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_schedule_cannot_be_changed() -> None:
    schedule = schedule_of("200(20,30)")
    with pytest.raises(ValueError, match="read-only"):
        schedule.items[0, 0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.rows = schedule.rows


@pytest.mark.parametrize("name", ["query", "deft-node", "deft-node-chunk", "deft-flatten"])
def test_plan_and_schedule_text(name: str, golden: Callable[[str], None]) -> None:
    tree = Tree.parse("300(40(3*4),140(9*2))+15")
    plan = strategy_from(name).plan(Problem(tree, SHAPE, H200))
    golden(f"{plan}\n{lower(plan, Problem(tree, SHAPE, H200))}")


def test_text_is_short() -> None:
    schedule = schedule_of("9(1*500)", strategies.query())
    assert schedule.text(most_items=0).splitlines()[-1] == "    ... 500 more items"
    assert len(str(schedule).splitlines()) == 35


def test_columns_by_name() -> None:
    schedule = schedule_of("200(20,30)")
    assert schedule.column("rows").tolist() == [item.rows for item in schedule.work_items]
    assert schedule.column("group").tolist() == [item.group for item in schedule.work_items]


@pytest.mark.parametrize("lengths", [(70, 33), (64, 64), (3, 1)])
def test_slots_may_reach_the_highest_number(lengths: tuple[int, int]) -> None:
    """Tables are made in 32 bits, in which the end of the last run may not fit."""
    first = 2**31 - 1 - sum(lengths)
    runs = [[(first, lengths[0])], [(first + lengths[0], lengths[1])]]
    tree = Tree.from_parents([-1, 0], lengths, kv=KVRuns.from_runs(lengths, runs))
    shape, strategy = Shape(4, 2, 16), strategies.cohort()
    schedule = lower(strategy.plan(Problem(tree, shape, H200)), Problem(tree, shape, H200))
    entries = np.concatenate([schedule.tiles, schedule.packed_runs]).astype(np.int64)
    read = [slot for begin, length in entries[:, :2] for slot in range(begin, begin + length)]
    assert sorted(read) == list(range(first, first + sum(lengths)))


def test_items_as_long_as_one_another_come_in_the_order_of_their_kv() -> None:
    """Eight cohorts read a prefix in four parts: all read the first, then all the second, and so on."""
    tree, shape, target = Tree.parse("1,32/4096,16"), Shape(4, 1, 64, dtype="fp16"), target_from("h200")
    schedule = lower(cohort(head_rows=16, split=1024).plan(Problem(tree, shape, target)), Problem(tree, shape, target))
    begins = schedule.tiles[schedule.column("tile0")[:32], 0]
    assert begins.tolist() == [part * 1024 for part in range(4) for _ in range(8)]
    assert len(set(schedule.column("row0")[:8].tolist())) == 8
