"""Topology: what follows from a tree's parents, tokens and rows, such as depth-first order, ranks and spans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints, Longs, frozen, int32_ramp, offsets, ramp, stacked
from treegen.ir.tree.preorder import doubled_parents, last_below, path_sum, preorder_of, subtree_sizes
from treegen.ir.tree.spans import Spans, cut_spans, whole_spans
from treegen.ir.unchecked import unchecked


class Ranks(NamedTuple):
    """The order of rows.

    Attributes:
        first: `[nodes + 1]`; by place in depth-first order, the rank of the first row there or later.
        row: The caller's row of each rank.
        whole: Whether no row ends inside of its node.
    """

    first: Ints
    row: Ints
    whole: bool


@dataclass(frozen=True, eq=False)
class Topology:
    """Derived arrays of a tree. Ranks number the rows by depth-first preorder, within a node by `sees`.

        node     preorder   ranks of own rows   rank_lo:rank_own   rank_lo:rank_hi
        0        0          0                   0:1                0:5              row 0 is attached to node 0,
        ├─ 1     1          1, 2                1:3                1:3              two rows to node 1,
        └─ 2     2          -                   3:3                3:5              none to node 2
           └─ 3  3          3, 4                3:5                3:5              and two to node 3

    Depths, prefixes and sizes of subtrees are computed only on access, because plans do not need them.

    Attributes:
        parent: `[nodes]`; as in Tree.
        tokens: `[nodes]`; as in Tree.
        preorder: `[nodes]`; the place of each node in depth-first order, siblings by index.
        row_of_rank: `[rows]`; the caller's row of each rank.
        rank_lo: `[nodes]`; the first rank of the rows at or below each node.
        rank_own: `[nodes]`; the end of the ranks of its own rows.
        rank_hi: `[nodes]`; the end of the ranks of the rows at or below it.
        spans: The spans of all nodes.
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
        """The number of nodes at or below each node."""
        return frozen(subtree_sizes(doubled_parents(self.parent), len(self.parent)))

    @cached_property
    def depth(self) -> Ints:
        """The number of edges above each node."""
        return frozen(path_sum(doubled_parents(self.parent), np.ones(len(self.parent), np.int64)) - 1)

    @cached_property
    def prefix(self) -> Longs:
        """The tokens above each node."""
        return path_sum(doubled_parents(self.parent), self.tokens) - self.tokens

    @cached_property
    def levels(self) -> int:
        """The most nodes on the path of a node that some row sees tokens of, itself included.

        It is computed without all depths.
        """
        if not len(self.spans):
            return 0
        levels, node = 1, self.spans.node.astype(np.int64) + 1
        rounds = doubled_parents(self.parent)
        for doubling in reversed(range(len(rounds))):
            above = rounds[doubling].take(node)
            if np.count_nonzero(above):
                levels, node = levels + (1 << doubling), above[above > 0]
        return levels

    @cached_property
    def unique_tokens(self) -> int:
        """The tokens that some row sees, each counted once."""
        return int(np.add.reduce(self.spans.lengths))

    @cached_property
    def path_tokens(self) -> int:
        """The tokens that all rows see together: a token that n rows see counts n times."""
        _, start, stop, lo, hi = self.spans.table
        return int(np.dot((stop - start).astype(np.int64), (hi - lo).astype(np.int64)))

    @cached_property
    def private_tokens(self) -> int:
        """The tokens that exactly one row sees."""
        _, start, stop, lo, hi = self.spans.table
        return int(np.add.reduce((stop - start)[hi - lo == 1], dtype=np.int64))

    @property
    def has_rows_inside(self) -> bool:
        """Whether rows of a node see different parts of it."""
        node = self.spans.node
        return bool(np.count_nonzero(node[1:] == node[:-1]))

    @property
    def nodes_in_preorder(self) -> Ints:
        """Node indices in depth-first order."""
        return frozen(np.argsort(self.preorder))


def derive(parent: Ints, tokens: Ints, row_node: Ints, row_sees: Ints) -> Topology:
    """Returns the topology of a forest. Raises TreeError if the parents contain a cycle."""
    preorder, subtree = preorder_of(parent)
    ranks = ranks_of(preorder[row_node], tokens, row_node, row_sees)
    rank_lo, rank_own = ranks.first[preorder], ranks.first[preorder + 1]
    rank_hi = ranks.first[preorder + subtree]
    if ranks.whole:
        spans = whole_spans(tokens, preorder, rank_lo, rank_hi)
    else:
        node, sees = row_node[ranks.row], row_sees[ranks.row]
        spans = cut_spans(tokens, node, sees, preorder, rank_lo, rank_own, rank_hi)
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


