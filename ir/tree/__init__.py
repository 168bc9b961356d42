"""Trees: how they are made, changed, written and read, and where their tokens are in the KV cache."""

from treegen.ir.tree.tree import Node, Tree, check_is_by_slot, check_is_tree

__all__ = ["Node", "Tree", "check_is_by_slot", "check_is_tree"]
