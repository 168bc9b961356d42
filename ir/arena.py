"""Arena: a schedule laid out as one int32 array, so that it goes to the device in one copy.

    ┌──────┬───────┬─────────────┬─   ─┬─────────────────┬─────────────────┬─────────────────────┬─
    │ rows │ tiles │ packed_runs │ ... │ items, config 0 │ items, config 1 │ merge_rows, round 0 │ ...
    └──────┴───────┴─────────────┴─   ─┴─────────────────┴─────────────────┴─────────────────────┴─
    ▲      ▲       ▲                   ▲                 ▲                 ▲
    rows   tiles   packed_runs         items[0]          items[1]          merge_rows[0]     places, by field of Arena

Each section begins at a multiple of ALIGNMENT words. SECTIONS lists them.
"""

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
_MOST_ROOM = 1 << 28  # int32 words of an arena with a declared capacity: 1 GiB
ALIGNMENT = 16
"""Every section of the arena begins at a multiple of this many int32 (64 bytes)."""

SURPLUS_MERGE = -(2**31)
"""Fills `merge_rows` from the last merged row up to the capacity. Surplus items need no mark: they have no rows."""


@dataclass(frozen=True, slots=True)
class ArenaSizes:
    """The number of entries that each section of an arena has room for.

    Attributes:
        items: Work items of each kernel config.
        rows: Entries of the row table.
        tiles: Full tiles.
        packed_runs: Runs that are packed into tiles.
        merges: Merged rows of each round.
        merge_partials: Entries of the merge lists.
        slots: Partial slots of the partial buffer.
        workers: Thread blocks that have lists of work.
        work: Entries of these lists.
        epilogue_rows: Entries of the row table whose partials are joined in epilogues.
        epilogue_partials: Partial slots that epilogues join.
        positions: Rows whose positions are listed.
    """

    items: tuple[int, ...]
    rows: int
    tiles: int
    packed_runs: int
    merges: tuple[int, ...]
    merge_partials: int
    slots: int
    workers: int = 0
    work: int = 0
    epilogue_rows: int = 0
    epilogue_partials: int = 0
    positions: int = 0


class Arena(NamedTuple):
    """A schedule as one int32 array, and the place where each of its sections begins.

    A place is an index into `array`: one for a whole table, or one for each kernel config or each round of a divided
    table (see SECTIONS).

    Kernels launch on the capacity. Surplus items are zeros, so they have no rows; surplus merges are SURPLUS_MERGE. The
    last column of items holds the item's first row in the caller's order if its rows follow one another from there,
    else -1. In the first case kernels need no list of rows.
    """

    array: Ints
    rows: int
    tiles: int
    packed_runs: int
    merge_partials: int
    work_indptr: int
    work: int
    epilogue_indptr: int
    epilogue_partials: int
    positions: int
    items: tuple[int, ...]
    merge_rows: tuple[int, ...]
    merge_indptr: tuple[int, ...]


class Section(NamedTuple):
    """A table of a schedule in the arena: whole, or divided into a part for each kernel config or each round.

    Attributes:
        name: The field of Arena that holds the place of the table, or the places of its parts.
        table: The field of Schedule that holds the table.
        room: The field of ArenaSizes that counts the entries of the table, or of each part.
        closing: Entries beyond this count; a list of offsets has one.
        ahead: What kernels load of the table one step ahead of their work. The section ends with spare words for that.
        bounds: The field of Schedule that divides the table, if it is divided.
    """

    name: str
    table: str
    room: str
    closing: int = 0
    ahead: Literal["", "slot", "run", "tile"] = ""
    bounds: Literal["", "config_indptr", "merge_round_indptr"] = ""


SECTIONS = (
    Section("rows", "rows", "rows"),
    Section("tiles", "tiles", "tiles", ahead="run"),
    Section("packed_runs", "packed_runs", "packed_runs", ahead="tile"),
    Section("merge_partials", "merge_partials", "merge_partials", ahead="slot"),
    Section("work_indptr", "work_indptr", "workers", closing=1),
    Section("work", "work", "work"),
    Section("epilogue_indptr", "epilogue_indptr", "epilogue_rows", closing=1),
    Section("epilogue_partials", "epilogue_partials", "epilogue_partials", ahead="slot"),
    Section("positions", "row_positions", "positions"),
    Section("items", "items", "items", bounds="config_indptr"),
    Section("merge_rows", "merge_rows", "merges", bounds="merge_round_indptr"),
    Section("merge_indptr", "merge_indptr", "merges", closing=1, bounds="merge_round_indptr"),
)
"""The sections of an arena in order, which is also the order of Arena's fields. Divided tables come last."""

_WHOLE = tuple(section for section in SECTIONS if not section.bounds)
_DIVIDED = SECTIONS[len(_WHOLE) :]
_LOADED_AHEAD = tuple((index, section.ahead) for index, section in enumerate(SECTIONS) if section.ahead)
_ROOMS = tuple(field.name for field in fields(ArenaSizes))
_whole_tables = attrgetter(*(section.table for section in _WHOLE))
_Spans: TypeAlias = "dict[str, list[tuple[int, int]]]"  # the begin and the end of each part, by the name of the bounds


