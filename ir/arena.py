"""Arena: a schedule laid out as one int32 array, so that it goes to the device in one copy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import le
from typing import TYPE_CHECKING

import numpy as np

from treegen.ir.arrays import Ints, frozen
from treegen.ir.errors import PlanError

if TYPE_CHECKING:
    from treegen.ir.schedule import Schedule

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


@dataclass(frozen=True, slots=True)
class Arena:
    """A schedule as one int32 array, and the section offsets in it. The array goes to the device in one copy.

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


def pack(schedule: Schedule, capacity: Capacity | None = None) -> Arena:
    """The arena of a schedule, with room for `capacity` (None: exactly the schedule). Raises PlanError when it does
    not fit.
    """
    size = schedule.size
    room = capacity or size
    if capacity is not None:
        _check_fits(size, capacity)
    item_width, run_width = schedule.items.shape[1], schedule.tiles.shape[1]
    # Kernels load run and slot entries one step ahead: these tables keep room for one step more.
    spare = run_width * max([tile.tokens // tile.block for tile in schedule.classes], default=1)
    sections = [
        (schedule.rows, room.rows),
        (schedule.tiles, (room.tiles + 1) * run_width),
        (schedule.blocks, room.blocks * run_width + spare),
        (schedule.merge_slots, room.merge_slots + 1),
        (schedule.work_indptr, room.workers + 1),
        (schedule.work, room.work),
        (schedule.epilogue_indptr, room.epilogue_rows + 1),
        (schedule.epilogue_slots, room.epilogue_slots + 1),
        (schedule.row_positions, room.positions),
    ]
    begin = 0
    for count, most in zip(size.items, room.items, strict=True):
        sections.append((schedule.items[begin : begin + count], most * item_width))
        begin += count
    begin, indptrs = 0, []
    for count, most in zip(size.merges, room.merges, strict=True):
        sections.append((schedule.merge_rows[begin : begin + count], most))
        indptrs.append((schedule.merge_indptr[begin : begin + count + 1], most + 1))
        begin += count
    sections += indptrs
    places, end = [], 0
    for _, most in sections:
        places.append(end)
        end += (most + ALIGNMENT - 1) & -ALIGNMENT
    array = np.zeros(end, np.int32)
    for place, (values, _) in zip(places, sections, strict=True):
        if values.size:
            array[place : place + values.size] = values.reshape(-1)
    of_items, of_merges = places[9:], places[9 + len(size.items) :]
    rows, tiles, blocks, merge_slots, work_indptr, work, epilogue_indptr, epilogue_slots, positions = places[:9]
    begin, first_rows = 0, _first_rows(schedule.items, schedule.rows)
    for place, count in zip(of_items, size.items, strict=False):
        array[place + item_width - 1 : place + count * item_width : item_width] = first_rows[begin : begin + count]
        begin += count
    for place, count, most in zip(of_merges, size.merges, room.merges, strict=False):
        if most > count:
            array[place + count : place + most] = SURPLUS_MERGE
    # Thread blocks beyond those that have work have empty lists.
    if room.workers > size.workers:
        array[work_indptr + size.workers + 1 : work_indptr + room.workers + 1] = size.work
    return Arena(
        frozen(array),
        rows,
        tiles,
        blocks,
        merge_slots,
        work_indptr,
        work,
        epilogue_indptr,
        epilogue_slots,
        positions,
        tuple(of_items[: len(size.items)]),
        tuple(of_merges[: len(size.merges)]),
        tuple(of_merges[len(size.merges) :]),
    )


def _first_rows(items: Ints, rows: Ints) -> Ints:
    """Every item's first caller's row, or -1 where its rows do not follow one another in the caller's order."""
    first = items[:, 0]
    found = rows.take(first)
    gaps = (rows[1:] - rows[:-1] != 1).nonzero()[0]
    if len(gaps):
        found[gaps.searchsorted(first) != gaps.searchsorted(first + items[:, 1] - 1)] = -1
    return found


def _check_fits(size: Capacity, capacity: Capacity) -> None:
    """Raises PlanError when some section needs more than there is room for."""
    for section in fields(Capacity):
        needed, room = getattr(size, section.name), getattr(capacity, section.name)
        parts, rooms = (part if isinstance(part, tuple) else (part,) for part in (needed, room))
        if len(parts) != len(rooms) or not all(map(le, parts, rooms)):
            raise PlanError(f"capacity.{section.name}", room, f"is less than {needed}", "declare a larger capacity")
