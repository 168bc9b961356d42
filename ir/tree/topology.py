"""What follows from a tree's parents, tokens and rows: preorder, row ranks, and who sees which tokens.

Everything is computed by pointer doubling (log2 of the depth rounds of whole-array operations), so a chain of 10,000
nodes costs 14 rounds and no recursion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints, Longs, frozen, offsets, ramp, stacked
from treegen.ir.errors import TreeError
from treegen.ir.unchecked import unchecked


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Maximal runs of one node's visible tokens that are seen by the same rows, in depth-first order.

    Span i is tokens `start[i]:stop[i]` of `node[i]` and is seen by the ranks `lo[i]:hi[i]`, never by nobody. `table`
    [5, spans] has these columns, so that they can be gathered all at once.
    """

    table: Ints

    @classmethod
    def of(
        cls,
        node: npt.NDArray[Any],
        start: npt.NDArray[Any] | int,
        stop: npt.NDArray[Any],
        lo: npt.NDArray[Any],
        hi: npt.NDArray[Any],
    ) -> Spans:
        """Spans of these columns."""
        return cls(stacked(node, start, stop, lo, hi))

    def until(self, stop: npt.NDArray[Any]) -> Spans:
        """The same spans with other ends."""
        table = self.table.copy()
        table[2] = stop
        return Spans(frozen(table))

    def __len__(self) -> int:
        return len(self.table[0])

    @property
    def node(self) -> Ints:
        """Each span's node."""
        column: Ints = self.table[0]
        return column

    @property
    def start(self) -> Ints:
        """The first token of each span."""
        column: Ints = self.table[1]
        return column

    @property
    def stop(self) -> Ints:
        """The token behind each span."""
        column: Ints = self.table[2]
        return column

    @property
    def lo(self) -> Ints:
        """The first rank that sees each span."""
        column: Ints = self.table[3]
        return column

    @property
    def hi(self) -> Ints:
        """The rank behind those that see each span."""
        column: Ints = self.table[4]
        return column

    @property
    def lengths(self) -> Longs:
        """Tokens of each span."""
        return (self.stop - self.start).astype(np.int64)


class Ranks(NamedTuple):
    """The order of rows. first [nodes + 1]: the rank of the first row at or behind every place in depth-first order;
    row: the caller's row of every rank; whole: whether no row ends inside of its node.
    """

    first: Ints
    row: Ints
    whole: bool


@dataclass(frozen=True, eq=False)
class Topology:
    """Derived arrays of a tree. Ranks number the rows by depth-first preorder, within a node by `sees`.

    `preorder[v]`: place of node v in depth-first order, siblings by index.
    `row_of_rank[k]`: the caller's row with rank k. `rank_lo[v]:rank_hi[v]`: ranks of the rows at or below v;
    `rank_own[v]`: end of the ranks of v's own rows. `parent` and `tokens` are the tree's, for what is made when it is
    asked for: plans need no depths, prefixes or sizes of subtrees.
    """

    parent: Ints
    tokens: Ints
    preorder: Ints
    row_of_rank: Ints
    rank_lo: Ints
    rank_own: Ints
    rank_hi: Ints
    spans: Spans

    @cached_property
    def subtree(self) -> Ints:
        """Nodes at or below every node."""
        return frozen(_subtrees(_doubled_parents(self.parent), len(self.parent)))

    @cached_property
    def depth(self) -> Ints:
        """Edges above every node."""
        return frozen(_path_sum(_doubled_parents(self.parent), np.ones(len(self.parent), np.int64)) - 1)

    @cached_property
    def prefix(self) -> Longs:
        """Tokens above every node."""
        return _path_sum(_doubled_parents(self.parent), self.tokens) - self.tokens

    @cached_property
    def levels(self) -> int:
        """The most nodes on the path of one that some row sees tokens of, itself included; without all depths."""
        if not len(self.spans):
            return 0
        levels, node = 1, self.spans.node.astype(np.int64) + 1
        rounds = _doubled_parents(self.parent)
        for doubling in reversed(range(len(rounds))):
            above = rounds[doubling].take(node)
            if np.count_nonzero(above):
                levels, node = levels + (1 << doubling), above[above > 0]
        return levels

    @property
    def nodes_in_preorder(self) -> Ints:
        """Node indices in depth-first order."""
        return frozen(np.argsort(self.preorder))


