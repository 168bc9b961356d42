"""Tensors of calls, and the options that kernels are tried with."""

import torch

from treegen import Tree
from treegen.strategies import (
    cascade,
    deft_flatten,
    deft_node,
    deft_node_chunk,
    fasttree,
    medusa,
    query,
    specinfer,
)

EVERY = (
    query(), medusa(), specinfer(), cascade(), deft_node(), deft_node_chunk(32), deft_flatten(32),
    deft_flatten(32, "bits"), fasttree(),
)  # fmt: skip


def tensors(
    tree: Tree, pages: int, page_size: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, pad_pages: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standard-normal q and paged caches; with `pad_pages`, pages are farther apart than their tokens reach."""
    generator = torch.Generator().manual_seed(tree.num_rows + head_dim)
    q = torch.randn(tree.num_rows, heads[0], head_dim, generator=generator).to(dtype)
    room = page_size + (1 if pad_pages else 0)
    caches = torch.randn(2, pages, room, heads[1], head_dim, generator=generator).to(dtype)[:, :, :page_size]
    if page_size == 1 and not pad_pages:
        caches = caches[:, :, 0]
    return q, caches[0], caches[1]
