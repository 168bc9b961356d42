"""Groupings: the ways in which a plan can begin. Each gives a plan that obeys the coverage law."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, offsets, ragged, ragged_ranges, ramp, stacked
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree


def by_row(tree: Tree) -> Plan:
    """One group per row with its whole path, root first: what FlashDecoding and radix attention read."""
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
    # Collected leaf first: reversing makes a stable sort by rank put the root first.
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
    """One group per row that sees anything, with all visible tokens, also those that the row does not see."""
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
    """One group per node with every row that sees any of it (DeFT, KV-guided grouping); masked only for rows inside."""
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
    """One group per `rows` neighbouring ranks with their whole paths, root first: what several of them see is read once
    for all, masked.

    cut: nodes at which paths are cut. What lies at or below such a node, down to the next ones, is walked by groups of
    its own, which begin with the node's first row. borders: ranks at which groups begin anew, the first and the last
    rank's end included, none of them inside a tree's rows.
    """
    first, pairs, cohorts = _cohorts_of(tree, rows, cut, borders)
    # Pairs of a span and a cohort that reads it, span by span, are sorted by cohorts.
    of = ragged_ranges(first, pairs)
    span = ramp(len(pairs)).repeat(pairs).take(of.argsort(kind="stable"))
    counts = np.bincount(of, minlength=len(cohorts.row_lo))
    if np.count_nonzero(counts) < len(counts):
        alive = counts.nonzero()[0]
        counts, cohorts = counts[alive], _Cohorts.of(cohorts.row_lo[alive], cohorts.row_hi[alive])
    segments = tree.topology.spans.table.take(span, 1)
    begin, end = cohorts.row_lo.repeat(counts), cohorts.row_hi.repeat(counts)
    seen_lo, seen_hi = segments[3], segments[4]
    np.maximum(seen_lo, begin, out=seen_lo)
    np.minimum(seen_hi, end, out=seen_hi)
    seen_lo -= begin
    seen_hi -= begin
    return Plan.trusted(
        "by-cohort", cohorts.indptr, cohorts.row_lo, cohorts.row_hi, offsets(counts), segments, cohorts.rows
    )


class _Cohorts(NamedTuple):
    """The ranks `row_lo:row_hi` of every cohort, an interval each, and how many these are."""

    indptr: Ints
    row_lo: Ints
    row_hi: Ints
    rows: Ints

    @classmethod
    def of(cls, row_lo: Longs | Ints, row_hi: Longs | Ints) -> _Cohorts:
        """Cohorts of these ranks."""
        return cls(frozen(np.arange(len(row_lo) + 1)), frozen(row_lo), frozen(row_hi), frozen(row_hi - row_lo))


def _cohorts_of(tree: Tree, rows: int, cut: Ints | None, borders: Longs | None) -> tuple[Longs, Longs, _Cohorts]:
    """The groups of `by_cohort`, some of which may read nothing; and the cohorts that read every span: the first one,
    and how many there are.
    """
    spans, topology = tree.topology.spans, tree.topology
    if (borders is None or len(borders) == 2) and (cut is None or not len(cut)):
        cohorts, number, behind = _even_cohorts(tree.num_rows, rows)
        first = number.take(spans.lo)
        return first, behind.take(spans.hi) - first, cohorts
    # Fragments: what hangs on the roots between two borders, then one per cut node in depth-first order.
    borders = np.array([0, tree.num_rows]) if borders is None else borders
    lo, hi, base, end = spans.lo, spans.hi, borders[:-1], borders[1:]
    own = base.searchsorted(lo, "right") - 1
    if cut is not None and len(cut):
        cut = cut[topology.preorder[cut].argsort()]
        below = fragments_of(tree, cut)[spans.node]
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
    """Cohorts of so many of all rows; the number of the one in which ranks that begin at any rank are, and behind which
    of them those that end there are. The same at every step of a batch that keeps its rows.
    """
    row_lo, rank = np.arange(0, num_rows, rows), np.arange(num_rows + 1)
    return _Cohorts.of(row_lo, np.minimum(row_lo + rows, num_rows)), rank // rows, -(-rank // rows)


def fragments_of(tree: Tree, cut: Ints) -> Longs:
    """For every node 1 + the index in `cut` of the nearest such node at or above it; 0 where there is none."""
    number = np.zeros(len(tree.parent), np.int64)
    number[cut] = np.arange(1, len(cut) + 1)
    above = np.where(number > 0, -1, tree.parent).astype(np.int64)
    while (above >= 0).any():
        reached = np.maximum(above, 0)
        number = np.where(above >= 0, number[reached], number)
        above = np.where((above >= 0) & (number == 0), above[reached], -1)
    return number


def whole_tree(tree: Tree) -> Plan:
    """One group of all rows with all visible tokens in depth-first order, masked; rows that see nothing included."""
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
    """Segments of all rows' paths, each by itself."""
    spans = tree.topology.spans
    return int((spans.hi.astype(np.int64) - spans.lo).sum())


def cohorts_of_spans(tree: Tree, rows: int) -> Longs:
    """How many of the cohorts of `rows` neighbouring ranks read every span, where they read their whole paths."""
    spans = tree.topology.spans
    cohorts: Longs = (spans.hi.astype(np.int64) - 1) // rows - spans.lo // rows + 1
    return cohorts


def _nodes_size(tree: Tree, chunk: int) -> int:
    """Every chunk of a span with the rows that see it."""
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
"""Estimates of all segments and rows of a plan, by grouping, for a given length of contexts: see Strategy.plan_size."""

BY_TREE = (by_row, by_node)
"""Groupings that take every tree of a forest by itself: of several trees joined they give their plans joined."""
