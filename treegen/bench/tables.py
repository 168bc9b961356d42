"""Default cases of benchmarks: the trees and head settings of FastTree's kernel benchmark."""

from __future__ import annotations

from treegen.ir.tree import Tree
from treegen.workloads.generate import in_shuffled_pages

FASTTREE_HEADS = ("16:1", "32:8", "32:32")
FASTTREE_TREES = (
    "1,2,64/8,256,32",
    "1,4,256/8,256,32",
    "1,4,8,256/8,256,256,32",
    "1,256/256,32",
    "1,1024/2048,32",
    "1,16,64/1024,256,32",
    "1,4,16,512/1024,256,128,32",
    "1,4,16,64,256,1024/256,8,256,64,32,256",
    "1,10/4000,400",
    "1,2,4,8,16,32,64,128,1024/16,16,16,16,16,16,16,16,16",
    "1,2,4,8,16,32,64,128,1024/256,128,64,16,16,16,16,16,16",
    "1,8,16,32,64,128,1024/256,128,64,16,16,16,16",
    "1,8,16,32,64,256,1024/256,128,64,16,16,16,16",
    "1,16,32,64,128,1024/256,128,64,16,16,16",
    "1,16,32,64,256,1024/256,128,64,16,16,16",
)
"""FastTree-Artifact, kernel_bench (head_dim 128, fp16): nodes per level and tokens per node."""


def named(name: str, tree: Tree, page_tokens: int | None) -> tuple[str, Tree]:
    """Names a tree by its text if it has one, and moves its KV to shuffled pages of `page_tokens` tokens if given."""
    return tree.text or name, tree if page_tokens is None else in_shuffled_pages(tree, page_tokens)
