"""Two launches in one: where every item that merges last joins only what some items before it have left of just its
rows, it waits for these within one launch (as stream-K decompositions of matrix products fix up their tiles: Osama et
al., PPoPP 2023).

Thread blocks are taken up in the order of their numbers, as single-pass scans rely on, too (Merrill and Garland,
"Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016), and items that merge come last: whom a block waits
for has begun, and waits for nobody. Results are the same; plans know nothing of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treegen.ir.arrays import Longs, frozen, ragged_ranges
from treegen.ir.schedule import ITEM_FIELDS, Schedule, TileClass
from treegen.target.tile_config import SMALL_ROWS

MOST_PARTS = 2
"""Partials of every row at most: a final item merges one after another, a launch of merges takes all at once. Measured
on an H200 (fp16, head dim 128, cold L2, graphs; benchmarks/one_launch.py): 0.82 to 0.98 of the time of two launches for
27 plans of small trees, and 0.83 to 0.89 with three partials, for six, none of which was the fastest plan of its tree.
"""
MOST_LONGER = 7 / 6
"""How many times as long as final items, in tiles, those may be that these wait for. Where they are five times as long,
one launch takes 1.02 of the time of two.
"""


def waits(schedule: Schedule) -> bool:
    """Whether some items of a schedule wait for others."""
    return any(tile.waiting for tile in schedule.classes)


def parts_of(schedule: Schedule) -> int:
    """Of a class that waits: the partials that are merged into every row."""
    final = int(np.count_nonzero(schedule.column("slot0") < 0))
    return len(schedule.items) // final - 1


def in_one_launch(schedule: Schedule) -> Schedule:
    """The schedule with one class that waits in place of two stages, its slots numbered as such a kernel has them,
    where that can be; else as it is.
    """
    tile = _waiting_class(schedule)
    if tile is None:
        return schedule
    border = int(schedule.class_indptr[1])
    row0, rows, slot0 = (schedule.column(name).astype(np.int64) for name in ("row0", "rows", "slot0"))
    before, last = slice(0, border), slice(border, len(rows))
    parts, tiles = border // (len(rows) - border), schedule.column("tiles") + schedule.column("block_tiles")
    if parts > MOST_PARTS or tiles[before].max() > MOST_LONGER * tiles[last].max():
        return schedule
    # Every final item with `parts` items before that have the same rows, in the order in which it merges them.
    order = np.lexsort((slot0[before], row0[before])).reshape(-1, parts)
    final = border + row0[last].argsort(kind="stable")
    of_same_rows = (row0[order] == row0[final][:, None]) & (rows[order] == rows[final][:, None])
    if not of_same_rows.all() or (slot0[before] < 0).any() or (slot0[last] >= 0).any():
        return schedule
    if int(rows[last].sum()) != len(schedule.rows) or not _merges_them(
        schedule, row0[final], rows[final], slot0[order]
    ):
        return schedule
    items = schedule.items.copy()
    items[order, ITEM_FIELDS.index("slot0")] = parts * row0[order] + np.arange(parts) * rows[order]
    return schedule.changed(
        classes=(tile,),
        class_indptr=frozen(np.array([0, len(items)])),
        items=frozen(items),
        stage_indptr=frozen(np.array([0, 1])),
        merge_stage_indptr=frozen(np.array([0, 0])),
        epilogue_indptr=frozen(parts * np.arange(len(schedule.rows) + 1)),
        epilogue_slots=frozen(_slots(row0[final], rows[final], parts)),
    )


def _waiting_class(schedule: Schedule) -> TileClass | None:
    """The class in which two stages of one class each could run; None if there are others, or they differ, or have
    small tiles or gathered tokens, for which it does not pay.
    """
    if schedule.num_stages != 2 or len(schedule.classes) != 2 or len(schedule.merge_rows):
        return None
    first, second = schedule.classes
    before, last = np.diff(schedule.class_indptr).tolist()
    if not second.merging or not last or not before or before % last:
        return None
    if first.rows <= SMALL_ROWS or first.block == 1 or not {first.mask, second.mask} <= {"none", "interval"}:
        return None
    tile = replace(second, mask="interval", merging=False)
    return replace(tile, waiting=True) if replace(first, mask="interval") == tile else None


def _merges_them(schedule: Schedule, row0: Longs, rows: Longs, slot0: Longs) -> bool:
    """Whether final items merge into their row i just the slots `slot0 + i`, in this order. slot0 [items, parts]."""
    parts, entries = slot0.shape[1], ragged_ranges(row0, rows)
    counts = schedule.epilogue_indptr[entries + 1] - schedule.epilogue_indptr[entries]
    if (counts != parts).any():
        return False
    found = schedule.epilogue_slots[schedule.epilogue_indptr[entries][:, None] + np.arange(parts)]
    return bool((found == slot0.repeat(rows, 0) + ragged_ranges(0 * rows, rows)[:, None]).all())


def _slots(row0: Longs, rows: Longs, parts: int) -> Longs:
    """The slots of every row, row by row of final items, which are all rows in ascending order."""
    first = (parts * row0)[:, None] + np.arange(parts) * rows[:, None]
    slots: Longs = (first.repeat(rows, 0) + ragged_ranges(0 * rows, rows)[:, None]).ravel()
    return slots
