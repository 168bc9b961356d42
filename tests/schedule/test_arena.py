"""The arena: it holds a schedule at any capacity, and leaves room to read ahead."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, forests, plan_by_row_classes
from support.h200 import H200
from support.lowered_trees import ONE_HEAD, SHAPE, schedule_of
from treegen import Tree, strategies
from treegen.ir.arena import ALIGNMENT, SECTIONS, SURPLUS_MERGE, Arena, ArenaSizes
from treegen.ir.errors import PlanError
from treegen.ir.schedule import Schedule
from treegen.ir.work_items import ITEM_FIELDS
from treegen.schedule.lower import lower
from treegen.strategies import strategy_from, strategy_names
from treegen.strategies.passes import MergeLast
from treegen.target.problem import Problem


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
