"""Lowering and Schedule: row tiles, launch order, packed runs, partial slots, merge lists, the arena, and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, forests, plan_by_row_classes
from support.h200 import H200
from support.planted_faults import with_slot
from treegen import KVRuns, Shape, Tree, strategies
from treegen.ir.arena import ALIGNMENT, SECTIONS, SURPLUS_MERGE, Arena, ArenaSizes
from treegen.ir.errors import FormatError, PlanError, ShapeError
from treegen.ir.groups import Group, Segment
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify_schedule
from treegen.ir.work_items import ITEM_FIELDS
from treegen.schedule import pack_runs
from treegen.schedule.lower import lower
from treegen.strategies import Strategy, cohort, strategy_from, strategy_names
from treegen.strategies.passes import MergeLast
from treegen.target.problem import Problem
from treegen.target.targets import target_from

SHAPE = Shape(32, 8, 128, dtype="bf16")  # a group of 4 heads: 16 rows in a tile of 64 head rows
ONE_HEAD = Shape(8, 8, 128, dtype="bf16")


def schedule_of(tree: Tree | str, strategy: Strategy | None = None, shape: Shape = SHAPE) -> Schedule:
    tree = Tree.parse(tree) if isinstance(tree, str) else tree
    return lower((strategy or strategies.deft_node()).plan(Problem(tree, shape, H200)), Problem(tree, shape, H200))


def entries(schedule: Schedule, number: int) -> Iterator[tuple[int, int, int, int]]:
    """(slot, length, lo, hi) of what item `number` walks, without padding."""
    item = schedule.work_items[number]
    tile = schedule.configs[np.searchsorted(schedule.config_indptr, number, side="right") - 1]
    yield from map(tuple, schedule.tiles[item.tile0 : item.tile0 + item.tiles].tolist())
    packed = schedule.packed_runs[item.run0 : item.run0 + item.packed_tiles * tile.runs_per_tile].tolist()
    yield from (tuple(entry) for entry in packed if entry[1])


def tokens_of(schedule: Schedule) -> list[int]:
    return [sum(length for _, length, _, _ in entries(schedule, item)) for item in range(len(schedule.items))]


def rows_of(schedule: Schedule, number: int) -> list[int]:
    item = schedule.work_items[number]
    return schedule.rows[item.row0 : item.row0 + item.rows].tolist()


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
        patched.setattr(pack_runs, "MANY_PIECES", 0)
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


# Results


def test_rows_with_a_single_item_are_final() -> None:
    schedule = schedule_of("100(20,30)", strategies.query())
    assert [item.partial0 for item in schedule.work_items] == [-1, -1]
    assert (schedule.num_partials, len(schedule.merge_rows), schedule.launches) == (0, 0, 1)


def test_rows_with_several_items_are_merged() -> None:
    schedule = schedule_of("100(20,30)+7")
    assert [(item.group, item.rows, item.partial0) for item in schedule.work_items] == [
        (0, 2, 0),
        (2, 1, 2),
        (1, 1, 3),
        (3, 1, -1),
    ]
    assert schedule.merge_rows.tolist() == [0, 1]
    assert schedule.merge_indptr.tolist() == [0, 2, 4]
    assert schedule.merge_partials.tolist() == [0, 3, 1, 2]
    assert (schedule.num_partials, schedule.launches) == (4, 2)


def test_final_rows_of_a_shared_item_are_partial_too() -> None:
    """An item writes final output only when none of its rows is merged."""
    tree = Tree.from_parents([-1, 0], [64, 64], rows=[(0, 64), (1, 64)])
    schedule = schedule_of(tree)
    assert all(item.partial0 >= 0 for item in schedule.work_items)
    assert np.diff(schedule.merge_indptr).tolist() == [1, 2]
    verify_schedule(schedule, 2)


def test_rows_that_see_nothing_have_an_empty_merge_list() -> None:
    tree = Tree.from_parents([-1, 0], [0, 5], rows=[(0, 0), (1, 5), (1, 0)])
    schedule = schedule_of(tree)
    assert schedule.merge_rows.tolist() == [0, 2]
    assert schedule.merge_indptr.tolist() == [0, 0, 0]


def test_a_tree_without_rows_launches_nothing() -> None:
    schedule = schedule_of(Tree.from_parents([-1], [5], rows=[]))
    assert (len(schedule.items), schedule.launches, schedule.num_partials) == (0, 0, 0)
    assert schedule.pack().array[:1].tolist() == [0]


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda s: {"items": with_slot(s, 0, int(s.items[1, 6]))}, "partial0"),
        (lambda s: {"items": with_slot(s, 0, -1)}, "row 0"),
        (lambda s: {"items": with_slot(s, 0, 1000)}, "partial0"),
        (lambda s: {"merge_partials": s.merge_partials[::-1]}, "merge_partials"),
        (lambda s: {"merge_rows": s.merge_rows[[1, 0, 2]]}, "merge_partials"),
        (lambda s: {"merge_rows": s.merge_rows[[1, 1, 2]]}, "row 0"),
        (lambda s: {"rows": s.rows[[1, 0, 2, *range(3, len(s.rows))]]}, "merge_partials"),
    ],
)
def test_broken_schedules_are_rejected(change: Callable[[Schedule], dict[str, object]], argument: str) -> None:
    """Two items on one slot, rows written twice or never, lists that name other rows' slots."""
    schedule = schedule_of("100(20,30,40)")
    verify_schedule(schedule, 3)
    with pytest.raises(PlanError) as caught:
        verify_schedule(dataclasses.replace(schedule, **change(schedule)), 3)
    assert str(caught.value).startswith(f"{argument} = ")
    assert "\n" not in str(caught.value)


