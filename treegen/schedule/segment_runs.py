"""Runs of KV slots: a plan's segments on the KV cache, handed to work items. No Python loop over items or tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints, Longs, offsets, ragged_ranges
from treegen.ir.plan import Plan
from treegen.ir.positions import Positions
from treegen.ir.schedule import POSITIONED_RUN_FIELDS, RUN_FIELDS
from treegen.ir.tree import Tree
from treegen.ir.tree.kv import KVRuns


class Runs(NamedTuple):
    """Runs of KV slots by owner (a group, later an item): owner i has the rows `indptr[i]:indptr[i + 1]` of `table`,
    whose columns are RUN_FIELDS, or POSITIONED_RUN_FIELDS. length: that column of the table, as it is counted with.
    """

    indptr: Longs
    table: Ints
    length: Longs

    @classmethod
    def of_table(cls, indptr: Longs, table: Ints) -> Runs:
        """The runs of a table."""
        return cls(indptr, table, table[:, 1].astype(np.int64))

    @property
    def counts(self) -> Longs:
        """Runs of every owner."""
        return self.indptr[1:] - self.indptr[:-1]

    @property
    def tokens(self) -> Longs:
        """Tokens of every owner, none of which is without runs."""
        return np.add.reduceat(self.length, self.indptr[:-1])

    def of(self, owners: Longs) -> Runs:
        """The runs of these owners, in this order."""
        counts = self.counts[owners]
        places = offsets(counts)
        run = ragged_ranges(self.indptr[owners], counts, places)
        return Runs(places, self.table.take(run, 0), self.length.take(run))


def runs_of_groups(plan: Plan, tree: Tree, positions: Positions | None = None) -> Runs:
    """Every segment cut at the borders of its node's KV runs. Those that nobody in the group sees are seen by 0:0."""
    kv, indptr = tree.kv, plan.segment_indptr.astype(np.int64)
    table = np.empty((len(plan.node), len(RUN_FIELDS if positions is None else POSITIONED_RUN_FIELDS)), np.int32)
    table[:, 2], table[:, 3] = plan.seen_lo, plan.seen_hi
    if positions is not None:
        table[:, 4] = positions.node[plan.node] + plan.start
    seen = plan.seen_hi > plan.seen_lo
    if np.count_nonzero(seen) < len(seen):
        table[~seen, 2:4] = 0
    if len(kv.start) == np.count_nonzero(tree.tokens):  # every node that has tokens is one run
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
    """The runs of a table of segments that may begin and end inside of runs, `start` tokens behind the one that their
    node begins with. indptr: the segments of every owner.
    """
    ends = offsets(kv.length)  # token coordinates through all nodes; runs cover them without gaps
    begin = ends[first_run] + start
    end = begin + segments[:, 1]
    first = ends.searchsorted(begin, "right") - 1
    last = ends.searchsorted(end)
    places = offsets(last - first)
    table = _on_runs(segments, kv, first, last - first, places)
    before = begin - ends[first]
    table[places[:-1], 0] += before
    table[places[:-1], 1] -= before
    if table.shape[1] > len(RUN_FIELDS):  # of later runs than a segment's first
        table[:, 4] -= before.repeat(last - first).astype(np.int32)
        table[places[:-1], 4] += before
    table[places[1:] - 1, 1] -= ends[last] - end
    return Runs.of_table(places[indptr], table)


def _on_runs(segments: Ints, kv: KVRuns, first: Longs, counts: Longs, places: Longs) -> Ints:
    """A table of segments as one of so many whole runs each, from run `first` on. places: the `offsets` of counts."""
    run = ragged_ranges(first, counts, places)
    table = segments.repeat(counts, axis=0)
    table[:, 0] = kv.start.take(run)
    table[:, 1] = kv.length.take(run)
    if table.shape[1] > len(RUN_FIELDS):
        ends = offsets(kv.length)
        table[:, 4] += (ends[run] - ends[first].repeat(counts)).astype(np.int32)
    return table


def runs_of_items(runs: Runs, group: Longs, begin: Longs, rows: Longs) -> Runs:
    """Each group's runs handed to its row tiles, without those that none of a tile's rows sees.

    Runs that nobody in the group sees stay: the strategy reads them on purpose.
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
    """Whether some of the owner's `rows` rows do not see a run."""
    masked: npt.NDArray[np.bool_] = runs.table[:, 3] - runs.table[:, 2] != rows.repeat(runs.counts)
    return masked


def bit_words(lo: Ints, hi: Ints) -> tuple[Longs, Longs]:
    """The lower and the upper half, as int32 values, of 64-bit words with bits `lo:hi` set."""
    below = [
        np.where(end > 0, np.uint64(2**64 - 1) >> (64 - np.maximum(end, 1)).astype(np.uint64), np.uint64(0))
        for end in (lo, hi)
    ]
    halves = (below[0] ^ below[1]).view(np.int32).reshape(-1, 2)
    return halves[:, 0].astype(np.int64), halves[:, 1].astype(np.int64)


def masked_launches(runs: Runs, rows: Longs, bounds: list[int]) -> list[bool]:
    """Whether a launch has a run that some of its owner's `rows` rows do not see. bounds: where the runs of every
    launch begin, and where the last ones end.
    """
    later = runs.table[:, 2]  # seldom is none of a launch's runs seen by later rows than the first alone
    found = [bool(np.count_nonzero(later[begin:end])) for begin, end in pairwise(bounds)]
    if all(found):
        return found
    masked = masked_runs(runs, rows)
    return [bool(np.count_nonzero(masked[begin:end])) for begin, end in pairwise(bounds)]
