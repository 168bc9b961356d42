"""Trees: making, editing, writing and reading them, and the places of their tokens in the KV cache."""

from treegen.ir.tree.tree import Node, Tree, check_is_by_slot, check_is_tree

__all__ = ["Node", "Tree", "check_is_by_slot", "check_is_tree"]
