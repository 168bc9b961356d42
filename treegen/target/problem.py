"""Problem: the tree, shape and target that are planned, lowered, accounted for and measured."""

from __future__ import annotations

from typing import NamedTuple

from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.target.targets import Target


class Problem(NamedTuple):
    """A tree, the attention shape of its rows, and the target that runs it."""

    tree: Tree
    shape: Shape
    target: Target

    def with_tree(self, tree: Tree) -> Problem:
        """Returns the same problem for another tree."""
        return Problem(tree, self.shape, self.target)
