"""KV runs: cuts a plan's segments where KV slots stop being consecutive, and hands them to work items.

    segment    tokens 10:90 of a node                      seen by rows 0:5 of its group
    KV         [ slots 400:440 ][ slots 96:160 ]           the node's tokens 0:40 and 40:104 in the cache
    runs       [ 410:440 ] [ 96:146 ]                      consecutive KV slots, each seen by rows 0:5
    work item  rows 2:4 of the group                       the same runs, seen by rows 0:2 of the item

No Python loop over items or tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints, Longs, offsets, ragged_ranges
from treegen.ir.plan import Plan
from treegen.ir.positions import Positions
from treegen.ir.tree import Tree
from treegen.ir.tree.kv import KVRuns
from treegen.ir.work_items import POSITIONED_RUN_FIELDS, RUN_FIELDS


class Runs(NamedTuple):
    """KV runs by owner, which is a group at first and a work item later.

    Owner i has the lines `indptr[i]:indptr[i + 1]` of `table`, with the columns RUN_FIELDS or POSITIONED_RUN_FIELDS.
    length: the table's column of lengths in int64, for sums.
    """

    indptr: Longs
    table: Ints
    length: Longs

    @classmethod
    def of_table(cls, indptr: Longs, table: Ints) -> Runs:
        """Makes runs of a table with the columns RUN_FIELDS or POSITIONED_RUN_FIELDS."""
        return cls(indptr, table, table[:, 1].astype(np.int64))

    @property
    def counts(self) -> Longs:
        """The number of runs of each owner."""
        return self.indptr[1:] - self.indptr[:-1]

    @property
    def tokens(self) -> Longs:
        """The KV tokens of each owner. Every owner has a run."""
        return np.add.reduceat(self.length, self.indptr[:-1])

    def of(self, owners: Longs) -> Runs:
        """Picks the runs of these owners, in this order."""
        counts = self.counts[owners]
        places = offsets(counts)
        run = ragged_ranges(self.indptr[owners], counts, places)
        return Runs(places, self.table.take(run, 0), self.length.take(run))


def runs_of_groups(plan: Plan, tree: Tree, positions: Positions | None = None) -> Runs:
    """Cuts each segment at the borders of its node's KV runs.

    Segments that no row of the group sees get the interval 0:0.
    """
    kv, indptr = tree.kv, plan.segment_indptr.astype(np.int64)
    table = np.empty((len(plan.node), len(RUN_FIELDS if positions is None else POSITIONED_RUN_FIELDS)), np.int32)
    table[:, 2], table[:, 3] = plan.seen_lo, plan.seen_hi
    if positions is not None:
        table[:, 4] = positions.node[plan.node] + plan.start
    seen = plan.seen_hi > plan.seen_lo
    if np.count_nonzero(seen) < len(seen):
        table[~seen, 2:4] = 0
    if len(kv.start) == np.count_nonzero(tree.tokens):  # each node with tokens is one run
        run = plan.node if len(kv.start) == len(tree.tokens) else kv.indptr.take(plan.node)
        length = plan.stop - plan.start
        table[:, 0], table[:, 1] = kv.start.take(run) + plan.start, length
        return Runs(indptr, table, length.astype(np.int64))
    node, first = plan.node.astype(np.int64), kv.indptr.astype(np.int64)
    first_run = first.take(node)
    if np.count_nonzero(plan.start) or np.count_nonzero(plan.stop != tree.tokens.take(node)):
        table[:, 1] = plan.stop - plan.start
        return _cut_runs(indptr, table, kv, first_run, plan.start)
    counts = first[1:].take(node) - first_run
    places = offsets(counts)
    return Runs.of_table(places[indptr], _on_runs(table, kv, first_run, counts, places))


def _cut_runs(indptr: Longs, segments: Ints, kv: KVRuns, first_run: Longs, start: Ints) -> Runs:
    """Cuts segments that may begin and end in the middle of a KV run.

    first_run: the first run of each segment's node. start: tokens of the node before the segment. indptr: offsets of
    each owner's segments.
    """
    ends = offsets(kv.length)  # token numbers over all nodes, which runs cover without gaps
    begin = ends[first_run] + start
    end = begin + segments[:, 1]
    first = ends.searchsorted(begin, "right") - 1
    last = ends.searchsorted(end)
    places = offsets(last - first)
    table = _on_runs(segments, kv, first, last - first, places)
    before = begin - ends[first]
    table[places[:-1], 0] += before
    table[places[:-1], 1] -= before
    if table.shape[1] > len(RUN_FIELDS):  # positions of all runs but the first of each segment
        table[:, 4] -= before.repeat(last - first).astype(np.int32)
        table[places[:-1], 4] += before
    table[places[1:] - 1, 1] -= ends[last] - end
    return Runs.of_table(places[indptr], table)


def _on_runs(segments: Ints, kv: KVRuns, first: Longs, counts: Longs, places: Longs) -> Ints:
    """Repeats each segment for its `counts` whole KV runs from run `first` on. places: the offsets of `counts`."""
    run = ragged_ranges(first, counts, places)
    table = segments.repeat(counts, axis=0)
    table[:, 0] = kv.start.take(run)
    table[:, 1] = kv.length.take(run)
    if table.shape[1] > len(RUN_FIELDS):
        ends = offsets(kv.length)
        table[:, 4] += (ends[run] - ends[first].repeat(counts)).astype(np.int32)
    return table


def runs_of_items(runs: Runs, group: Longs, begin: Longs, rows: Longs) -> Runs:
    """Hands each group's runs to its work items, without runs that no row of an item sees.

    Runs that no row of the whole group sees stay, because the strategy reads them on purpose.
    """
    counts = runs.counts[group]
    table = runs.table.take(ragged_ranges(runs.indptr[group], counts), axis=0)
    lo, hi = table[:, 2], table[:, 3]
    unseen = lo == hi
    first = begin.repeat(counts)
    lo, hi = np.maximum(lo - first, 0), np.minimum(hi - first, rows.repeat(counts))
    kept = (hi > lo) | unseen
    lo[unseen] = hi[unseen] = 0
    table[:, 2], table[:, 3] = lo, hi
    if np.count_nonzero(kept) == len(kept):
        return Runs.of_table(offsets(counts), table)
    return Runs.of_table(offsets(kept)[offsets(counts)], table.compress(kept, axis=0))


def masked_runs(runs: Runs, rows: Longs) -> npt.NDArray[np.bool_]:
    """Says for each run whether some of its owner's `rows` rows do not see it."""
    masked: npt.NDArray[np.bool_] = runs.table[:, 3] - runs.table[:, 2] != rows.repeat(runs.counts)
    return masked


def bit_words(lo: Ints, hi: Ints) -> tuple[Longs, Longs]:
    """Makes 64-bit words with bits `lo:hi` set; returns their lower and upper halves as int32 values."""
    below = [
        np.where(end > 0, np.uint64(2**64 - 1) >> (64 - np.maximum(end, 1)).astype(np.uint64), np.uint64(0))
        for end in (lo, hi)
    ]
    halves = (below[0] ^ below[1]).view(np.int32).reshape(-1, 2)
    return halves[:, 0].astype(np.int64), halves[:, 1].astype(np.int64)


def masked_launches(runs: Runs, rows: Longs, bounds: list[int]) -> list[bool]:
    """Says for each launch whether some row of an item does not see one of the item's runs.

    bounds: the offset of each launch's first run, then the number of runs.
    """
    later = runs.table[:, 2]  # most launches have a run that the first row does not see, which is quick to find
    found = [bool(np.count_nonzero(later[begin:end])) for begin, end in pairwise(bounds)]
    if all(found):
        return found
    masked = masked_runs(runs, rows)
    return [bool(np.count_nonzero(masked[begin:end])) for begin, end in pairwise(bounds)]
