"""Arena: a schedule laid out as one int32 array, so that it goes to the device in one copy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from operator import attrgetter, le, sub
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from treegen.ir.arrays import Ints, int32_ramp
from treegen.ir.errors import InputError, PlanError

if TYPE_CHECKING:
    from treegen.ir.schedule import Schedule

_INT32 = np.dtype(np.int32)
_MOST_ROOM = 1 << 28  # words of the tables of a fixed capacity
ALIGNMENT = 16
"""Every section of the arena begins at a multiple of this many int32 (64 bytes)."""

SURPLUS_MERGE = -(2**31)
"""In `merge_rows` what stands behind the rows that are merged, up to the capacity. Surplus items have no rows."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room of every section of an arena: items per tile class, row table, tiles, blocks, merged rows per stage, merged
    slots, thread blocks with lists of work, and work, row entries with slots that epilogues merge, and those slots;
    positions of rows; and of the partial buffer: slots.
    """

    items: tuple[int, ...]
    rows: int
    tiles: int
    blocks: int
    merges: tuple[int, ...]
    merge_slots: int
    slots: int
    workers: int = 0
    work: int = 0
    epilogue_rows: int = 0
    epilogue_slots: int = 0
    positions: int = 0


class Arena(NamedTuple):
    """A schedule as one int32 array, and where its sections begin in it: one place, or one for each tile class or stage
    (see SECTIONS). The array goes to the device in one copy.

    Kernels launch on the capacity: surplus items are zeros, and so without rows; surplus merges are SURPLUS_MERGE. The
    last column of items holds not their group but their first caller's row, if their rows follow one another from
    there, else -1: kernels then need no list of rows.
    """

    array: Ints
    rows: int
    tiles: int
    blocks: int
    merge_slots: int
    work_indptr: int
    work: int
    epilogue_indptr: int
    epilogue_slots: int
    positions: int
    items: tuple[int, ...]
    merge_rows: tuple[int, ...]
    merge_indptr: tuple[int, ...]


class Section(NamedTuple):
    """One table of a schedule in the arena: whole, or divided into a part for each tile class or each stage.

    name: the field of Arena with the place of the table, or the places of its parts. table: the field of Schedule with
    the table. room: the field of Capacity that counts its entries, or those of each part. closing: entries beyond this
    count; a list of offsets has one. ahead: what kernels load of the table one step ahead of their work; the section
    has spare words for that at its end. bounds: the field of Schedule that divides the table, if it is divided.
    """

    name: str
    table: str
    room: str
    closing: int = 0
    ahead: Literal["", "slot", "run", "tile"] = ""
    bounds: Literal["", "class_indptr", "merge_stage_indptr"] = ""


SECTIONS = (
    Section("rows", "rows", "rows"),
    Section("tiles", "tiles", "tiles", ahead="run"),
    Section("blocks", "blocks", "blocks", ahead="tile"),
    Section("merge_slots", "merge_slots", "merge_slots", ahead="slot"),
    Section("work_indptr", "work_indptr", "workers", closing=1),
    Section("work", "work", "work"),
    Section("epilogue_indptr", "epilogue_indptr", "epilogue_rows", closing=1),
    Section("epilogue_slots", "epilogue_slots", "epilogue_slots", ahead="slot"),
    Section("positions", "row_positions", "positions"),
    Section("items", "items", "items", bounds="class_indptr"),
    Section("merge_rows", "merge_rows", "merges", bounds="merge_stage_indptr"),
    Section("merge_indptr", "merge_indptr", "merges", closing=1, bounds="merge_stage_indptr"),
)
"""The sections of an arena in their order, which is also the order of Arena's fields. Divided tables come last."""

_WHOLE = tuple(section for section in SECTIONS if not section.bounds)
_DIVIDED = SECTIONS[len(_WHOLE) :]
_LOADED_AHEAD = tuple((index, section.ahead) for index, section in enumerate(SECTIONS) if section.ahead)
_ROOMS = tuple(field.name for field in fields(Capacity))
_whole_tables = attrgetter(*(section.table for section in _WHOLE))
_Spans: TypeAlias = "dict[str, list[tuple[int, int]]]"  # begin and end of every part, by the name of the bounds


