"""Positions: how deep rows and tokens are along their paths, and sliding windows, which are told in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, offsets
from treegen.ir.tree.topology import derive

if TYPE_CHECKING:
    from treegen.ir.plan import Plan
    from treegen.ir.tree import Tree


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Depths in tokens, counted from 0: of every node's first token, and of every row (Tree.positions)."""

    node: Longs
    row: Ints

    @classmethod
    def of(cls, tree: Tree) -> Positions:
        """Those of a tree."""
        return cls(tree.topology.prefix, tree.positions())


def windowed(tree: Tree, window_left: int) -> tuple[Tree, Positions]:
    """The tree without the tokens that nobody sees through a window, where a row sees the token at its own position and
    `window_left` before it: every node loses those that all rows at or below it have left behind.

    With the positions that nodes and rows had, and keep. The rows' own windows may begin later than what is left.
    """
    topology, before = tree.topology, Positions.of(tree)
    least = _least(before.row[topology.row_of_rank], topology.rank_lo, topology.rank_hi)
    left = np.clip(least - window_left - before.node, 0, tree.tokens)
    tokens, sees = frozen(tree.tokens - left), frozen(tree.row_sees - np.minimum(left[tree.row_node], tree.row_sees))
    kv = tree.kv.of_ranges(np.arange(len(tokens)), left, tree.tokens)
    made = type(tree)(tree.parent, tokens, tree.row_node, sees, kv, derive(tree.parent, tokens, tree.row_node, sees))
    return made, Positions(before.node + left, before.row)


def clipped(plan: Plan, tree: Tree, positions: Positions, window_left: int) -> Plan:
    """The plan without what no row of a group sees through its window, at the beginning of segments. What a group reads
    without seeing it stays.
    """
    group = plan.segment_group
    segment, lo, hi = plan.rank_intervals(group, plan.seen_lo, plan.seen_hi)
    least = np.full(len(group), np.iinfo(np.int64).max)
    np.minimum.at(least, segment, _least(positions.row[tree.topology.row_of_rank], lo, hi))
    seen = np.bincount(segment, minlength=len(group)) > 0
    begin = np.where(seen, least - window_left - positions.node[plan.node], 0)
    start = np.maximum(plan.start, begin)
    if not (start > plan.start).any():
        return plan
    kept = start < plan.stop
    segments = plan.segments.compress(kept, axis=1)
    segments[1] = start[kept]
    return plan.with_segments(offsets(np.bincount(group[kept], minlength=len(plan))), segments)


def _least(values: Ints, lo: Ints | Longs, hi: Ints | Longs) -> Longs:
    """The least of `values[lo:hi]` of every pair; where there are none, more than any position and window."""
    least = np.full(len(lo), np.iinfo(np.int64).max // 2)
    some = np.flatnonzero(hi > lo)
    if len(some):
        bounds: Longs = np.stack([lo[some], hi[some]], axis=1).ravel().astype(np.int64)
        least[some] = np.minimum.reduceat(np.append(values, values[-1]).astype(np.int64), bounds)[::2]
    return least
