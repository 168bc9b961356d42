"""How large plans may be that are made to compare strategies: on a large tree only those that are linear in it."""

from __future__ import annotations

from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies.strategy import Strategy

_ANY_TREE = 1 << 20  # segments and rows that plans of any tree may have
_PLANNED = 4  # segments and rows per node of larger plans


def most_planned(tree: Tree) -> int:
    """Segments and rows of all groups up to which a plan is made to be compared."""
    return max(_ANY_TREE, _PLANNED * len(tree.parent))


def is_too_large(strategy: Strategy, tree: Tree, shape: Shape) -> bool:
    """Whether a strategy's plan is too large for a tree, so that rankings and `auto` leave it out."""
    return strategy.plan_size(tree, shape) > most_planned(tree)


def fits_whole_paths(tree: Tree) -> bool:
    """Whether no plan of whole or cut paths is too large, whatever its cohorts: all rows' paths have few nodes."""
    return tree.num_rows * (tree.topology.levels + 1) <= _ANY_TREE // 2
