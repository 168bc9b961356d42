"""Groupings: the first plans of strategies. They obey the coverage law; passes then rewrite them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, offsets, ragged, ragged_ranges, ramp, stable_order, stacked
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree
from treegen.strategies.joined_spans import last_seen_by_all, read_apart


def by_row(tree: Tree) -> Plan:
    """Makes one group per row with its whole path, root first: what FlashDecoding and radix attention read."""
    topology = tree.topology
    parent, tokens = tree.parent.astype(np.int64), tree.tokens
    ranks = np.arange(tree.num_rows)
    node = tree.row_node[topology.row_of_rank].astype(np.int64)
    stop = tree.row_sees[topology.row_of_rank]
    path = [(ranks[:0], node[:0], stop[:0])]
    while len(ranks):
        filled = stop > 0
        path.append((ranks[filled], node[filled], stop[filled]))
        node = parent[node]
        above = node >= 0
        ranks, node = ranks[above], node[above]
        stop = tokens[node]
    # The path was collected from the leaf up. Reversed, a stable sort by rank puts the root first.
    rank, node, stop = (np.concatenate(column[::-1]) for column in zip(*path, strict=True))
    order = rank.argsort(kind="stable")
    counts = np.bincount(rank, minlength=tree.num_rows)
    rows = counts.nonzero()[0]
    return Plan.trusted(
        "by-row",
        np.arange(len(rows) + 1),
        rows,
        rows + 1,
        offsets(counts[rows]),
        stacked(node[order], 0, stop[order], 0, 1),
        np.ones(len(rows), np.int32),
    )


def by_row_whole_tree(tree: Tree) -> Plan:
    """Makes one group per row that sees anything, with all visible tokens, also those that the row does not see."""
    spans = tree.topology.spans
    ranks = by_row(tree).row_lo
    count, width = len(ranks), len(spans)
    rank = ranks.repeat(width)
    return Plan.trusted(
        "by-row-whole-tree",
        np.arange(count + 1),
        ranks,
        ranks + 1,
        np.arange(count + 1) * width,
        stacked(
            np.tile(spans.node, count),
            np.tile(spans.start, count),
            np.tile(spans.stop, count),
            0,
            (np.tile(spans.lo, count) <= rank) & (rank < np.tile(spans.hi, count)),
        ),
        np.ones(count, np.int32),
    )


def by_node(tree: Tree) -> Plan:
    """Makes one group per node with all rows that see any of it (DeFT, KV-guided grouping).

    Masks are needed only for rows that end inside of a node.
    """
    spans = tree.topology.spans
    begins = np.ones(len(spans) + 1, np.bool_)
    begins[1:-1] = spans.node[1:] != spans.node[:-1]
    indptr = begins.nonzero()[0]
    first = indptr[:-1]
    row_lo, row_hi = spans.lo[first], spans.hi[first]
    lo = row_lo.repeat(indptr[1:] - first)
    return Plan.trusted(
        "by-node",
        np.arange(len(first) + 1),
        row_lo,
        row_hi,
        indptr,
        stacked(spans.node, spans.start, spans.stop, spans.lo - lo, spans.hi - lo),
        row_hi - row_lo,
    )


def by_cohort(tree: Tree, rows: int, cut: Ints | None = None, borders: Longs | None = None) -> Plan:
    """Makes one group per `rows` neighbouring ranks with their whole paths, root first, masked.

    A span that several of these rows see is read once for all of them:

        ranks      0  1  2  3 │ 4  5  6  7      rows = 4: two cohorts
        node 0     ├─────────────────────┤      both cohorts read it
        node 1     ├─────┤                      cohort 0 reads it, with ranks 2 and 3 masked
        node 2              ├─────┤             both read it: rank 3 of cohort 0 and ranks 4, 5 of cohort 1 see it

    Args:
        tree: The tree.
        rows: The most rows of a group.
        cut: Nodes at which paths are cut. Other groups read the nodes at or below a cut node, down to the next cut
            nodes; they begin with the first row of the cut node.
        borders: Ranks at which groups begin anew, from 0 to the number of rows; none is inside the rows of a tree.
    """
    spans = tree.topology.spans
    first, pairs, cohorts = _cohorts_of(tree, rows, cut, borders)
    # Lowering by request joins what all rows of a group see of a node; other schedules have a run for each span.
    several = tree.requests is not None and tree.requests.queries is not None
    if several:
        pairs = read_apart(spans, first, pairs, cohorts.row_lo)
    # Pairs of a span and a cohort that reads it are listed span by span, and sorted by cohorts here.
    of = ragged_ranges(first, pairs)
    order = stable_order(of, len(cohorts.row_lo))
    span = ramp(len(pairs)).repeat(pairs).take(order)
    counts = np.bincount(of, minlength=len(cohorts.row_lo))
    if np.count_nonzero(counts) < len(counts):
        alive = counts.nonzero()[0]
        counts, cohorts = counts[alive], _Cohorts.of(cohorts.row_lo[alive], cohorts.row_hi[alive])
    segments = spans.table.take(span, 1)
    begin, end = cohorts.row_lo.repeat(counts), cohorts.row_hi.repeat(counts)
    if several:
        last = last_seen_by_all(spans, span, begin)
        segments[2] = spans.stop.take(last)
    seen_lo, seen_hi = segments[3], segments[4]
    np.maximum(seen_lo, begin, out=seen_lo)
    np.minimum(seen_hi, end, out=seen_hi)
    seen_lo -= begin
    seen_hi -= begin
    return Plan.trusted(
        "by-cohort", cohorts.indptr, cohorts.row_lo, cohorts.row_hi, offsets(counts), segments, cohorts.rows
    )


class _Cohorts(NamedTuple):
    """The ranks `row_lo:row_hi` of each cohort, which are one interval, and their number `rows`."""

    indptr: Ints
    row_lo: Ints
    row_hi: Ints
    rows: Ints

    @classmethod
    def of(cls, row_lo: Longs | Ints, row_hi: Longs | Ints) -> _Cohorts:
        """Makes cohorts of these ranks."""
        return cls(frozen(np.arange(len(row_lo) + 1)), frozen(row_lo), frozen(row_hi), frozen(row_hi - row_lo))


def _cohorts_of(tree: Tree, rows: int, cut: Ints | None, borders: Longs | None) -> tuple[Longs, Longs, _Cohorts]:
    """Returns the first cohort that reads each span, the number of cohorts that read it, and all cohorts.

    They are the groups of `by_cohort`; some of them may read nothing.
    """
    spans, topology = tree.topology.spans, tree.topology
    if (borders is None or len(borders) == 2) and (cut is None or not len(cut)):
        cohorts, number, behind = _even_cohorts(tree.num_rows, rows)
        first = number.take(spans.lo)
        return first, behind.take(spans.hi) - first, cohorts
    # Fragments of the tree: the nodes above all cuts between two borders, then one fragment per cut node in
    # depth-first order.
    borders = np.array([0, tree.num_rows]) if borders is None else borders
    lo, hi, base, end = spans.lo, spans.hi, borders[:-1], borders[1:]
    own = base.searchsorted(lo, "right") - 1
    if cut is not None and len(cut):
        cut = cut[topology.preorder[cut].argsort()]
        below = fragments_of_spans(tree, cut)
        own = np.where(below > 0, len(base) - 1 + below, own)
        base, end = np.append(base, topology.rank_lo[cut]), np.append(end, topology.rank_hi[cut])
    counts = -((base - end) // rows)
    fragment, step = ragged(counts)
    starts = base[fragment] + step * rows
    ends = np.minimum(starts + rows, end[fragment])
    origin, number = base[own], offsets(counts)[own]
    first = (lo - origin) // rows
    return number + first, (hi - origin + (rows - 1)) // rows - first, _Cohorts.of(starts, ends)


@lru_cache(64)
def _even_cohorts(num_rows: int, rows: int) -> tuple[_Cohorts, Longs, Longs]:
    """Returns cohorts of `rows` neighbouring ranks, and the cohorts of intervals of ranks.

    By rank: the first cohort of an interval that begins there, and the end of the cohorts of one that ends there.
    Results are kept, because they are the same at every step of a batch that keeps its rows.
    """
    row_lo, rank = np.arange(0, num_rows, rows), np.arange(num_rows + 1)
    return _Cohorts.of(row_lo, np.minimum(row_lo + rows, num_rows)), rank // rows, -(-rank // rows)


def fragments_of_spans(tree: Tree, cut: Ints) -> Longs:
    """Returns `fragments_of` for the node of each span. cut: in depth-first order."""
    topology, node = tree.topology, tree.topology.spans.node
    lo, hi, above = topology.rank_lo.take(cut), topology.rank_hi.take(cut), tree.parent.take(cut)
    seen_above = topology.rank_hi.take(above) - topology.rank_lo.take(above)
    # Usually no cut node is below another one, and more rows see the node above it. Rows then tell what is below it.
    if np.count_nonzero(hi[:-1] > lo[1:]) or np.count_nonzero((hi == lo) | (seen_above == hi - lo)):
        return fragments_of(tree, cut)[node]
    number = lo.searchsorted(topology.rank_lo.take(node), "right")
    below: Longs = np.where((number > 0) & (topology.rank_hi.take(node) <= hi.take(number - 1)), number, 0)
    return below


def fragments_of(tree: Tree, cut: Ints) -> Longs:
    """Returns for each node 1 + the index in `cut` of the nearest such node at or above it; 0 for none."""
    number = np.zeros(len(tree.parent), np.int64)
    number[cut] = np.arange(1, len(cut) + 1)
    above = np.where(number > 0, -1, tree.parent).astype(np.int64)
    while (above >= 0).any():
        reached = np.maximum(above, 0)
        number = np.where(above >= 0, number[reached], number)
        above = np.where((above >= 0) & (number == 0), above[reached], -1)
    return number


def whole_tree(tree: Tree) -> Plan:
    """Makes one group of all rows with all visible tokens in depth-first order, masked.

    Rows that see nothing are included.
    """
    spans = tree.topology.spans
    groups = 1 if len(spans) else 0
    rows = np.full(groups, tree.num_rows)
    return Plan.trusted(
        "whole-tree",
        np.arange(groups + 1),
        np.zeros(groups, np.int32),
        rows,
        np.array([0, len(spans)])[: groups + 1],
        spans.table,
        rows,
    )


def path_segments(tree: Tree) -> int:
    """Counts the segments of all rows' paths, each path by itself."""
    spans = tree.topology.spans
    return int((spans.hi.astype(np.int64) - spans.lo).sum())