def derive(parent: Ints, tokens: Ints, row_node: Ints, row_sees: Ints) -> Topology:
    """The topology of a forest; raises TreeError when the parents contain a cycle."""
    preorder, subtree = _preorder(parent)
    ranks = ranks_of(preorder[row_node], tokens, row_node, row_sees)
    rank_lo, rank_own = ranks.first[preorder], ranks.first[preorder + 1]
    rank_hi = ranks.first[preorder + subtree]
    if ranks.whole:
        spans = _whole_spans(tokens, preorder, rank_lo, rank_hi)
    else:
        node, sees = row_node[ranks.row], row_sees[ranks.row]
        spans = _spans(tokens, node, sees, preorder, rank_lo, rank_own, rank_hi)
    return unchecked(
        Topology,
        {
            "parent": parent,
            "tokens": tokens,
            "preorder": frozen(preorder),
            "row_of_rank": ranks.row,
            "rank_lo": frozen(rank_lo),
            "rank_own": frozen(rank_own),
            "rank_hi": frozen(rank_hi),
            "spans": spans,
        },
    )


def depth_first(parent: Ints) -> Longs:
    """The place of every node in depth-first order, siblings by index; raises TreeError for a cycle."""
    return _preorder(parent)[0]


def derive_ranked(parent: Ints, tokens: Ints, row_node: Ints, row_sees: Ints, ranks: Ranks) -> Topology:
    """`derive` where nodes are numbered in depth-first order, each with a row at or below it, and ranks are known."""
    number, last, rank_own = ramp(len(parent)), last_below(parent), ranks.first[1:]
    spans = Spans.of(number, 0, tokens, ranks.first[:-1], rank_own[last])
    preorder, _, _, rank_lo, rank_hi = spans.table
    if not ranks.whole:
        node, sees = row_node[ranks.row], row_sees[ranks.row]
        spans = _spans(tokens, node, sees, preorder, rank_lo, rank_own, rank_hi)
    elif np.count_nonzero(tokens) < len(tokens) or not len(row_node):
        spans = Spans(frozen(spans.table.compress((rank_hi > rank_lo) & (tokens > 0), axis=1)))
    return unchecked(
        Topology,
        {
            "parent": parent,
            "tokens": tokens,
            "preorder": preorder,
            "row_of_rank": ranks.row,
            "rank_lo": rank_lo,
            "rank_own": rank_own,
            "rank_hi": rank_hi,
            "spans": spans,
        },
    )


def topology_of_nodes(parent: Ints, table: Ints, row_of_rank: Ints, levels: int | None = None) -> Topology:
    """The topology of a tree whose nodes are numbered in depth-first order, where each is a line of the table of spans,
    and each that is the last one before other ranks has a row. levels: if they are known.
    """
    number, _, tokens, rank_lo, rank_hi = table
    rank_own = np.empty_like(rank_lo)
    rank_own[:-1], rank_own[-1:] = rank_lo[1:], len(row_of_rank)
    made = {
        "parent": parent,
        "tokens": tokens,
        "preorder": number,
        "row_of_rank": row_of_rank,
        "rank_lo": rank_lo,
        "rank_own": frozen(rank_own),
        "rank_hi": rank_hi,
        "spans": Spans(table),
    }
    return unchecked(Topology, made if levels is None else {**made, "levels": levels})


def ranks_of(row_place: Ints | Longs, tokens: Ints, row_node: Ints, row_sees: Ints) -> Ranks:
    """The ranks of rows whose nodes have these places in depth-first order."""
    rows_at = np.bincount(row_place, minlength=len(tokens))
    first = offsets(rows_at)
    if np.count_nonzero(rows_at) < len(row_place):  # some node has several rows
        row = np.lexsort((row_sees, row_place))
    else:
        row = np.empty(len(row_place), np.int64)
        row[first[row_place]] = np.arange(len(row_place))
    whole = np.count_nonzero(row_sees == tokens[row_node]) == len(row_sees)
    return Ranks(frozen(first), frozen(row), whole)


