"""Arena: a schedule laid out as one int32 array, so that it goes to the device in one copy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from operator import le
from typing import TYPE_CHECKING

import numpy as np

from treegen.ir.arrays import Ints, frozen, int32_ramp
from treegen.ir.errors import InputError, PlanError
from treegen.ir.unchecked import unchecked

if TYPE_CHECKING:
    from treegen.ir.schedule import Schedule

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


@dataclass(frozen=True)
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
    item_width, run_width = schedule.items.shape[1], schedule.tiles.shape[1]
    of_class = list(pairwise(schedule.class_indptr.tolist()))
    of_stage = list(pairwise(schedule.merge_stage_indptr.tolist()))
    sections = [
        schedule.rows,
        schedule.tiles,
        schedule.blocks,
        schedule.merge_slots,
        schedule.work_indptr,
        schedule.work,
        schedule.epilogue_indptr,
        schedule.epilogue_slots,
        schedule.row_positions,
        *[schedule.items[begin:end] for begin, end in of_class],
        *[schedule.merge_rows[begin:end] for begin, end in of_stage],
        *[schedule.merge_indptr[begin : end + 1] for begin, end in of_stage],
    ]
    # Kernels load run and slot entries one step ahead: these tables keep room for one step more.
    spare = run_width * max([tile.tokens // tile.block for tile in schedule.classes], default=1)
    sizes = [values.size for values in sections]
    if capacity is None:
        rows, tiles, blocks, merge_slots, work_indptr, work, epilogue_indptr, epilogue_slots, *others = sizes
        room = [rows, tiles + run_width, blocks + spare, merge_slots + 1]
        room += [work_indptr, work, epilogue_indptr, epilogue_slots + 1, *others]
    else:
        _check_fits(schedule.size, capacity)
        room = [
            capacity.rows,
            (capacity.tiles + 1) * run_width,
            capacity.blocks * run_width + spare,
            capacity.merge_slots + 1,
            capacity.workers + 1,
            capacity.work,
            capacity.epilogue_rows + 1,
            capacity.epilogue_slots + 1,
            capacity.positions,
            *[most * item_width for most in capacity.items],
            *capacity.merges,
            *[most + 1 for most in capacity.merges],
        ]
    places, end = [], 0
    for most in room:
        places.append(end)
        end += (most + ALIGNMENT - 1) & -ALIGNMENT
    if capacity is not None and end > _MOST_ROOM:
        found, reason = f"{end} words of tables", f"exceed {_MOST_ROOM}, which are 1 GiB"
        raise InputError("max_rows, max_items", found, reason, "declare no more than trees need")
    array = np.zeros(end, np.int32)
    for place, size, values in zip(places, sizes, sections, strict=True):
        if size:
            array[place : place + size] = values.ravel()
    of_items, of_merges = places[9 : 9 + len(of_class)], places[9 + len(of_class) :]
    rows, tiles, blocks, merge_slots, work_indptr, work, epilogue_indptr, epilogue_slots, positions = places[:9]
    first_rows = _first_rows(schedule.items, schedule.rows)
    for place, (begin, end) in zip(of_items, of_class, strict=True):
        array[place + item_width - 1 : place + (end - begin) * item_width : item_width] = first_rows[begin:end]
    if capacity is not None:
        for place, (begin, end), most in zip(of_merges, of_stage, capacity.merges, strict=False):
            array[place + end - begin : place + most] = SURPLUS_MERGE
        # Thread blocks beyond those that have work have empty lists.
        workers = len(schedule.work_indptr)
        array[work_indptr + workers : work_indptr + capacity.workers + 1] = len(schedule.work)
    return unchecked(
        Arena,
        {
            "array": frozen(array),
            "rows": rows,
            "tiles": tiles,
            "blocks": blocks,
            "merge_slots": merge_slots,
            "work_indptr": work_indptr,
            "work": work,
            "epilogue_indptr": epilogue_indptr,
            "epilogue_slots": epilogue_slots,
            "positions": positions,
            "items": tuple(of_items),
            "merge_rows": tuple(of_merges[: len(of_stage)]),
            "merge_indptr": tuple(of_merges[len(of_stage) :]),
        },
    )


def _first_rows(items: Ints, rows: Ints) -> Ints:
    """Every item's first caller's row, or -1 where its rows do not follow one another in the caller's order."""
    first: Ints = items[:, 0]
    if not np.count_nonzero(rows != int32_ramp(len(rows))):  # ranked as the caller has them
        return first
    found: Ints = rows.take(first)
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
