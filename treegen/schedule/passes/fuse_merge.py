"""Fused merge: turns two launches into one, in which final items wait for the partials that they merge.

    two launches    [ items a, b: partials of rows 0:8 ]  ──▶  [ item c: its own KV, then merges a and b, rows 0:8 ]
    one launch      [ a | b | c ]                              c waits for the flags of a and b, then merges

This works where each final item has exactly the rows of the partials that it merges. Stream-K decompositions of matrix
products fix up their tiles in the same way (Osama et al., PPoPP 2023).

No thread block can wait forever. GPUs start thread blocks in the order of their numbers, as single-pass scans assume,
too (Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016), and final items come last:
the blocks that they wait for have started, and wait for no other. Results are the same. Plans, accounts and estimates
do not depend on this pass.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treegen.ir.arrays import Longs, frozen, ragged_ranges
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.schedule import Schedule
from treegen.ir.work_items import ITEM_FIELDS
from treegen.target.tile_config import SMALL_ROWS

MOST_PARTS = 2
"""The most partials of a row. A final item merges its partials one after another, the merge kernel all at once.

Measured on an H200 (fp16, head dim 128, cold L2, graphs; benchmarks/one_launch.py): 27 plans of small trees take 0.82
to 0.98 of the time of two launches. Six plans with three partials take 0.83 to 0.89 of it, but none of the six was the
fastest plan of its tree.
"""
MOST_LONGER = 7 / 6
"""The most tiles of a partial item, as a multiple of those of the longest final item.

With five times the tiles, one launch takes 1.02 of the time of two.
"""


def parts_of(schedule: Schedule) -> int:
    """Counts the partials of each row in a schedule whose final items wait."""
    final = int(np.count_nonzero(schedule.column("partial0") < 0))
    return len(schedule.items) // final - 1


def with_fused_merge(schedule: Schedule) -> Schedule:
    """Joins two rounds into one launch whose final items wait, where that is possible and pays.

    Partial slots are numbered again, in the order in which the kernel computes them. Any other schedule is returned as
    it is.
    """
    config = _fused_merge_config(schedule)
    if config is None:
        return schedule
    border = int(schedule.config_indptr[1])
    row0, rows, partial0 = (schedule.column(name).astype(np.int64) for name in ("row0", "rows", "partial0"))
    before, last = slice(0, border), slice(border, len(rows))
    parts, tiles = border // (len(rows) - border), schedule.column("tiles") + schedule.column("packed_tiles")
    if parts > MOST_PARTS or tiles[before].max() > MOST_LONGER * tiles[last].max():
        return schedule
    # Pairs each final item with the `parts` items that write its rows' partials, in the order in which it merges them.
    order = np.lexsort((partial0[before], row0[before])).reshape(-1, parts)
    final = border + row0[last].argsort(kind="stable")
    of_same_rows = (row0[order] == row0[final][:, None]) & (rows[order] == rows[final][:, None])
    if not of_same_rows.all() or (partial0[before] < 0).any() or (partial0[last] >= 0).any():
        return schedule
    if int(rows[last].sum()) != len(schedule.rows) or not _merges_them(
        schedule, row0[final], rows[final], partial0[order]
    ):
        return schedule
    items = schedule.items.copy()
    items[order, ITEM_FIELDS.index("partial0")] = parts * row0[order] + np.arange(parts) * rows[order]
    return schedule.changed(
        configs=(config,),
        config_indptr=frozen(np.array([0, len(items)])),
        items=frozen(items),
        round_indptr=frozen(np.array([0, 1])),
        merge_round_indptr=frozen(np.array([0, 0])),
        epilogue_indptr=frozen(parts * np.arange(len(schedule.rows) + 1)),
        epilogue_partials=frozen(_slots(row0[final], rows[final], parts)),
    )


def _fused_merge_config(schedule: Schedule) -> KernelConfig | None:
    """Returns the kernel config in which both rounds can run as one launch; None where there is none.

    Both rounds need one kernel config, and the same. Small tiles and tokens packed slot by slot do not pay.
    """
    if schedule.num_rounds != 2 or len(schedule.configs) != 2 or len(schedule.merge_rows):
        return None
    first, second = schedule.configs
    before, last = np.diff(schedule.config_indptr).tolist()
    if not second.epilogue_merge or not last or not before or before % last:
        return None
    if first.rows <= SMALL_ROWS or first.run_tokens == 1 or not {first.mask, second.mask} <= {"none", "interval"}:
        return None
    config = replace(second, mask="interval", epilogue_merge=False)
    return replace(config, fused_merge=True) if replace(first, mask="interval") == config else None


def _merges_them(schedule: Schedule, row0: Longs, rows: Longs, partial0: Longs) -> bool:
    """Says whether each final item's row i merges partials `partial0 + i`, in order. partial0: `[items, parts]`."""
    parts, entries = partial0.shape[1], ragged_ranges(row0, rows)
    counts = schedule.epilogue_indptr[entries + 1] - schedule.epilogue_indptr[entries]
    if (counts != parts).any():
        return False
    found = schedule.epilogue_partials[schedule.epilogue_indptr[entries][:, None] + np.arange(parts)]
    return bool((found == partial0.repeat(rows, 0) + ragged_ranges(0 * rows, rows)[:, None]).all())


def _slots(row0: Longs, rows: Longs, parts: int) -> Longs:
    """Lists the partial slots of each row. The rows of the final items, one after another, are all rows in order."""
    first = (parts * row0)[:, None] + np.arange(parts) * rows[:, None]
    slots: Longs = (first.repeat(rows, 0) + ragged_ranges(0 * rows, rows)[:, None]).ravel()
    return slots