def lengthened(topology: Topology, tokens: Ints) -> Topology:
    """The same topology with nodes of other lengths, where every span is the whole of its node before and after."""
    spans = topology.spans
    return replace(topology, tokens=tokens, spans=spans.until(tokens[spans.node]))


def with_longer_leaves(topology: Topology, more: npt.NDArray[Any]) -> Topology:
    """The same topology where every node has `more` tokens more: leaves with tokens, whose rows all see the whole of
    them, and 0 for all others.
    """
    spans = topology.spans
    return replace(topology, tokens=frozen(topology.tokens + more), spans=spans.until(spans.stop + more[spans.node]))


def _preorder(parent: Ints) -> tuple[Longs, Longs]:
    """Places in depth-first order, siblings by index, and the nodes at or below every node."""
    ancestors = _doubled_parents(parent)
    subtree = _subtrees(ancestors, len(parent))
    return _path_sum(ancestors, (parent >= 0) + _earlier_siblings(parent, subtree)), subtree


def last_below(parent: Ints | Longs) -> Longs:
    """The last node at or below every node, where nodes are numbered in depth-first order: its last child's. By pointer
    doubling along last children.
    """
    number = ramp(len(parent))
    last: Longs = number.copy()
    # Of the children of a node the last one stays; roots, of parent -1, go to the last node.
    last[parent.astype(np.int64)] = number
    last[-1] = number[-1]
    while np.count_nonzero((further := last[last]) != last):
        last = further
    return last


def _subtrees(ancestors: list[Longs], nodes: int) -> Longs:
    """Nodes at or below every node."""
    subtree = np.ones(nodes + 1, np.int64)
    for ancestor in ancestors:
        subtree[0] = 0
        subtree = subtree + np.bincount(ancestor, subtree, nodes + 1).astype(np.int64)
    return subtree[1:]


def _doubled_parents(parent: Ints) -> list[Longs]:
    """The 1st, 2nd, 4th, 8th, ... ancestor of every node, until no node has one. Nodes count from 1 here; 0 is what is
    beyond a root, and its own ancestor.
    """
    rounds: list[Longs] = []
    ancestor = np.zeros(len(parent) + 1, np.int64)
    ancestor[1:] = parent
    ancestor[1:] += 1
    while np.count_nonzero(ancestor):
        if 1 << len(rounds) > len(parent):
            node = int((ancestor > 0).argmax()) - 1
            raise TreeError(f"parents[{node}]", int(parent[node]), "leads into a cycle", "let every node reach a root")
        rounds.append(ancestor)
        ancestor = ancestor[ancestor]
    return rounds


def _path_sum(ancestors: list[Longs], values: npt.NDArray[Any]) -> Longs:
    """For every node the sum of `values` over the node and all nodes above it."""
    total = np.zeros(len(values) + 1, np.int64)
    total[1:] = values
    for ancestor in ancestors:
        total = total + total[ancestor]
    return total[1:]


def _earlier_siblings(parent: Ints, subtree: Longs) -> Longs:
    """For every node the nodes in the subtrees of its siblings of lower index (of earlier roots, for a root)."""
    order = np.argsort(parent, kind="stable")
    before = np.cumsum(subtree[order]) - subtree[order]
    family = np.searchsorted(parent[order], parent[order])
    result = np.empty(len(parent), np.int64)
    result[order] = before - before[family]
    return result


def _whole_spans(tokens: Ints, preorder: Longs, rank_lo: Ints, rank_hi: Ints) -> Spans:
    """The spans of nodes that no row ends inside of: all that have tokens and rows."""
    node = np.empty_like(preorder)
    node[preorder] = np.arange(len(tokens))
    seen = (rank_hi > rank_lo) & (tokens > 0)
    if np.count_nonzero(seen) < len(seen):
        node = node[seen[node]]
    return Spans.of(node, 0, tokens[node], rank_lo[node], rank_hi[node])


def _spans(
    tokens: Ints, node: Ints, sees: Ints, preorder: Ints | Longs, rank_lo: Ints, rank_own: Ints, rank_hi: Ints
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
    return Spans.of(span_node[order], start[order], stop[order], lo[order], hi[order])
