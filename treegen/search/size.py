"""How large plans may be that the search weighs: on a large tree only those that are linear in it."""

from __future__ import annotations

from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies.strategy import Strategy

LARGE = 1 << 14
"""Nodes above which a tree is large: single cuts, one of thousands, are then not tried, and fewer thresholds are."""

_ANY_TREE = 1 << 20  # segments and rows that plans of any tree may have
_PLANNED = 4  # segments and rows per node of plans that are made
_COUNTED = 8  # segments per node of policies whose plans are only counted


def is_large(tree: Tree) -> bool:
    """Whether the search leaves out what takes long on a large tree."""
    return len(tree.parent) > LARGE


def most_planned(tree: Tree) -> int:
    """Segments and rows of all groups up to which a plan is made to weigh it."""
    return max(_ANY_TREE, _PLANNED * len(tree.parent))


def most_counted(tree: Tree) -> int:
    """Segments up to which a policy is counted."""
    return max(_ANY_TREE, _COUNTED * len(tree.parent))


def is_too_large(strategy: Strategy, tree: Tree, shape: Shape) -> bool:
    """Whether a strategy's plan is too large for a tree, so that rankings leave it out."""
    return strategy.plan_size(tree, shape) > most_planned(tree)
