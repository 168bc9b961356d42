"""FastTree's edges, assigned greedily, and the virtual tree that they make.

An edge from a node to its child is 0 or 1:

    0   the child's rows join the node's group        group of node: its rows + child's rows, reads node
                                                      group of child: child's rows, reads child
    1   the node's context joins the child's          group of node: its rows, reads node
        (virtual tree)                                group of child: child's rows, reads node and child

Costs weigh padding against partial results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Longs, frozen
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree

Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class EdgeCosts:
    """The costs of Algorithm 1, without the common factor head_dim (section 4).

    Attributes:
        alpha: The weight of padded query rows.
        beta: The weight of padded KV tokens.
        gamma: The weight of partial results.
        tile_rows: Rows of a large and of a small tile; a term takes the small one when its own rows fit.
        tile_tokens: Tokens of both tiles.
        group: Query heads per KV head. The published code multiplies padding by it, but not partial results (variant
            "artifact").
    """

    alpha: float
    beta: float
    gamma: float
    tile_rows: Pair
    tile_tokens: Pair
    group: int = 1

    def compute(self, rows: int, tokens: int) -> float:
        """Returns the padding of `rows` rows that read `tokens` tokens.

        It adds the padding of query tiles along the context to the padding of KV tiles along the rows.
        """
        phase = 0 if rows > self.tile_rows[1] else 1
        query, kv = self.tile_rows[phase], self.tile_tokens[phase]
        return self.group * (
            self.alpha * padding(query, rows) * tokens + self.beta * rows * padding(kv, min(tokens, kv))
        )

    def reduce(self, rows: int) -> float:
        """Returns the cost of writing and reading the partial results of `rows` rows."""
        return self.gamma * rows

    def keep(self, rows: int, tokens: int, child_rows: int, child_tokens: int) -> float:
        """Returns SplitKVCost: the child's rows stay in the node's group."""
        return self.compute(rows, tokens) + self.compute(child_rows, child_tokens) + self.reduce(child_rows)

    def concatenate(self, rows: int, tokens: int, child_rows: int, child_tokens: int) -> float:
        """Returns SplitQCost: the child's group reads the node's tokens as well, without the node's group."""
        return self.compute(rows - child_rows, tokens) + self.compute(child_rows, tokens + child_tokens)


def padding(tile: int, size: int) -> int:
    """Returns the number that is missing from `size` to a multiple of `tile`; 0 for 0."""
    return -size % tile


def assign_edges(tree: Tree, costs: EdgeCosts) -> npt.NDArray[np.bool_]:
    """Returns for each node whether the edge from its parent is 1 (Algorithm 1).

    Nodes are visited breadth-first, children by index; ties keep 0.
    """
    topology = tree.topology
    rows = (topology.rank_hi - topology.rank_lo).tolist()
    tokens = _visible_tokens(tree).tolist()
    concatenated = np.zeros(len(rows), bool)
    children: list[list[int]] = [[] for _ in rows]
    for node, parent in enumerate(tree.parent.tolist()):
        if parent >= 0:
            children[parent].append(node)
    for node in np.argsort(topology.depth, kind="stable").tolist():
        left = rows[node]
        for child in children[node]:
            if rows[child] == 0:
                continue
            sizes = (left, tokens[node], rows[child], tokens[child])
            if costs.keep(*sizes) > costs.concatenate(*sizes):
                concatenated[child] = True
                left -= rows[child]
                tokens[child] += tokens[node]
    return concatenated


def _visible_tokens(tree: Tree) -> Longs:
    """Returns the tokens of each node that some row sees."""
    visible = np.zeros(len(tree.tokens), np.int64)
    np.maximum.at(visible, tree.topology.spans.node, tree.topology.spans.stop)
    return visible


def virtual_tree(tree: Tree, concatenated: npt.NDArray[np.bool_]) -> Plan:
    """Plans one group per node: its own rows and those below its children of edge 0, which read its context.

    The context of a node is the tokens of its ancestors, as far up as edges are 1, and then its own.
    """
    topology, spans = tree.topology, tree.topology.spans
    nodes = np.arange(len(tree.parent))
    joining = np.flatnonzero((tree.parent >= 0) & ~concatenated)
    owner = np.concatenate([nodes, tree.parent[joining]])
    lo = np.concatenate([topology.rank_lo, topology.rank_lo[joining]])
    hi = np.concatenate([topology.rank_own, topology.rank_hi[joining]])
    filled = np.flatnonzero(hi > lo)
    order = filled[np.lexsort((lo[filled], owner[filled]))]
    owner, lo, hi = owner[order], lo[order], hi[order]
    first = np.flatnonzero(np.append(True, (owner[1:] != owner[:-1]) | (lo[1:] != hi[:-1]))[: len(owner)])
    last = np.append(first[1:], len(owner)) - 1 if len(first) else first
    owner, lo, hi = owner[first], lo[first], hi[last]
    rows = np.bincount(owner, hi - lo, len(nodes)).astype(np.int64)

    # A node's own rows come first in its group, so the first row that sees a span is one of them.
    seen_from = spans.lo - topology.rank_lo[spans.node]
    own = np.flatnonzero(seen_from < rows[spans.node])
    columns: list[tuple[npt.NDArray[Any], ...]] = [
        (spans.node[own], np.zeros(len(own)), spans.node[own], spans.start[own], spans.stop[own], seen_from[own])
    ]
    reader = np.flatnonzero(concatenated & (tree.parent >= 0) & (rows > 0))
    above, distance = tree.parent[reader], 0
    while len(reader):
        distance += 1
        with_tokens = tree.tokens[above] > 0
        zeros = np.zeros(int(with_tokens.sum()))
        node = above[with_tokens]
        columns.append((reader[with_tokens], zeros + distance, node, zeros, tree.tokens[node], zeros))
        further = concatenated[above] & (tree.parent[above] >= 0)
        reader, above = reader[further], tree.parent[above[further]]
    group, far, node, start, stop, seen_lo = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.lexsort((start, -far, group))
    group, node, start, stop, seen_lo = (column[order] for column in (group, node, start, stop, seen_lo))
    reads_any = np.zeros(len(nodes), bool)
    reads_any[group.astype(np.int64)] = True  # groups that read nothing are dropped: their rows see nothing here
    alive, kept = np.flatnonzero(reads_any), reads_any[owner]
    return Plan(
        "fasttree",
        frozen(np.searchsorted(owner[kept], np.append(alive, len(nodes)))),
        frozen(lo[kept]),
        frozen(hi[kept]),
        frozen(np.searchsorted(group, np.append(alive, len(nodes)))),
        frozen(node),
        frozen(start),
        frozen(stop),
        frozen(seen_lo),
        frozen(rows[group.astype(np.int64)]),
    )
