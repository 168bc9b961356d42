"""Default cases of benchmarks: the trees and head settings of FastTree's kernel benchmark."""

from __future__ import annotations

from treegen.ir.tree import Tree
from treegen.workloads.generate import in_shuffled_pages

FASTTREE_HEADS = ("16:1", "32:8", "32:32")


def named(name: str, tree: Tree, page_tokens: int | None) -> tuple[str, Tree]:
    """Names a tree by its text if it has one, and moves its KV to shuffled pages of `page_tokens` tokens if given."""
    return tree.text or name, tree if page_tokens is None else in_shuffled_pages(tree, page_tokens)
