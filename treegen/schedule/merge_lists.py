"""Merge lists: which results are partial, and when and into what they are merged."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Ints, Longs, frozen, largest, offsets, ragged_ranges
from treegen.ir.errors import PlanError
from treegen.ir.plan import Plan


class Merges(NamedTuple):
    """The merge part of a Schedule, in its terms."""

    rows: Ints
    indptr: Ints
    slots: Ints
    stage_indptr: Ints


class Epilogue(NamedTuple):
    """The epilogue part of a Schedule, in its terms."""

    indptr: Ints
    slots: Ints


_NO_SLOTS = frozen(np.empty(0))
NO_EPILOGUE = Epilogue(frozen(np.zeros(1)), _NO_SLOTS)


def in_last_stage(plan: Plan, tree: Longs, trees: int) -> Bools:
    """Whether groups, of trees `tree`, are in the last stage of their tree's plan and so merge what stages before left;
    under "reduce" merge none does.
    """
    if plan.merge == "reduce":
        return np.zeros(len(plan), np.bool_)
    if trees == 1:
        last: Bools = plan.stage == plan.stage.max(initial=0)
        return last
    latest = np.zeros(trees, np.int64)
    np.maximum.at(latest, tree, plan.stage)
    last = plan.stage == latest[tree]
    return last


def partial_items(rows: Longs, row: Ints, items_of_row: Longs, last: Bools) -> Bools:
    """Whether every item writes partials. rows: of every item, at least one; row: of all items, one after another;
    items_of_row: the items of every row.

    An item does when some row of it has a further item; in the last stage, `last`, a further item of that stage.
    """
    rivals = items_of_row[row]
    if last.any():
        of_last = last.repeat(rows)
        rivals = np.where(of_last, np.bincount(row[of_last], minlength=len(items_of_row))[row], rivals)
    partial: Bools = np.maximum.reduceat(rivals, offsets(rows)[:-1]) > 1
    return partial


def check_last_items(item: Longs, row: Ints, last: Bools) -> None:
    """Raises PlanError unless every row that items before the last stage work on has at most one item in it."""
    of_last = last[item]
    counts = np.bincount(row[of_last], minlength=int(row.max(initial=0)) + 1)
    wrong = row[~of_last & (counts[row] > 1)]
    if len(wrong):
        reason = f"cannot merge the partials of row {wrong[0]} in {counts[wrong[0]]} items of the last stage"
        raise PlanError("merge", "final", reason, "give the row one item there, or use reduce")


def epilogue_lists(entry: Longs, slot: Longs, entries: int) -> Epilogue:
    """The slots that are merged into entries of a row table of `entries`, in ascending order; none without slots."""
    if not len(slot):
        return NO_EPILOGUE
    order = np.lexsort((slot, entry))
    return Epilogue(frozen(offsets(np.bincount(entry, minlength=entries))), frozen(slot[order]))


def kept_between_stages(row: Longs, stage: Longs, stages: int) -> Longs:
    """The rows whose merged partials a later stage reads, once for every such merge; arguments as of `merge_lists`."""
    order = np.lexsort((stage, row))
    merges = merge_lists(row, np.argsort(order), stage, np.empty(0, np.int64), stages)
    kept: Longs = row[order][-1 - merges.rows[merges.rows < 0]]
    return kept


def merge_lists(row: Longs | Ints, slot: Longs, stage: Longs, unseeing: Longs, stages: int) -> Merges:
    """Merges of the partial slots that `row` has from items of `stage`; rows `unseeing`, which have none, become empty.

    After every stage that gave a row partials, they join what the row has so far, which stays in its first slot; behind
    the row's last stage the result is final. A row with a single partial in all has nothing to join: the last stage
    makes it final.
    """
    if stages == 1:
        return single_stage_merges(row, slot, unseeing)
    order = np.lexsort((stage, row))
    row, slot, stage = row[order], slot[order], stage[order]
    # A cell: the partials of one row in one stage.
    first = np.flatnonzero(np.append(True, (row[1:] != row[:-1]) | (stage[1:] != stage[:-1]))[: len(row)])
    counts = np.diff(np.append(first, len(row)))
    cell_row, cell_stage = row[first], stage[first]
    opens = np.append(True, cell_row[1:] != cell_row[:-1])[: len(first)]
    closes = np.append(cell_row[1:] != cell_row[:-1], True)[: len(first)]
    running = slot[first[opens]][np.cumsum(opens) - 1]
    cell_stage = np.where(opens & closes & (counts == 1), stages - 1, cell_stage)

    kept = np.flatnonzero(~opens | closes | (counts > 1))
    joined = (~opens[kept]).astype(np.int64)
    target = np.where(closes[kept], cell_row[kept], -1 - running[kept])
    lengths = counts[kept] + joined
    indptr = offsets(lengths)
    slots = np.empty(indptr[-1], np.int64)
    slots[indptr[:-1]] = running[kept]  # overwritten below where the row has nothing yet: then it is its own first slot
    slots[ragged_ranges(indptr[:-1] + joined, counts[kept])] = slot[ragged_ranges(first[kept], counts[kept])]

    # Rows without partials are empty merges of the last stage.
    target = np.concatenate([target, unseeing])
    stage = np.concatenate([cell_stage[kept], np.full(len(unseeing), stages - 1)])
    begin = np.concatenate([indptr[:-1], np.zeros(len(unseeing), np.int64)])
    lengths = np.concatenate([lengths, np.zeros(len(unseeing), np.int64)])
    owner = np.concatenate([cell_row[kept], unseeing])
    order = np.lexsort((owner, stage))
    return Merges(
        frozen(target[order]),
        frozen(offsets(lengths[order])),
        frozen(slots[ragged_ranges(begin[order], lengths[order])]),
        frozen(np.searchsorted(stage[order], np.arange(stages + 1))),
    )


def single_stage_merges(row: Longs | Ints, slot: Longs, unseeing: Longs | None = None) -> Merges:
    """`merge_lists` of one stage: all partials of a row are one merge, and it is final. unseeing: by default none."""
    if unseeing is None or not len(unseeing):
        lengths = np.bincount(row)
        rows = lengths.nonzero()[0]
    else:
        lengths = np.bincount(row, minlength=largest(unseeing) + 1)
        merged = lengths > 0
        merged[unseeing] = True
        rows = merged.nonzero()[0]
    # Keys of 16 bits are sorted by radix.
    order = (row.astype(np.uint16) if len(lengths) <= 1 << 16 else row).argsort(kind="stable")
    return Merges(frozen(rows), frozen(offsets(lengths[rows])), frozen(slot[order]), frozen(np.array([0, len(rows)])))


def no_merges(unseeing: Longs, stages: int) -> Merges:
    """`merge_lists` where no row has partials."""
    return (
        _empty_merges(stages)
        if not len(unseeing)
        else merge_lists(unseeing[:0], unseeing[:0], unseeing[:0], unseeing, stages)
    )


@cache
def _empty_merges(stages: int) -> Merges:
    """`merge_lists` of no rows."""
    return Merges(_NO_SLOTS, NO_EPILOGUE.indptr, _NO_SLOTS, frozen(np.zeros(stages + 1)))
