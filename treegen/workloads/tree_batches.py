"""Trees as running batches: every row of a tree is a request, which shares whole pages with the rows beside it."""

from __future__ import annotations

from treegen.ir.tree import Tree
from treegen.workloads.served_batch import FOREVER, PAGE_SIZE, BatchRequest, ServedBatch, nobody, whole_pages

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


def fasttree_batches(seed: int) -> tuple[ServedBatch, ...]:
    """Makes the family `trees`: the trees of FastTree's kernel benchmark, in which no request comes or finishes."""
    return tuple(tree_batch(text, seed) for text in FASTTREE_TREES)


def tree_batch(text: str, seed: int = 0) -> ServedBatch:
    """Makes a batch of a tree with one row per leaf. Its name is the tree's text with hyphens for commas."""
    tree = Tree.parse(text)
    parent, tokens = tree.parent.tolist(), tree.tokens.tolist()
    first: dict[int, int] = {}  # by node: the first row that sees it
    requests = []
    for row, leaf in enumerate(tree.row_node.tolist()):
        path = [leaf]
        while parent[path[-1]] >= 0:
            path.append(parent[path[-1]])
        length, other, shared = 0, None, 0
        for node in reversed(path):
            length += tokens[node]
            if node in first:
                other, shared = first[node], whole_pages(length)
            else:
                first[node] = row
        requests.append(BatchRequest(length, FOREVER, other if shared else None, shared))
    return ServedBatch(text.replace(",", "-"), "trees", PAGE_SIZE, tuple(requests), seed, nobody)
