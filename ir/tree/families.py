"""Families: the children of each node, with equal neighbouring subtrees counted as copies, for texts and drawings."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from treegen.ir.tree import Tree

Run: TypeAlias = tuple[int, int]
"""The first of equal neighbouring children, and their number."""


class Families:
    """Children of nodes in runs: equal neighbours, with everything below them, are one run.

    Subtrees are compared only when a node's children are asked for. A subtree is a stretch of nodes in depth-first
    order.
    """

    def __init__(self, tree: Tree) -> None:
        topology = tree.topology
        self._preorder = topology.preorder
        self._order = order = topology.nodes_in_preorder
        self._subtree = topology.subtree
        # By node in depth-first order: its depth, its tokens, and its number of rows.
        self._columns = topology.depth[order], tree.tokens[order], (topology.rank_own - topology.rank_lo)[order]
        self._sees = tree.row_sees[topology.row_of_rank]
        self._rank_lo, self._rank_own, self._rank_hi = topology.rank_lo, topology.rank_own, topology.rank_hi
        self.tokens = tree.tokens

    def sees(self, node: int) -> list[int]:
        """Returns the tokens of a node that each of its rows sees."""
        own: list[int] = self._sees[self._rank_lo[node] : self._rank_own[node]].tolist()
        return own

    def below(self, node: int) -> list[Run]:
        """Returns the runs of a node's children, or of the roots for -1."""
        if node < 0:
            place, end = 0, len(self._order)
        else:
            place = int(self._preorder[node])
            place, end = place + 1, place + int(self._subtree[node])
        runs: list[Run] = []
        while place < end:
            child = int(self._order[place])
            if runs and self._are_equal(runs[-1][0], child):
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((child, 1))
            place += int(self._subtree[child])
        return runs

    def _are_equal(self, one: int, other: int) -> bool:
        """Tells whether siblings have equal subtrees."""
        size = int(self._subtree[one])
        if size != self._subtree[other] or self.tokens[one] != self.tokens[other]:
            return False
        begin, second = int(self._preorder[one]), int(self._preorder[other])
        sees, others = (self._sees[self._rank_lo[node] : self._rank_hi[node]] for node in (one, other))
        return np.array_equal(sees, others) and all(
            np.array_equal(column[begin : begin + size], column[second : second + size]) for column in self._columns
        )
