"""The size of plans that may be made to compare strategies: on a large tree, only those that are linear in it."""

from __future__ import annotations

from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies.strategy import Strategy

_ANY_TREE = 1 << 20  # segments and rows that plans of any tree may have
_PLANNED = 4  # segments and rows that larger plans may have per node


def most_planned(tree: Tree) -> int:
    """Returns the most segments and rows of all groups for which a plan is made to be compared."""
    return max(_ANY_TREE, _PLANNED * len(tree.parent))


def is_too_large(strategy: Strategy, tree: Tree, shape: Shape) -> bool:
    """Tells whether a strategy's plan is too large for a tree, so that rankings and `auto` leave it out."""
    return strategy.plan_size(tree, shape) > most_planned(tree)


def fits_whole_paths(tree: Tree) -> bool:
    """Tells whether all rows' paths have so few nodes that no plan of whole or cut paths is too large."""
    return tree.num_rows * (tree.topology.levels + 1) <= _ANY_TREE // 2
