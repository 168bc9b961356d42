"""Writes and copies of KV: one launch for K and V, and nothing beside them; and where ranks have their tokens."""

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
from treegen.engine.pool import KVPool, copy_kv, write_kv
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


@pytest.mark.parametrize(("kv_heads", "dims"), [(2, (16, 16)), (3, (40, 24)), (8, (128, 128))])
def test_pages_and_tokens_are_copied_in_all_layers(kv_heads: int, dims: tuple[int, int]) -> None:
    """Pages, and tokens in lists. Some tokens are read from places that the same list writes later."""
    shape = Shape(kv_heads, kv_heads, dims[0], dims[1], dtype="bf16", page_size=4)
    pool = KVPool(shape, 3, 5)
    for cache in (pool.keys, pool.values):
        cache.copy_(torch.randn(cache.shape))
    moves = [[2, 4, 3], [0, 2, 1]], [[9, 11], [8, 9]], [[17], [15]]  # sources and targets
    source, target = ([place for pair in moves for place in pair[which]] for which in (0, 1))
    for copied, caches, places, first in (
        (KVPool.copy, (pool.keys, pool.values), ([3, 0, 3], [1, 4, 2]), None),
        (KVPool.move, (pool.keys.flatten(1, 2), pool.values.flatten(1, 2)), (source, target), [0, 3, 5, 6]),
    ):
        expected = [cache.clone() for cache in caches]
        for cache in expected:
            cache[:, places[1]] = cache[:, places[0]]
        made = [cache.clone() for cache in caches]
        copy_kv(made[0], made[1], *places, first or [0, 1, 2, 3])
        copied(pool, *places, *([first] if first else []))
        for cache, other, wanted in zip(caches, made, expected, strict=True):
            assert torch.equal(cache, wanted)
            assert torch.equal(other, wanted)


def compile_all(architecture: int) -> list[int]:
    """The bytes of stack that kernels take; runs in a process where Triton does not interpret."""
    from treegen.backends import write_kernels

    cache, slots = torch.zeros(2, 4, 8, 128, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    words = slots.int()
    calls = (
        (write_kernels.write_kv, (cache[0], cache[0], slots, cache[0], cache[0], 1024, 1024, 1024, 1024, 512)),
        (write_kernels.copy_kv, (slots, slots, cache, cache, 1, 4096, 4096, 1024, 1024, 512)),
        (write_kernels.fork_rows, (slots, slots, words, words, cache, cache, 1, 9, 8192, 8192, 16, 4096, 4096, 2048)),
    )

    with device_of(architecture), expected_compiles():
        made: list[Any] = [kernel.warmup(*arguments, grid=(1, 1), num_warps=4) for kernel, arguments in calls]
    return [usage(each.asm["cubin"])[1] for each in made]


def test_kernels_compile_for_every_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(compile_all, ARCHITECTURES)) == [[0, 0, 0]] * len(ARCHITECTURES)


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
