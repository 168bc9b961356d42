"""What follows from a tree's parents, tokens and rows: preorder, row ranks, and who sees which tokens.

Everything is computed by pointer doubling (log2 of the depth rounds of whole-array operations), so a chain of 10,000
nodes costs 14 rounds and no recursion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen
from treegen.ir.errors import TreeError


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Maximal runs of one node's visible tokens that are seen by the same rows, in depth-first order.

    Span i is tokens `start[i]:stop[i]` of `node[i]` and is seen by the ranks `lo[i]:hi[i]`, never by nobody.
    """

    node: Ints
    start: Ints
    stop: Ints
    lo: Ints
    hi: Ints

    def __len__(self) -> int:
        return len(self.node)

    @property
    def lengths(self) -> Longs:
        """Tokens of each span."""
        return (self.stop - self.start).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """Derived arrays of a tree. Ranks number the rows by depth-first preorder, within a node by `sees`.

    `depth[v]`: edges above node v. `preorder[v]`: its place in depth-first order, siblings by index.
    `subtree[v]`: nodes at or below v. `prefix[v]`: tokens above v. `row_of_rank[k]`: the caller's row with rank k.
    `rank_lo[v]:rank_hi[v]`: ranks of the rows at or below v; `rank_own[v]`: end of the ranks of v's own rows.
    """

    depth: Ints
    preorder: Ints
    subtree: Ints
    prefix: Longs
    row_of_rank: Ints
    rank_lo: Ints
    rank_own: Ints
    rank_hi: Ints
    spans: Spans

    @property
    def nodes_in_preorder(self) -> Ints:
        """Node indices in depth-first order."""
        return frozen(np.argsort(self.preorder))


def derive(parent: Ints, tokens: Ints, row_node: Ints, row_sees: Ints) -> Topology:
    """The topology of a forest; raises TreeError when the parents contain a cycle."""
    nodes = len(parent)
    ancestors = _doubled_parents(parent)
    above = np.maximum(parent, 0)
    has_parent = parent >= 0
    depth = _path_sum(ancestors, has_parent.astype(np.int64))
    inherited = np.where(has_parent, tokens[above], 0).astype(np.int64)
    prefix = _path_sum(ancestors, inherited)
    subtree = np.ones(nodes, np.int64)
    for ancestor in ancestors:
        reached = ancestor >= 0
        subtree = subtree + np.bincount(ancestor[reached], subtree[reached], nodes).astype(np.int64)
    preorder = _path_sum(ancestors, has_parent + _earlier_siblings(parent, subtree))

    row_order = np.lexsort((row_sees, preorder[row_node]))
    ranked_position = preorder[row_node][row_order]
    rank_lo = np.searchsorted(ranked_position, preorder)
    rank_own = np.searchsorted(ranked_position, preorder, side="right")
    rank_hi = np.searchsorted(ranked_position, preorder + subtree)
    spans = _spans(tokens, row_node[row_order], row_sees[row_order], preorder, rank_lo, rank_own, rank_hi)
    return Topology(
        depth=frozen(depth),
        preorder=frozen(preorder),
        subtree=frozen(subtree),
        prefix=prefix,
        row_of_rank=frozen(row_order),
        rank_lo=frozen(rank_lo),
        rank_own=frozen(rank_own),
        rank_hi=frozen(rank_hi),
        spans=spans,
    )


def lengthened(topology: Topology, parent: Ints, tokens: Ints) -> Topology:
    """The same topology with nodes of other lengths, where every span is the whole of its node before and after."""
    spans = topology.spans
    whole = Spans(spans.node, spans.start, frozen(tokens[spans.node]), spans.lo, spans.hi)
    inherited = np.where(parent >= 0, tokens[np.maximum(parent, 0)], 0).astype(np.int64)
    return replace(topology, prefix=_path_sum(_doubled_parents(parent), inherited), spans=whole)


def _doubled_parents(parent: Ints) -> list[Longs]:
    """The 1st, 2nd, 4th, 8th, ... ancestor of every node (-1 beyond a root), until no node has one."""
    rounds: list[Longs] = []
    ancestor = parent.astype(np.int64)
    while (ancestor >= 0).any():
        if 1 << len(rounds) > len(parent):
            node = int((ancestor >= 0).argmax())
            raise TreeError(f"parents[{node}]", int(parent[node]), "leads into a cycle", "let every node reach a root")
        rounds.append(ancestor)
        ancestor = np.where(ancestor >= 0, ancestor[np.maximum(ancestor, 0)], -1)
    return rounds


def _path_sum(ancestors: list[Longs], values: Longs) -> Longs:
    """For every node the sum of `values` over the node and all nodes above it."""
    total = values
    for ancestor in ancestors:
        total = total + np.where(ancestor >= 0, total[np.maximum(ancestor, 0)], 0)
    return total


def _earlier_siblings(parent: Ints, subtree: Longs) -> Longs:
    """For every node the nodes in the subtrees of its siblings of lower index (of earlier roots, for a root)."""
    order = np.argsort(parent, kind="stable")
    before = np.cumsum(subtree[order]) - subtree[order]
    family = np.searchsorted(parent[order], parent[order])
    result = np.empty(len(parent), np.int64)
    result[order] = before - before[family]
    return result


def _spans(
    tokens: Ints, node: Ints, sees: Ints, preorder: Longs, rank_lo: Longs, rank_own: Longs, rank_hi: Longs
) -> Spans:
    """Cut every node at the distinct `sees` of its own rows (`node` and `sees` are in rank order)."""
    same_node = np.zeros(len(node), bool)
    same_node[1:] = node[1:] == node[:-1]
    previous = np.zeros(len(node), np.int64)
    previous[1:] = np.where(same_node[1:], sees[:-1], 0)
    cut = np.flatnonzero(sees > previous)

    own_sees = np.where(rank_own > rank_lo, sees[np.maximum(rank_own - 1, 0)] if len(sees) else 0, 0)
    rest = np.flatnonzero((tokens > own_sees) & (rank_hi > rank_own))

    span_node = np.concatenate([node[cut], rest])
    start = np.concatenate([previous[cut], own_sees[rest]])
    stop = np.concatenate([sees[cut], tokens[rest]])
    lo = np.concatenate([cut, rank_own[rest]])
    hi = np.concatenate([rank_hi[node[cut]], rank_hi[rest]])
    order = np.lexsort((start, preorder[span_node]))
    return Spans(
        frozen(span_node[order]), frozen(start[order]), frozen(stop[order]), frozen(lo[order]), frozen(hi[order])
    )
