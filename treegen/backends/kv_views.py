"""Views of KV caches: one form for all layouts, and tokens by KV slot."""

from __future__ import annotations

import torch

from treegen.target.tile_config import ELEMENTS_PER_WORD


def token_major(cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """Views a cache as `[slots, num_kv_heads, dim]` or `[pages, page_size, num_kv_heads, dim]`."""
    return cache.transpose(1, 2) if kv_layout == "HND" and cache.dim() == 4 else cache


def slots_of(cache: torch.Tensor) -> int:
    """Counts the KV slots of a token-major cache."""
    return cache.shape[0] * (cache.shape[1] if cache.dim() == 4 else 1)


def in_words(*caches: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Views caches in 8 bits as int32 words of four elements; None where strides or offsets are not whole words."""
    for cache in caches:
        places = (*cache.stride()[:-1], cache.shape[-1], cache.storage_offset(), cache.data_ptr())
        if any(place % ELEMENTS_PER_WORD for place in places):
            return None
    return tuple(cache.view(torch.int32) for cache in caches)


def tokens_at(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gathers KV slots of a token-major cache to `[*slots.shape, num_kv_heads, dim]`; copies no other slots."""
    if cache.dim() == 3:
        return cache[slots]
    page_size = cache.shape[1]
    return cache[slots // page_size, slots % page_size]
