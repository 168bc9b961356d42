"""Caches of any shape for tests: trees in shuffled pages, tensors, and a plain reading of what a slot holds."""

from __future__ import annotations

import numpy as np
import torch

from treegen import KVRuns, Shape, Tree
from treegen.strategies import cohort

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

SMALL = Tree.from_parents([-1, 0, 0, 1, -1], [70, 17, 0, 5, 3])
"""Full tiles, packed runs, a node without tokens, two roots."""
INSIDE = Tree.from_parents(
    [-1, 0, 0], [20, 40, 33], rows=[(0, 3), (0, 20), (1, 5), (1, 5), (2, 0), (2, 33), (1, 40), (0, 0)]
)
"""Rows inside nodes, equal rows, and a row that sees nothing."""
MERGING = (cohort(head_rows=16, split=32), cohort(head_rows=16, split_shared_rows=4, merge="final"))
"""Strategies whose plans of INSIDE have partial results, merged in a launch of their own and by work items."""


def in_pages(tree: Tree, page_size: int, seed: int = 0) -> tuple[Tree, int]:
    """The tree with its tokens in randomly placed pages, and the number of pages."""
    counts = -(-tree.tokens // page_size)
    pages = np.random.default_rng(seed).permutation(int(counts.sum()) + 2)
    ends = np.cumsum(counts)
    placed = [pages[end - count : end] for end, count in zip(ends, counts, strict=True)]
    return tree.with_kv(KVRuns.from_pages(tree.tokens, placed, page_size)), len(pages)


def normal(*sizes: int, dtype: str = "fp32", seed: int = 0) -> torch.Tensor:
    """Standard-normal numbers, always the same ones."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def tensors(tree: Tree, pages: int, shape: Shape, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standard-normal q and caches of this shape."""
    k_sizes, v_sizes = shape.cache_sizes(pages)
    q = normal(tree.num_rows, shape.num_qo_heads, shape.head_dim, dtype=shape.dtype, seed=seed)
    return q, normal(*k_sizes, dtype=shape.dtype, seed=seed + 1), normal(*v_sizes, dtype=shape.dtype, seed=seed + 2)


def by_slot(cache: torch.Tensor, shape: Shape) -> torch.Tensor:
    """A cache as `[slots, heads, dim]`, token by token."""
    if cache.dim() == 3:
        return cache
    page_size = shape.page_size
    tokens = [
        cache[page, place] if shape.kv_layout == "NHD" else cache[page, :, place]
        for page in range(len(cache))
        for place in range(page_size)
    ]
    return torch.stack(tokens)