def derive_ranked(parent: Ints, tokens: Ints, row_node: Ints, row_sees: Ints, ranks: Ranks) -> Topology:
    """Returns the topology of a forest whose ranks are known, and whose nodes are numbered in depth-first order.

    Each node has a row at or below it.
    """
    number, last, rank_own = ramp(len(parent)), last_below(parent), ranks.first[1:]
    spans = Spans.of(number, 0, tokens, ranks.first[:-1], rank_own[last])
    preorder, _, _, rank_lo, rank_hi = spans.table
    if not ranks.whole:
        node, sees = row_node[ranks.row], row_sees[ranks.row]
        spans = cut_spans(tokens, node, sees, preorder, rank_lo, rank_own, rank_hi)
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


def topology_of_nodes(
    table: Ints,
    parent: Ints,
    rank_own: Ints,
    row_of_rank: Ints,
    known: Mapping[str, int],
    spans: Ints | None = None,
) -> Topology:
    """Returns the topology of a tree whose nodes are numbered in depth-first order. Each leaf has a row.

    Args:
        table: The columns of spans that are whole nodes, seen by the rows at or below each.
        parent, rank_own, row_of_rank: See Topology.
        known: The properties of Topology that the caller knows, by name: `levels`, `unique_tokens`, `path_tokens`,
            `private_tokens`.
        spans: The columns of the spans; None where they are whole nodes.
    """
    number, _, tokens, rank_lo, rank_hi = table
    made = {
        "parent": parent,
        "tokens": tokens,
        "preorder": number,
        "row_of_rank": row_of_rank,
        "rank_lo": rank_lo,
        "rank_own": rank_own,
        "rank_hi": rank_hi,
        "spans": Spans(table if spans is None else spans),
    }
    return unchecked(Topology, {**made, **known})


def ranks_of(row_place: Ints | Longs, tokens: Ints, row_node: Ints, row_sees: Ints) -> Ranks:
    """Returns the ranks of rows. row_place: the place of each row's node in depth-first order."""
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
    """Returns the topology with nodes of other lengths. Each span is all of its node, before and after."""
    spans = topology.spans
    return replace(topology, tokens=tokens, spans=spans.until(tokens[spans.node]))


def with_longer_leaves(topology: Topology, more: npt.NDArray[Any]) -> Topology:
    """Returns the topology in which each node has `more` tokens more.

    Only leaves may get longer that have tokens and whose rows all see all of them.
    """
    spans = topology.spans
    return replace(topology, tokens=frozen(topology.tokens + more), spans=spans.until(spans.stop + more[spans.node]))


def shortened(topology: Topology, left: npt.NDArray[Any]) -> Topology:
    """Returns the topology in which each node lacks its first `left` tokens, without nodes that lose all of them.

    Nodes are numbered in depth-first order. Every row still sees the last token that it saw, so its node is left.
    """
    spans, parent, tokens = topology.spans, topology.parent, topology.tokens - left
    gone = left.take(spans.node)
    table = stacked(spans.node, np.maximum(spans.start - gone, 0), spans.stop - gone, spans.lo, spans.hi)
    table = table.compress(table[2] > table[1], axis=1)
    kept = tokens > 0
    number = np.append(kept.cumsum() - 1, -1)  # the last entry is for the parent of roots
    lost = np.append(~kept, False)
    while np.count_nonzero(up := lost.take(parent)):
        parent = np.where(up, parent.take(parent), parent)
    table[0] = number.take(table[0])
    return Topology(
        parent=frozen(number.take(parent.compress(kept))),
        tokens=frozen(tokens.compress(kept)),
        preorder=int32_ramp(int(np.count_nonzero(kept))),
        row_of_rank=topology.row_of_rank,
        rank_lo=frozen(topology.rank_lo.compress(kept)),
        rank_own=frozen(topology.rank_own.compress(kept)),
        rank_hi=frozen(topology.rank_hi.compress(kept)),
        spans=Spans(frozen(table)),
    )
