"""Rows that see nothing as work items that read nothing, where no merge writes their results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treegen.ir.arrays import Ints, frozen, offsets
from treegen.ir.plan import Plan
from treegen.ir.schedule import ITEM_FIELDS, MOST_BIT_ROWS, Schedule
from treegen.ir.shape import Shape
from treegen.target.tile_config import lanes_of, rows_per_tile


def with_unseeing_items(plan: Plan, schedule: Schedule, shape: Shape) -> tuple[Plan, Schedule]:
    """The schedule with final items of the first class for rows whose lists of partials are empty, instead of merges.

    An item without tiles writes 0 and -inf. The plan gets a group without segments for these rows. A launch of merges
    is then needed for partial results alone.
    """
    lengths = np.diff(schedule.merge_indptr)
    empty = lengths == 0
    if not empty.any():
        return plan, schedule
    tile = schedule.classes[0]
    height = rows_per_tile(tile.rows, shape.group)
    height = min(height, MOST_BIT_ROWS) if tile.mask == "bits" else height

    # The row table opens with all rows in rank order: a rank is the entry of its row. Runs of ranks become items.
    ranks = np.flatnonzero(np.isin(schedule.rows[: int(schedule.rows.max()) + 1], schedule.merge_rows[empty]))
    opens = np.append(True, np.diff(ranks) > 1)
    begin = np.flatnonzero(opens)
    within = np.arange(len(ranks)) - begin[np.cumsum(opens) - 1]
    first = np.flatnonzero(within % height == 0)
    items = np.zeros((len(first), len(ITEM_FIELDS)), np.int32)
    items[:, ITEM_FIELDS.index("row0")] = ranks[first]
    items[:, ITEM_FIELDS.index("rows")] = np.diff(np.append(first, len(ranks)))
    items[:, ITEM_FIELDS.index("slot0")] = -1
    items[:, ITEM_FIELDS.index("group")] = len(plan)

    place = int(schedule.class_indptr[1])
    ends = np.append(begin[1:], len(ranks)) - 1
    grouped = replace(
        plan,
        row_indptr=_extended(plan.row_indptr, len(begin)),
        row_lo=frozen(np.append(plan.row_lo, ranks[begin])),
        row_hi=frozen(np.append(plan.row_hi, ranks[ends] + 1)),
        segment_indptr=_extended(plan.segment_indptr, 0),
        stage=frozen(np.append(plan.stage, 0)),
    )
    kept_before = offsets(~empty)
    work, work_indptr = _work(schedule, place, len(items), shape)
    made = schedule.changed(
        class_indptr=frozen(schedule.class_indptr + len(items) * (np.arange(len(schedule.class_indptr)) > 0)),
        items=frozen(np.concatenate([schedule.items[:place], items, schedule.items[place:]])),
        merge_rows=frozen(schedule.merge_rows[~empty]),
        merge_indptr=frozen(offsets(lengths[~empty])),
        merge_stage_indptr=frozen(kept_before[schedule.merge_stage_indptr]),
        work=work,
        work_indptr=work_indptr,
    )
    return grouped, made


def _extended(indptr: Ints, entries: int) -> Ints:
    return frozen(np.append(indptr, indptr[-1] + entries))


def _work(schedule: Schedule, first: int, count: int, shape: Shape) -> tuple[Ints, Ints]:
    """The lists of work and their indptr, where dealt with items `first:first + count` behind the last one's."""
    tile = schedule.classes[0]
    if not tile.dealt:
        return schedule.work, schedule.work_indptr
    lanes = lanes_of(tile, shape)
    more = np.arange(first * lanes, (first + count) * lanes)
    indptr = schedule.work_indptr.copy()
    indptr[-1] += len(more)
    return frozen(np.append(schedule.work, more)), frozen(indptr)
