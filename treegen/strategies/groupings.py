"""Groupings: the ways in which a plan can begin. Each gives a plan that obeys the coverage law."""

from __future__ import annotations

import numpy as np

from treegen.ir.arrays import frozen, offsets, ragged
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


def by_cohort(tree: Tree, rows: int) -> Plan:
    """One group per `rows` neighbouring ranks with their whole paths, root first: what several of them see is read once
    for all, masked.
    """
    spans = tree.topology.spans
    first = spans.lo // rows
    span, step = ragged((spans.hi - 1) // rows - first + 1)
    cohort = first[span] + step
    order = np.argsort(cohort, kind="stable")
    span, cohort = span[order], cohort[order]
    alive, begin = np.unique(cohort, return_index=True)
    return Plan(
        "by-cohort",
        frozen(np.arange(len(alive) + 1)),
        frozen(alive * rows),
        frozen(np.minimum((alive + 1) * rows, tree.num_rows)),
        frozen(np.append(begin, len(span))),
        frozen(spans.node[span]),
        frozen(spans.start[span]),
        frozen(spans.stop[span]),
        frozen(np.maximum(spans.lo[span] - cohort * rows, 0)),
        frozen(np.minimum(spans.hi[span] - cohort * rows, rows)),
    )


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
