"""Writes of KV: one launch for K and V, into any slots, and nothing beside them; and where ranks have their tokens."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch

from treegen.codegen.aot import ARCHITECTURES, device_of
from treegen.codegen.compile_counter import expected_compiles
from treegen.codegen.kernel_usage import usage
from treegen.engine.pool import KVPool, write_kv
from treegen.ir.shape import Shape
from treegen.ir.tree.shards import Shard


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


def compile_write(architecture: int) -> int:
    """The bytes of stack that the kernel takes; runs in a process where Triton does not interpret."""
    from treegen.backends.write_kernels import write_kv as kernel

    cache, slots = torch.zeros(4, 8, 128, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    with device_of(architecture), expected_compiles():
        made: Any = kernel.warmup(
            cache, cache, slots, cache, cache, 1024, 1024, 1024, 1024, 512, grid=(1, 1), num_warps=4
        )
    return usage(made.asm["cubin"])[1]


def test_the_kernel_compiles_for_every_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(compile_write, ARCHITECTURES)) == [0] * len(ARCHITECTURES)


@pytest.mark.parametrize(("ranks", "page_size", "interleave"), [(1, 4, 1), (2, 4, 1), (2, 4, 4), (3, 8, 2), (4, 1, 1)])
def test_each_token_is_on_one_rank(ranks: int, page_size: int, interleave: int) -> None:
    """A rank's tokens lie in its pages one after another, and other ranks have the same pages."""
    shape, tokens = Shape(2, 1, 8, page_size=page_size), np.arange(50)
    pools = [KVPool(shape, 1, 60, shard=Shard(rank, ranks, interleave)) for rank in range(ranks)]
    assert {pool.pages_for(50) for pool in pools} == {-(-50 // (page_size * ranks))}
    pages = np.array([7, 3, *range(20, 68)])
    slots = [pool.slots_for(pages[tokens // pool.page_tokens], tokens) for pool in pools]
    held = [own != pool.spare_slot for own, pool in zip(slots, pools, strict=True)]
    assert (np.sum(held, axis=0) == 1).all()
    for own, here in zip(slots, held, strict=True):
        places = np.arange(np.count_nonzero(here))
        assert (own[here] == pages[places // page_size] * page_size + places % page_size).all()
