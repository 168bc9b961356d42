"""Positions of rows and tokens along their paths, and sliding windows, which are counted in positions."""

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
    """Depths in tokens, from 0: of each node's first token (`node`), and of each row (`row`, as Tree.positions)."""

    node: Longs
    row: Ints

    @classmethod
    def of(cls, tree: Tree) -> Positions:
        """Returns the positions of a tree."""
        return cls(tree.topology.prefix, tree.positions())


def windowed(tree: Tree, window_left: int) -> tuple[Tree, Positions]:
    """Returns the tree without tokens outside of all rows' windows, and the positions of its nodes and rows.

    A row sees the token at its own position and `window_left` tokens before it. A node loses the tokens at its
    beginning that are outside of the windows of all rows at or below it. Nodes and rows keep the positions that they
    had. A row's own window may begin later than the tokens that are left. With `window_left` = 80:

        node 0             0 ............................. 99
        row at 150                   70 .................. 99 ........ 150      its window
        row at 170                            90 ......... 99 ............. 170
        node 0 afterwards            70 .................. 99
    """
    topology, before = tree.topology, Positions.of(tree)
    least = _least(before.row[topology.row_of_rank], topology.rank_lo, topology.rank_hi)
    left = np.clip(least - window_left - before.node, 0, tree.tokens)
    tokens, sees = frozen(tree.tokens - left), frozen(tree.row_sees - np.minimum(left[tree.row_node], tree.row_sees))
    kv = tree.kv.of_ranges(np.arange(len(tokens)), left, tree.tokens)
    made = type(tree)(tree.parent, tokens, tree.row_node, sees, kv, derive(tree.parent, tokens, tree.row_node, sees))
    return made, Positions(before.node + left, before.row)


def clipped(plan: Plan, tree: Tree, positions: Positions, window_left: int) -> Plan:
    """Returns the plan without tokens at the beginning of segments that no row of a group sees through its window.

    Tokens that a group reads without seeing them stay.
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
    """Returns the smallest of `values[lo:hi]` for each pair; for an empty interval a number beyond all positions."""
    least = np.full(len(lo), np.iinfo(np.int64).max // 2)
    some = np.flatnonzero(hi > lo)
    if len(some):
        bounds: Longs = np.stack([lo[some], hi[some]], axis=1).ravel().astype(np.int64)
        least[some] = np.minimum.reduceat(np.append(values, values[-1]).astype(np.int64), bounds)[::2]
    return least
