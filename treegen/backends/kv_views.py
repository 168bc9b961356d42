"""KV caches as PyTorch reads them: one view for every layout, and tokens by their slots."""

from __future__ import annotations

import torch

from treegen.target.tile_config import ELEMENTS_PER_WORD


def token_major(cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """A cache of this layout as a view `[slots, num_kv_heads, dim]` or `[pages, page_size, num_kv_heads, dim]`."""
    return cache.transpose(1, 2) if kv_layout == "HND" and cache.dim() == 4 else cache


def slots_of(cache: torch.Tensor) -> int:
    """Slots of a cache as `token_major` gives it."""
    return cache.shape[0] * (cache.shape[1] if cache.dim() == 4 else 1)


def in_words(*caches: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Caches in 8 bits with four elements of a head side by side as one int32; None where strides, or places in memory,
    are not of whole words.
    """
    for cache in caches:
        places = (*cache.stride()[:-1], cache.shape[-1], cache.storage_offset(), cache.data_ptr())
        if any(place % ELEMENTS_PER_WORD for place in places):
            return None
    return tuple(cache.view(torch.int32) for cache in caches)


def tokens_at(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What a cache as `token_major` gives it has in slots: `[*slots.shape, num_kv_heads, dim]`. Copies these alone,
    whatever the strides of the cache.
    """
    if cache.dim() == 3:
        return cache[slots]
    page_size = cache.shape[1]
    return cache[slots // page_size, slots % page_size]
