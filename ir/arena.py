"""Arena: a schedule laid out as one int32 array, so that it goes to the device in one copy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
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
    and of the partial buffer: slots.
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


@dataclass(frozen=True, slots=True)
class Arena:
    """A schedule as one int32 array, and the section offsets in it. The array goes to the device in one copy.

    Kernels launch on the capacity: surplus items are zeros, and so without rows; surplus merges are SURPLUS_MERGE, with
    empty lists.
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
    items: tuple[int, ...]
    merge_rows: tuple[int, ...]
    merge_indptr: tuple[int, ...]


def pack(schedule: Schedule, capacity: Capacity) -> Arena:
    """The arena of a schedule, with room for `capacity`. Raises PlanError when it does not fit."""
    size = schedule.size
    for section in fields(Capacity):
        needed, room = getattr(size, section.name), getattr(capacity, section.name)
        if not _fits(needed, room):
            raise PlanError(f"capacity.{section.name}", room, f"is less than {needed}", "declare a larger capacity")
    classes, stages = range(len(schedule.classes)), range(schedule.num_stages)
    items = [schedule.items[schedule.class_indptr[c] : schedule.class_indptr[c + 1]] for c in classes]
    merged = [merges for _, merges in schedule.stages]
    # Kernels load run and slot entries one step ahead: these tables keep room for one step more.
    spare = max((tile.blocks_per_tile for tile in schedule.classes), default=1) * schedule.tiles.shape[1]
    sections = [
        (schedule.rows, capacity.rows),
        (schedule.tiles, (capacity.tiles + 1) * schedule.tiles.shape[1]),
        (schedule.blocks, capacity.blocks * schedule.tiles.shape[1] + spare),
        (schedule.merge_slots, capacity.merge_slots + 1),
        (_padded(schedule.work_indptr, capacity.workers), capacity.workers + 1),
        (schedule.work, capacity.work),
        (schedule.epilogue_indptr, capacity.epilogue_rows + 1),
        (schedule.epilogue_slots, capacity.epilogue_slots + 1),
        *((items[c], capacity.items[c] * schedule.items.shape[1]) for c in classes),
        *((schedule.merge_rows[merged[s]], capacity.merges[s]) for s in stages),
        *((_merge_indptr(schedule, s, capacity.merges[s]), capacity.merges[s] + 1) for s in stages),
    ]
    places = [0]
    for _, room in sections:
        places.append(places[-1] + -(-room // ALIGNMENT) * ALIGNMENT)
    array = np.zeros(places[-1], np.int32)
    for place, (values, _) in zip(places, sections, strict=False):
        array[place : place + values.size] = values.ravel()
    of_items, of_merges = places[8:], places[8 + len(classes) :]
    for stage, (begin, end) in enumerate(pairwise(schedule.merge_stage_indptr.tolist())):
        array[of_merges[stage] + end - begin : of_merges[stage] + capacity.merges[stage]] = SURPLUS_MERGE
    rows, tiles, blocks, merge_slots, work_indptr, work, epilogue_indptr, epilogue_slots = places[:8]
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
        items=tuple(of_items[: len(classes)]),
        merge_rows=tuple(of_merges[: len(stages)]),
        merge_indptr=tuple(of_merges[len(stages) : 2 * len(stages)]),
    )


def _fits(needed: int | tuple[int, ...], room: int | tuple[int, ...]) -> bool:
    parts, rooms = (size if isinstance(size, tuple) else (size,) for size in (needed, room))
    return len(parts) == len(rooms) and all(map(le, parts, rooms))


def _merge_indptr(schedule: Schedule, stage: int, merges: int) -> Ints:
    first, last = schedule.merge_stage_indptr[stage : stage + 2]
    return _padded(schedule.merge_indptr[first : last + 1], merges)


def _padded(indptr: Ints, entries: int) -> Ints:
    """`indptr` with empty lists for surplus entries."""
    return frozen(np.append(indptr, np.full(entries + 1 - len(indptr), indptr[-1])))
