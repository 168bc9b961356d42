"""Groupings: the ways in which a plan can begin. Each gives a plan that obeys the coverage law."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, offsets, ragged
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree


def by_row(tree: Tree) -> Plan:
    """One group per row with its whole path, root first: what FlashDecoding and radix attention read."""
    topology = tree.topology
    ranks = np.arange(tree.num_rows)
    node = tree.row_node[topology.row_of_rank].astype(np.int64)
    stop = tree.row_sees[topology.row_of_rank].astype(np.int64)
    path: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    while len(ranks):
        filled = stop > 0
        path.append((ranks[filled], node[filled], stop[filled]))
        node = tree.parent[node].astype(np.int64)
        above = node >= 0
        ranks, node = ranks[above], node[above]
        stop = tree.tokens[node].astype(np.int64)
    empty = np.empty(0, np.int64)
    # Collected leaf first: reversing makes a stable sort by rank put the root first.
    rank, node, stop = (
        np.concatenate([*column[::-1], empty]) for column in (zip(*path, strict=True) if path else [[]] * 3)
    )
    order = np.argsort(rank, kind="stable")
    rank, node, stop = rank[order], node[order], stop[order]
    rows, counts = np.unique(rank, return_counts=True)
    return Plan(
        "by-row",
        frozen(np.arange(len(rows) + 1)),
        frozen(rows),
        frozen(rows + 1),
        frozen(offsets(counts)),
        frozen(node),
        frozen(np.zeros(len(node))),
        frozen(stop),
        frozen(np.zeros(len(node))),
        frozen(np.ones(len(node))),
    )


def by_row_whole_tree(tree: Tree) -> Plan:
    """One group per row that sees anything, with all visible tokens, also those that the row does not see."""
    spans = tree.topology.spans
    ranks = np.unique(by_row(tree).row_lo)
    count, width = len(ranks), len(spans)
    rank = np.repeat(ranks, width)
    sees = (np.tile(spans.lo, count) <= rank) & (rank < np.tile(spans.hi, count))
    return Plan(
        "by-row-whole-tree",
        frozen(np.arange(count + 1)),
        frozen(ranks),
        frozen(ranks + 1),
        frozen(np.arange(count + 1) * width),
        frozen(np.tile(spans.node, count)),
        frozen(np.tile(spans.start, count)),
        frozen(np.tile(spans.stop, count)),
        frozen(np.zeros(count * width)),
        frozen(sees),
    )


def by_node(tree: Tree) -> Plan:
    """One group per node with every row that sees any of it (DeFT, KV-guided grouping); masked only for rows inside."""
    spans = tree.topology.spans
    first = np.flatnonzero(np.append(True, spans.node[1:] != spans.node[:-1])[: len(spans)])
    counts = np.diff(np.append(first, len(spans)))
    lo = np.repeat(spans.lo[first], counts)
    return Plan(
        "by-node",
        frozen(np.arange(len(first) + 1)),
        frozen(spans.lo[first]),
        frozen(spans.hi[first]),
        frozen(np.append(first, len(spans))),
        spans.node,
        spans.start,
        spans.stop,
        frozen(spans.lo - lo),
        frozen(spans.hi - lo),
    )


def by_cohort(tree: Tree, rows: int, cut: Ints | None = None, borders: Longs | None = None) -> Plan:
    """One group per `rows` neighbouring ranks with their whole paths, root first: what several of them see is read once
    for all, masked.

    cut: nodes at which paths are cut. What lies at or below such a node, down to the next ones, is walked by groups of
    its own, which begin with the node's first row. borders: ranks at which groups begin anew, the first and the last
    rank's end included, none of them inside a tree's rows.
    """
    spans = tree.topology.spans
    cohorts = cohorts_of(tree, rows, cut, borders)
    order = np.argsort(cohorts.of, kind="stable")
    span, cohort = cohorts.span[order], cohorts.of[order]
    alive, begin = np.unique(cohort, return_index=True)
    row_lo = cohorts.row_lo[cohort]
    return Plan(
        "by-cohort",
        frozen(np.arange(len(alive) + 1)),
        frozen(cohorts.row_lo[alive]),
        frozen(cohorts.row_hi[alive]),
        frozen(np.append(begin, len(span))),
        frozen(spans.node[span]),
        frozen(spans.start[span]),
        frozen(spans.stop[span]),
        frozen(np.maximum(spans.lo[span] - row_lo, 0)),
        frozen(np.minimum(spans.hi[span], cohorts.row_hi[cohort]) - row_lo),
    )


class Cohorts(NamedTuple):
    """Pairs of a span and a cohort that reads it, by span, and the ranks `row_lo:row_hi` of every cohort. Some cohorts
    may have no span.
    """

    span: Longs
    of: Longs
    row_lo: Longs
    row_hi: Longs


def cohorts_of(tree: Tree, rows: int, cut: Ints | None = None, borders: Longs | None = None) -> Cohorts:
    """The groups of `by_cohort` as arrays, without a plan."""
    spans, topology = tree.topology.spans, tree.topology
    lo, hi = spans.lo.astype(np.int64), spans.hi.astype(np.int64)
    # Fragments: what hangs on the roots between two borders, then one per cut node in depth-first order.
    borders = np.array([0, tree.num_rows]) if borders is None else borders
    base, end = borders[:-1].astype(np.int64), borders[1:].astype(np.int64)
    own = np.searchsorted(base, lo, side="right") - 1
    if cut is not None and len(cut):
        cut = cut[np.argsort(topology.preorder[cut])]
        below = fragments_of(tree, cut)[spans.node]
        own = np.where(below > 0, len(base) - 1 + below, own)
        base, end = np.append(base, topology.rank_lo[cut]), np.append(end, topology.rank_hi[cut])
    counts = -(-(end - base) // rows)
    before = offsets(counts)
    fragment, step = ragged(counts)
    starts = base[fragment] + step * rows
    ends = np.minimum(starts + rows, end[fragment])
    first = before[own] + (lo - base[own]) // rows
    last = before[own] + (hi - 1 - base[own]) // rows
    if (first == last).all():
        return Cohorts(np.arange(len(first)), first, starts, ends)
    span, step = ragged(last - first + 1)
    return Cohorts(span, first[span] + step, starts, ends)


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
    return Plan(
        "whole-tree",
        frozen(np.arange(groups + 1)),
        frozen(np.zeros(groups)),
        frozen(np.full(groups, tree.num_rows)),
        frozen(np.array([0, len(spans)])[: groups + 1]),
        spans.node,
        spans.start,
        spans.stop,
        spans.lo,
        spans.hi,
    )


BY_TREE = (by_row, by_node)
"""Groupings that take every tree of a forest by itself: of several trees joined they give their plans joined."""
