"""Empty rows: gives rows that see no token a work item without tiles, so that no merge has to write their results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treegen.ir.arrays import Ints, frozen, offsets
from treegen.ir.kernel_config import MOST_BIT_ROWS
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.ir.work_items import ITEM_FIELDS
from treegen.target.tile_config import lanes_of, rows_per_tile


def with_empty_row_items(plan: Plan, schedule: Schedule, shape: Shape) -> tuple[Plan, Schedule]:
    """Replaces empty merges by work items without tiles, in the first kernel config.

    Such an item writes out 0 and lse -inf. The plan gets a group without segments for these rows. The merge kernel is
    then launched only for partial results.
    """
    lengths = np.diff(schedule.merge_indptr)
    empty = lengths == 0
    if not empty.any():
        return plan, schedule
    config = schedule.configs[0]
    height = rows_per_tile(config.rows, shape.group)
    height = min(height, MOST_BIT_ROWS) if config.mask == "bits" else height

    # The row table begins with all rows in rank order, so a rank is the entry of its row. Neighbours share an item.
    ranks = np.flatnonzero(np.isin(schedule.rows[: int(schedule.rows.max()) + 1], schedule.merge_rows[empty]))
    opens = np.append(True, np.diff(ranks) > 1)
    begin = np.flatnonzero(opens)
    within = np.arange(len(ranks)) - begin[np.cumsum(opens) - 1]
    first = np.flatnonzero(within % height == 0)
    items = np.zeros((len(first), len(ITEM_FIELDS)), np.int32)
    items[:, ITEM_FIELDS.index("row0")] = ranks[first]
    items[:, ITEM_FIELDS.index("rows")] = np.diff(np.append(first, len(ranks)))
    items[:, ITEM_FIELDS.index("partial0")] = -1
    items[:, ITEM_FIELDS.index("group")] = len(plan)

    place = int(schedule.config_indptr[1])
    ends = np.append(begin[1:], len(ranks)) - 1
    grouped = replace(
        plan,
        row_indptr=_extended(plan.row_indptr, len(begin)),
        row_lo=frozen(np.append(plan.row_lo, ranks[begin])),
        row_hi=frozen(np.append(plan.row_hi, ranks[ends] + 1)),
        segment_indptr=_extended(plan.segment_indptr, 0),
        round=frozen(np.append(plan.round, 0)),
    )
    kept_before = offsets(~empty)
    work, work_indptr = _work(schedule, place, len(items), shape)
    made = schedule.changed(
        config_indptr=frozen(schedule.config_indptr + len(items) * (np.arange(len(schedule.config_indptr)) > 0)),
        items=frozen(np.concatenate([schedule.items[:place], items, schedule.items[place:]])),
        merge_rows=frozen(schedule.merge_rows[~empty]),
        merge_indptr=frozen(offsets(lengths[~empty])),
        merge_round_indptr=frozen(kept_before[schedule.merge_round_indptr]),
        work=work,
        work_indptr=work_indptr,
    )
    return grouped, made


def _extended(indptr: Ints, entries: int) -> Ints:
    return frozen(np.append(indptr, indptr[-1] + entries))


def _work(schedule: Schedule, first: int, count: int, shape: Shape) -> tuple[Ints, Ints]:
    """Appends items `first:first + count` to the last work list, in a config that has work lists."""
    config = schedule.configs[0]
    if not config.work_list:
        return schedule.work, schedule.work_indptr
    lanes = lanes_of(config, shape)
    more = np.arange(first * lanes, (first + count) * lanes)
    indptr = schedule.work_indptr.copy()
    indptr[-1] += len(more)
    return frozen(np.append(schedule.work, more)), frozen(indptr)