def pack(schedule: Schedule, capacity: ArenaSizes | None = None) -> Arena:
    """Lays a schedule out as an arena.

    Args:
        schedule: The schedule.
        capacity: The entries to leave room for; by default exactly those of the schedule.

    Raises:
        PlanError: The schedule does not fit the capacity.
        InputError: The capacity needs more than 1 GiB.
    """
    spans = {
        "config_indptr": list(pairwise(schedule.config_indptr.tolist())),
        "merge_round_indptr": list(pairwise(schedule.merge_round_indptr.tolist())),
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
    for place, (begin, end) in zip(arena.items, spans["config_indptr"], strict=True):
        array[place + width - 1 : place + (end - begin) * width : width] = first_rows[begin:end]
    if capacity is not None:
        _write_surplus(arena, schedule, capacity)
    array.setflags(write=False)
    return arena


def size_of(schedule: Schedule) -> ArenaSizes:
    """Counts the entries that a schedule has in each section."""
    counts: dict[str, Any] = {"slots": schedule.num_partials}
    for section, table in zip(_WHOLE, _whole_tables(schedule), strict=True):
        counts[section.room] = len(table) - section.closing
    for section in _DIVIDED:
        ends = getattr(schedule, section.bounds).tolist()
        counts[section.room] = tuple(map(sub, ends[1:], ends))
    return ArenaSizes(**counts)


def _parts(schedule: Schedule, spans: _Spans) -> list[Ints]:
    """Lists the contents of the arena in order: whole tables, then the parts of divided tables."""
    parts = list(_whole_tables(schedule))
    for section in _DIVIDED:
        table = getattr(schedule, section.table)
        for begin, end in spans[section.bounds]:
            parts.append(table[begin : end + section.closing])
    return parts


def _room(schedule: Schedule, capacity: ArenaSizes) -> list[int]:
    """Counts the words that each part takes at this capacity, without spare words."""
    room = []
    for section in SECTIONS:
        table, counts = getattr(schedule, section.table), getattr(capacity, section.room)
        width = table.shape[1] if table.ndim > 1 else 1
        for count in counts if section.bounds else (counts,):
            room.append((count + section.closing) * width)
    return room


def _places(room: list[int], schedule: Schedule) -> tuple[list[int], int]:
    """Adds spare words to each part and lines the parts up. Returns their places, and the end of the last one."""
    run_width, most_runs = schedule.tiles.shape[1], 1
    for config in schedule.configs:
        most_runs = max(most_runs, config.tokens // config.run_tokens)
    words = {"slot": 1, "run": run_width, "tile": run_width * most_runs}
    for index, ahead in _LOADED_AHEAD:
        room[index] += words[ahead]
    places, end = [], 0
    for most in room:
        places.append(end)
        end += (most + ALIGNMENT - 1) & -ALIGNMENT
    return places, end


def _arena(array: Ints, places: list[int], spans: _Spans) -> Arena:
    """Makes an arena with these places, grouping the places of each divided table."""
    begin = len(_WHOLE)
    values: list[Any] = [array, *places[:begin]]
    for section in _DIVIDED:
        end = begin + len(spans[section.bounds])
        values.append(tuple(places[begin:end]))
        begin = end
    return Arena._make(values)


def _first_rows(items: Ints, rows: Ints) -> Ints:
    """Returns each item's first row in the caller's order, -1 where its rows do not follow one another there."""
    first: Ints = items[:, 0]
    if rows.tobytes() == int32_ramp(len(rows)).tobytes():  # ranks are in the caller's order
        return first
    found: Ints = rows.take(first)
    gaps = (rows[1:] - rows[:-1] != 1).nonzero()[0]
    if len(gaps):
        found[gaps.searchsorted(first) != gaps.searchsorted(first + items[:, 1] - 1)] = -1
    return found


def _write_surplus(arena: Arena, schedule: Schedule, capacity: ArenaSizes) -> None:
    """Marks surplus merges, and gives surplus thread blocks empty lists of work."""
    bounds = pairwise(schedule.merge_round_indptr.tolist())
    for place, (begin, end), most in zip(arena.merge_rows, bounds, capacity.merges, strict=True):
        arena.array[place + end - begin : place + most] = SURPLUS_MERGE
    begin, workers = arena.work_indptr, len(schedule.work_indptr)
    arena.array[begin + workers : begin + capacity.workers + 1] = len(schedule.work)


def _check_fits(size: ArenaSizes, capacity: ArenaSizes) -> None:
    """Raises PlanError if a section has more entries than the capacity has room for."""
    for name in _ROOMS:
        needed, room = getattr(size, name), getattr(capacity, name)
        fits = needed <= room if isinstance(needed, int) else len(needed) == len(room) and all(map(le, needed, room))
        if not fits:
            raise PlanError(f"capacity.{name}", room, f"is less than {needed}", "declare a larger capacity")