def test_a_schedule_for_more_rows_is_rejected() -> None:
    with pytest.raises(PlanError, match="row 3 = 0 writes"):
        verify_schedule(schedule_of("100(20,30,40)"), 4)


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


# The arena


def test_the_table_of_sections_names_the_fields_of_arenas_capacities_and_schedules() -> None:
    assert Arena._fields == ("array", *(section.name for section in SECTIONS))
    rooms, tables = ({getattr(section, column) for section in SECTIONS} for column in ("room", "table"))
    assert rooms == {field.name for field in dataclasses.fields(ArenaSizes)} - {"slots"}
    divisions = {"config_indptr", "round_indptr", "merge_round_indptr"}  # these are for the host
    assert tables == {field.name for field in dataclasses.fields(Schedule)} - {"configs", "fixed"} - divisions


def unpacked(arena: Arena, schedule: Schedule) -> dict[str, list[int]]:
    """The sections of an arena as kernels address them, cut to what the schedule holds."""
    array = arena.array

    def section(begin: int, values: np.ndarray) -> list[int]:
        return array[begin : begin + values.size].tolist()

    result = {
        "rows": section(arena.rows, schedule.rows),
        "tiles": section(arena.tiles, schedule.tiles),
        "packed_runs": section(arena.packed_runs, schedule.packed_runs),
        "merge_partials": section(arena.merge_partials, schedule.merge_partials),
        "work_indptr": section(arena.work_indptr, schedule.work_indptr),
        "work": section(arena.work, schedule.work),
        "epilogue_indptr": section(arena.epilogue_indptr, schedule.epilogue_indptr),
        "epilogue_partials": section(arena.epilogue_partials, schedule.epilogue_partials),
    }
    for s, (_, merges) in enumerate(schedule.rounds):
        result[f"merge_rows {s}"] = section(arena.merge_rows[s], schedule.merge_rows[merges])
        result[f"merge_indptr {s}"] = section(
            arena.merge_indptr[s], schedule.merge_indptr[merges.start : merges.stop + 1]
        )
    for c, begin in enumerate(arena.items):
        result[f"items {c}"] = section(begin, schedule.items[schedule.config_indptr[c] : schedule.config_indptr[c + 1]])
    return result


def contents(schedule: Schedule) -> dict[str, list[int]]:
    names = (
        "rows",
        "tiles",
        "packed_runs",
        "merge_partials",
        "work_indptr",
        "work",
        "epilogue_indptr",
        "epilogue_partials",
    )
    result = {name: getattr(schedule, name).ravel().tolist() for name in names}
    for c in range(len(schedule.configs)):
        items = schedule.items[schedule.config_indptr[c] : schedule.config_indptr[c + 1]].tolist()
        for item in items:
            rows = schedule.rows[item[0] : item[0] + item[1]].tolist()
            item[-1] = rows[0] if rows == [*range(rows[0], rows[0] + len(rows))] else -1
        result[f"items {c}"] = [value for item in items for value in item]
    for s, (_, merges) in enumerate(schedule.rounds):
        result[f"merge_rows {s}"] = schedule.merge_rows[merges].tolist()
        result[f"merge_indptr {s}"] = schedule.merge_indptr[merges.start : merges.stop + 1].tolist()
    return result


