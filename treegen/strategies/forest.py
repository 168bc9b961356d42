"""Forests: many trees joined to one tree, so that groupings and passes handle all of them at once.

trees        tree 0          tree 1     tree 2
joined     ┌───────────────┬──────────┬───────┐
first_row  0               7          9       12        rows 7 and 8 are those of tree 1
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, offsets
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Several trees, and `joined`, the tree that they make together.

    Attributes:
        trees: The trees.
        joined: Their join, nodes and rows of each tree after those of the tree before.
        first_row: `[trees + 1]`; offsets of the trees' rows in `joined`.
        first_node: `[trees + 1]`; offsets of the trees' nodes in `joined`.
    """

    trees: list[Tree]
    joined: Tree
    first_row: Longs
    first_node: Longs

    @classmethod
    def of(cls, trees: list[Tree]) -> Forest:
        """Makes the forest of at least one tree."""
        first_row = offsets(np.array([tree.num_rows for tree in trees]))
        return cls(trees, Tree.joined(trees), first_row, offsets(np.array([len(tree.tokens) for tree in trees])))

    def take(self, chosen: Longs) -> Forest:
        """Returns the forest of these trees."""
        if len(chosen) == len(self.trees):
            return self
        return Forest.of([self.trees[index] for index in chosen])

    def parts(self, keys: Iterable[Hashable]) -> Iterator[tuple[Longs, Forest]]:
        """Yields the forest of the trees with each key, and the numbers of its trees. keys: one for each tree."""
        alike: dict[Hashable, list[int]] = {}
        for index, key in enumerate(keys):
            alike.setdefault(key, []).append(index)
        for chosen in map(np.array, alike.values()):
            yield chosen, self.take(chosen)

    def join(self, plans: Sequence[Plan]) -> Plan:
        """Returns the plan of `joined` from a plan for each tree. The plans agree in everything but their groups."""

        def ends(name: str, first: Longs) -> Ints:
            shifted = [getattr(plan, name)[1:] + start for plan, start in zip(plans, first[:-1], strict=True)]
            return frozen(np.concatenate([np.zeros(1, np.int64), *shifted]))

        def column(name: str, first: Longs | None = None) -> Ints:
            values = np.concatenate([getattr(plan, name) for plan in plans])
            if first is not None:
                values = values + np.repeat(first[:-1], [len(getattr(plan, name)) for plan in plans])
            return frozen(values)

        return replace(
            plans[0],
            row_indptr=ends("row_indptr", offsets(np.array([len(plan.row_lo) for plan in plans]))),
            row_lo=column("row_lo", self.first_row),
            row_hi=column("row_hi", self.first_row),
            segment_indptr=ends("segment_indptr", offsets(np.array([len(plan.node) for plan in plans]))),
            node=column("node", self.first_node),
            start=column("start"),
            stop=column("stop"),
            seen_lo=column("seen_lo"),
            seen_hi=column("seen_hi"),
            round=column("round"),
        )

    def tree_of_groups(self, plan: Plan) -> Longs:
        """Returns for each group of a plan of `joined` the tree that its rows belong to."""
        first = np.append(plan.row_lo, 0)[plan.row_indptr[:-1]]
        tree: Longs = np.searchsorted(self.first_row, first, side="right") - 1
        return tree


class ForestPlan(NamedTuple):
    """One plan for some trees of a forest. trees: their numbers in it. forest: these trees alone."""

    trees: Longs
    forest: Forest
    plan: Plan

    @classmethod
    def of_all(cls, forest: Forest, plan: Plan) -> ForestPlan:
        """Makes the plan for all trees of a forest."""
        return cls(np.arange(len(forest.trees)), forest, plan)
