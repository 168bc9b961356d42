"""Positions of rows and tokens along their paths, and trees and plans without what no sliding window reaches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, offsets, stacked
from treegen.ir.tree.kv import KVRuns
from treegen.ir.tree.request_kv import RequestKV
from treegen.ir.tree.topology import derive, shortened

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


def windowed_requests(tree: Tree, window_left: int, unit: int) -> Tree:
    """Returns the tree by request without tokens that no row's window reaches.

    A node loses tokens at its beginning, in whole units, or all of them, and then it is left out. Windows of longer
    requests reach no token that is lost. `RequestKV.least` says how much shorter a request may get. With a window of
    128 tokens and units of 16:

        before      request 0   [ 0 ............... 8000 | 8000 ......... 8192 >
                    request 1                            | [ 8000 .... 8160 >
        afterwards  request 0                            |     [ 8064 ... 8192 >
                    request 1                            |   [ 8032 .. 8160 >

    Args:
        tree: A tree by request.
        window_left: Tokens before its own that a row sees.
        unit: Tokens that nodes lose at a time; for kernels, a multiple of the page size.
    """
    topology, tokens, requests = tree.topology, tree.tokens, tree.requests
    assert requests is not None
    own = (requests.first.take(tree.row_node) + tree.row_sees).astype(np.int64) - 1
    least = _least(own.take(topology.row_of_rank), topology.rank_lo, topology.rank_hi)
    left = np.clip(least - window_left - requests.first, 0, tokens)
    left = np.where(left < tokens, left - left % unit, left)
    if not np.count_nonzero(left):
        return tree
    begin, kept = requests.first + left, left < tokens
    least_tokens = _least_tokens(np.where(left > 0, begin, 0), tree, requests, window_left)
    of_nodes = frozen(stacked(requests.owner, begin, requests.of_nodes[2]).compress(kept, axis=1))
    row_node, sees = frozen((kept.cumsum() - 1).take(tree.row_node)), frozen(tree.row_sees - left.take(tree.row_node))
    made = shortened(topology, left)
    kv = KVRuns.contiguous(made.tokens)  # made-up places, which plans only compare
    requests = replace(requests, of_nodes=of_nodes, least=least_tokens)
    return type(tree)(made.parent, made.tokens, row_node, sees, kv, made, requests)


def _least_tokens(begin: Longs, tree: Tree, requests: RequestKV, window_left: int) -> Ints:
    """Returns the fewest tokens of each request with which its windows reach no token that is lost.

    begin: the position of each node's first token where it has lost tokens, else 0.
    """
    queries: Longs | int = 1
    node = tree.row_node
    if requests.queries is not None:
        queries, node = requests.queries.astype(np.int64), node.take(offsets(requests.queries)[:-1])
    reached = begin.take(node)
    while np.count_nonzero(up := (reached == 0) & (node >= 0)):
        node = np.where(up, tree.parent.take(node), -1)
        reached = np.where(node >= 0, begin.take(node), reached)
    return frozen(np.where(reached > 0, reached + (window_left + queries), 0))


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


def _least(values: Ints | Longs, lo: Ints | Longs, hi: Ints | Longs) -> Longs:
    """Returns the smallest of `values[lo:hi]` for each pair; for an empty interval a number beyond all positions."""
    least = np.full(len(lo), np.iinfo(np.int64).max // 2)
    some = np.flatnonzero(hi > lo)
    if len(some):
        bounds: Longs = np.stack([lo[some], hi[some]], axis=1).ravel().astype(np.int64)
        least[some] = np.minimum.reduceat(np.append(values, values[-1]).astype(np.int64), bounds)[::2]
    return least