@examples(80)
@given(
    tree=forests(30, salt=2),
    name=st.sampled_from((*strategy_names(), "row-configs", "merge-last")),
    extra=st.lists(st.integers(0, 40), min_size=8, max_size=8),
)
def test_the_arena_holds_everything_at_any_capacity(tree: Tree, name: str, extra: list[int]) -> None:
    if name == "row-configs":
        schedule = lower(plan_by_row_classes(tree, 0, 3, unseen=True), Problem(tree, SHAPE, H200))
    elif name == "merge-last":
        plan = MergeLast().apply(strategies.cascade().plan(Problem(tree, ONE_HEAD, H200)), tree)
        schedule = lower(plan, Problem(tree, ONE_HEAD, H200))
    else:
        schedule = schedule_of(tree, strategy_from(name))
    size = schedule.size
    capacity = ArenaSizes(
        tuple(count + extra[0] for count in size.items),
        size.rows + extra[1],
        size.tiles + extra[2],
        size.packed_runs + extra[3],
        tuple(count + extra[4] for count in size.merges),
        size.merge_partials + extra[5],
        size.slots,
        size.workers + (extra[6] if size.workers else 0),
        size.work + extra[6],
        size.epilogue_rows + (extra[7] if size.epilogue_rows else 0),
        size.epilogue_partials + extra[7],
    )
    exact, larger = schedule.pack(), schedule.pack(capacity)
    assert len(exact.array) <= len(larger.array)
    for arena in (exact, larger):
        assert arena.array.dtype == np.int32
        assert unpacked(arena, schedule) == contents(schedule)
        rows_at = ITEM_FIELDS.index("rows")
        for c, begin in enumerate(arena.items):
            room = (capacity if arena is larger else size).items[c]
            items = arena.array[begin : begin + room * len(ITEM_FIELDS)].reshape(room, len(ITEM_FIELDS))
            assert not items[size.items[c] :, rows_at].any()
        for s, begin in enumerate(arena.merge_rows):
            room = (capacity if arena is larger else size).merges[s]
            assert (arena.array[begin + size.merges[s] : begin + room] == SURPLUS_MERGE).all()
        places = (getattr(arena, section.name) for section in SECTIONS)
        offsets = [*np.hstack([*places]).tolist(), len(arena.array)]
        assert all(offset % ALIGNMENT == 0 for offset in offsets)
        assert offsets == sorted(offsets)


def test_the_arena_leaves_room_to_read_one_step_ahead() -> None:
    """Kernels load the next step's entries before they know that there is none."""
    schedule = schedule_of("64(16)")
    arena = schedule.pack()
    (tile,) = schedule.configs
    assert arena.packed_runs - arena.tiles >= (len(schedule.tiles) + 1) * 4
    assert arena.merge_partials - arena.packed_runs >= (len(schedule.packed_runs) + tile.runs_per_tile) * 4


def test_arenas_of_one_capacity_have_one_layout() -> None:
    """A growing tree reuses the offsets that a CUDA graph has captured."""
    capacity = ArenaSizes((64,), 64, 512, 512, (64,), 256, 256)
    layouts = {
        schedule_of(text).pack(capacity)._replace(array=None)
        for text in ("100(20,30)", "100(21(5*3),31)", "9", "700(8*40)")
    }
    assert len(layouts) == 1


@pytest.mark.parametrize("field", ["items", "rows", "tiles", "packed_runs", "merges", "merge_partials", "slots"])
def test_a_capacity_that_is_too_small_is_named(field: str) -> None:
    schedule = schedule_of("200(20,30)")
    needed = getattr(schedule.size, field)
    room = tuple(count - 1 for count in needed) if field in ("items", "merges") else needed - 1
    with pytest.raises(PlanError) as caught:
        schedule.pack(dataclasses.replace(schedule.size, **{field: room}))
    assert str(caught.value).startswith(f"capacity.{field} = ")
    assert "declare a larger capacity" in str(caught.value)


def test_a_capacity_for_other_classes_is_rejected() -> None:
    schedule = schedule_of("200(20,30)")
    with pytest.raises(PlanError, match=r"capacity\.items"):
        schedule.pack(dataclasses.replace(schedule.size, items=(9, 9)))


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
