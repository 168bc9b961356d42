"""Depth-first order of nodes, and sums along paths, by pointer doubling.

Each round doubles the distance of all nodes' pointers to ancestors. A chain of 10,000 nodes takes 14 rounds of
whole-array operations, and no recursion.

    node       1  2  3  4  5      a chain; nodes are counted from 1 here, and 0 is its own parent
    round 0    0  1  2  3  4      the parent
    round 1    0  0  1  2  3      the parent's parent
    round 2    0  0  0  0  1      its parent's parent
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints, Longs, offsets, ramp, stable_order
from treegen.ir.errors import TreeError


def depth_first(parent: Ints) -> Longs:
    """Returns the place of each node in depth-first order, siblings by index. Raises TreeError for a cycle."""
    return preorder_of(parent)[0]


def preorder_of(parent: Ints) -> tuple[Longs, Longs]:
    """Returns the place of each node in depth-first order, siblings by index, and the nodes at or below each node."""
    ancestors = doubled_parents(parent)
    subtree = subtree_sizes(ancestors, len(parent))
    return path_sum(ancestors, (parent >= 0) + _earlier_siblings(parent, subtree)), subtree


def last_below(parent: Ints | Longs) -> Longs:
    """Returns the last node at or below each node, where nodes are numbered in depth-first order.

    It is found by pointer doubling along last children.
    """
    number = ramp(len(parent))
    last: Longs = number.copy()
    # Later children overwrite earlier ones, so the last child stays. Roots, with parent -1, write the last entry.
    last[parent.astype(np.int64)] = number
    last[-1] = number[-1]
    while np.count_nonzero((further := last[last]) != last):
        last = further
    return last


def subtree_sizes(ancestors: list[Longs], nodes: int) -> Longs:
    """Returns the number of nodes at or below each node."""
    subtree = np.ones(nodes + 1, np.int64)
    for ancestor in ancestors:
        subtree[0] = 0
        subtree = subtree + np.bincount(ancestor, subtree, nodes + 1).astype(np.int64)
    return subtree[1:]


def doubled_parents(parent: Ints) -> list[Longs]:
    """Returns the 1st, 2nd, 4th, 8th, ... ancestor of each node, until no node has one. Raises TreeError for a cycle.

    Nodes count from 1 here; 0 stands for no node, and is its own ancestor.
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


def path_sum(ancestors: list[Longs], values: npt.NDArray[Any]) -> Longs:
    """Returns for each node the sum of `values` over the node and all its ancestors."""
    total = np.zeros(len(values) + 1, np.int64)
    total[1:] = values
    for ancestor in ancestors:
        total = total + total[ancestor]
    return total[1:]


def _earlier_siblings(parent: Ints, subtree: Longs) -> Longs:
    """Returns for each node the nodes in the subtrees of its siblings of lower index; roots are siblings."""
    above = parent + 1
    order = stable_order(above, len(parent) + 1)
    sizes = subtree.take(order)
    before, families = np.cumsum(sizes) - sizes, np.bincount(above)
    families = families[families > 0]
    result = np.empty(len(parent), np.int64)
    result[order] = before - before.take(offsets(families)[:-1]).repeat(families)
    return result
