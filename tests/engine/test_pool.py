"""Writes of KV: one launch for K and V, into any slots, and nothing beside them."""

from __future__ import annotations

import pytest
import torch

from treegen.engine.pool import write_kv


@pytest.mark.parametrize(("kv_heads", "dims"), [(2, (16, 16)), (8, (128, 128)), (3, (40, 24))])
def test_k_and_v_go_to_their_slots_in_one_launch(kv_heads: int, dims: tuple[int, int]) -> None:
    tokens, slots = 5, torch.tensor([7, 0, 3, 9, 4])
    k_cache, v_cache = (torch.zeros(10, kv_heads, dim, dtype=torch.bfloat16) for dim in dims)
    # a part of a wider tensor, as models with one projection for q, K and V have them
    keys, values = (torch.randn(tokens, 2 * kv_heads, dim).to(torch.bfloat16)[:, kv_heads:] for dim in dims)
    write_kv(keys, values, slots, k_cache, v_cache)
    for cache, written in ((k_cache, keys), (v_cache, values)):
        assert torch.equal(cache[slots], written)
        assert int(cache.float().abs().sum((1, 2)).count_nonzero()) == tokens