def pack(schedule: Schedule, capacity: Capacity | None = None) -> Arena:
    """The arena of a schedule, with room for `capacity` (None: exactly the schedule). Raises PlanError when it does not
    fit.
    """
    spans = {
        "class_indptr": list(pairwise(schedule.class_indptr.tolist())),
        "merge_stage_indptr": list(pairwise(schedule.merge_stage_indptr.tolist())),
    }
    parts = _parts(schedule, spans)
    sizes = [part.size for part in parts]
    if capacity is None:
        room = sizes.copy()
    else:
        _check_fits(size_of(schedule), capacity)
        room = _room(schedule, capacity)
    places, end = _places(room, schedule)
    if capacity is not None and end > _MOST_ROOM:
        found, reason = f"{end} words of tables", f"exceed {_MOST_ROOM}, which are 1 GiB"
        raise InputError("max_rows, max_items", found, reason, "declare no more than trees need")
    array = np.zeros(end, _INT32)
    for place, size, part in zip(places, sizes, parts, strict=True):
        if size:
            array[place : place + size] = part.ravel()
    arena = _arena(array, places, spans)
    first_rows, width = _first_rows(schedule.items, schedule.rows), schedule.items.shape[1]
    for place, (begin, end) in zip(arena.items, spans["class_indptr"], strict=True):
        array[place + width - 1 : place + (end - begin) * width : width] = first_rows[begin:end]
    if capacity is not None:
        _write_surplus(arena, schedule, capacity)
    array.setflags(write=False)
    return arena


def size_of(schedule: Schedule) -> Capacity:
    """Counts the room that a schedule takes."""
    counts: dict[str, Any] = {"slots": schedule.num_slots}
    for section, table in zip(_WHOLE, _whole_tables(schedule), strict=True):
        counts[section.room] = len(table) - section.closing
    for section in _DIVIDED:
        ends = getattr(schedule, section.bounds).tolist()
        counts[section.room] = tuple(map(sub, ends[1:], ends))
    return Capacity(**counts)


def _parts(schedule: Schedule, spans: _Spans) -> list[Ints]:
    """Lists what the arena holds at each place: whole tables, then the parts of divided ones."""
    parts = list(_whole_tables(schedule))
    for section in _DIVIDED:
        table = getattr(schedule, section.table)
        for begin, end in spans[section.bounds]:
            parts.append(table[begin : end + section.closing])
    return parts


def _room(schedule: Schedule, capacity: Capacity) -> list[int]:
    """Counts the words that a capacity asks for at each place, without spare words."""
    room = []
    for section in SECTIONS:
        table, counts = getattr(schedule, section.table), getattr(capacity, section.room)
        width = table.shape[1] if table.ndim > 1 else 1
        for count in counts if section.bounds else (counts,):
            room.append((count + section.closing) * width)
    return room


def _places(room: list[int], schedule: Schedule) -> tuple[list[int], int]:
    """Adds spare words to the words of each section, and puts the sections one after another. Returns their places, and
    where the last one ends.
    """
    run_width, most_runs = schedule.tiles.shape[1], 1
    for tile in schedule.classes:
        most_runs = max(most_runs, tile.tokens // tile.block)
    words = {"slot": 1, "run": run_width, "tile": run_width * most_runs}
    for index, ahead in _LOADED_AHEAD:
        room[index] += words[ahead]
    places, end = [], 0
    for most in room:
        places.append(end)
        end += (most + ALIGNMENT - 1) & -ALIGNMENT
    return places, end


def _arena(array: Ints, places: list[int], spans: _Spans) -> Arena:
    """Makes an arena of these places, and groups the places of each divided table."""
    begin = len(_WHOLE)
    values: list[Any] = [array, *places[:begin]]
    for section in _DIVIDED:
        end = begin + len(spans[section.bounds])
        values.append(tuple(places[begin:end]))
        begin = end
    return Arena._make(values)


def _first_rows(items: Ints, rows: Ints) -> Ints:
    """Every item's first caller's row, or -1 where its rows do not follow one another in the caller's order."""
    first: Ints = items[:, 0]
    if rows.tobytes() == int32_ramp(len(rows)).tobytes():  # ranked as the caller has them
        return first
    found: Ints = rows.take(first)
    gaps = (rows[1:] - rows[:-1] != 1).nonzero()[0]
    if len(gaps):
        found[gaps.searchsorted(first) != gaps.searchsorted(first + items[:, 1] - 1)] = -1
    return found


def _write_surplus(arena: Arena, schedule: Schedule, capacity: Capacity) -> None:
    """Marks surplus merges, and gives thread blocks beyond those with work empty lists."""
    bounds = pairwise(schedule.merge_stage_indptr.tolist())
    for place, (begin, end), most in zip(arena.merge_rows, bounds, capacity.merges, strict=True):
        arena.array[place + end - begin : place + most] = SURPLUS_MERGE
    begin, workers = arena.work_indptr, len(schedule.work_indptr)
    arena.array[begin + workers : begin + capacity.workers + 1] = len(schedule.work)


def _check_fits(size: Capacity, capacity: Capacity) -> None:
    """Raises PlanError when some section needs more than there is room for."""
    for name in _ROOMS:
        needed, room = getattr(size, name), getattr(capacity, name)
        fits = needed <= room if isinstance(needed, int) else len(needed) == len(room) and all(map(le, needed, room))
        if not fits:
            raise PlanError(f"capacity.{name}", room, f"is less than {needed}", "declare a larger capacity")