def cohorts_of_spans(tree: Tree, rows: int) -> Longs:
    """Counts for each span the cohorts of `rows` neighbouring ranks that read it, if they read their whole paths."""
    spans = tree.topology.spans
    cohorts: Longs = (spans.hi.astype(np.int64) - 1) // rows - spans.lo // rows + 1
    return cohorts


def _nodes_size(tree: Tree, chunk: int) -> int:
    """Counts the chunks of all spans, and the rows that see each chunk."""
    spans = tree.topology.spans
    rows = spans.hi.astype(np.int64) - spans.lo
    return int(((rows + 1) * -(-spans.lengths // chunk)).sum())


SIZES: dict[Callable[[Tree], Plan], Callable[[Tree, int], int]] = {
    by_row: lambda tree, chunk: 2 * (path_segments(tree) + tree.path_tokens // chunk),
    by_row_whole_tree: lambda tree, chunk: tree.num_rows * (len(tree.topology.spans) + tree.unique_tokens // chunk),
    by_node: _nodes_size,
    whole_tree: lambda tree, chunk: (
        len(tree.topology.spans) + tree.num_rows if chunk > tree.unique_tokens else _nodes_size(tree, chunk)
    ),
}
"""Estimates of the segments and rows of a plan, by grouping, for a length of contexts: see Strategy.plan_size."""

BY_TREE = (by_row, by_node)
"""Groupings whose plan of several joined trees is the join of the trees' plans."""
