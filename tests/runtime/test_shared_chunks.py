"""Tokens that requests share: windows that begin in them, and short or very long rows of the page table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import treegen
from support.batch_events import TORCH
from treegen import BatchKernel, LiveBatch, PageTable, Shape
from treegen.backends.oracle import error
from treegen.strategies import Strategy, batch_invariant, cohort
from treegen.target.targets import target_from

CHUNK = batch_invariant(chunk=128)


def kernel_of(
    shape: Shape, width: int, strategy: Strategy, window_left: int = -1
) -> tuple[BatchKernel, torch.Tensor, torch.Tensor]:
    """A kernel for two requests, its page table and its lengths."""
    table, lengths = torch.zeros(2, width, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    made = treegen.compile_batch(
        shape, PageTable(table, lengths, 400), max_tokens=600, strategy=strategy, window_left=window_left,
        backend="triton", target=replace(target_from("h200"), sms=2),
    )  # fmt: skip
    return made, table, lengths


def tensors_of(shape: Shape) -> list[torch.Tensor]:
    """Queries of two requests, and caches."""
    generator, dtype = torch.Generator().manual_seed(0), TORCH[shape.dtype]
    sizes = (2, shape.num_qo_heads, shape.head_dim), *shape.cache_sizes(400)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_bits_do_not_follow_from_sharing(page_size: int, dtype: str) -> None:
    """Two windows begin in a chunk that both requests share, in different tiles."""
    shape = Shape(4, 2, 16, dtype=dtype, page_size=page_size)
    kernel, table, lengths = kernel_of(shape, 192 // page_size, CHUNK, window_left=100)
    pages, shared = torch.arange(384 // page_size, dtype=torch.int32).view(2, -1), 128 // page_size
    table[:] = pages
    table[1, :shared] = pages[0, :shared]
    lengths[:] = torch.tensor([150, 190])
    together, apart = LiveBatch(page_size), LiveBatch(page_size)
    for batch, tokens in ((together, 128), (apart, 0)):
        first = batch.add(150)
        batch.add(190, first, tokens)
    tensors, results = tensors_of(shape), []
    for batch in (together, apart):
        kernel.update(batch)
        kernel.step()
        results.append(kernel(*tensors, return_lse=True))
    assert kernel.counters()["planned"] == 4
    for part, other in zip(*results, strict=True):
        assert torch.equal(part, other)


def test_an_owner_longer_than_its_row_of_the_table_leaves_those_that_share_right() -> None:
    shape = Shape(4, 2, 16, dtype="fp32", page_size=16)
    kernel, table, lengths = kernel_of(shape, 16, CHUNK)
    table[0, :13] = torch.arange(13)
    table[1, :12] = torch.cat([table[0, :8], torch.arange(20, 24, dtype=torch.int32)])
    lengths[:] = torch.tensor([200, 190])
    batch = LiveBatch(16)
    batch.add(190, batch.add(200), 128)
    tensors, outs = tensors_of(shape), []
    kernel.update(batch)
    for length in (200, 300):  # a row of the table has 256 tokens
        lengths[0] = length
        kernel.step()
        outs.append(kernel(*tensors))
    assert kernel.counters()["invalid"] == 1
    assert kernel.counters()["planned"] == 3
    assert error(outs[1][1], outs[0][1]) < 1e-6
    assert not outs[1][0].any()


@pytest.mark.parametrize("strategy", [CHUNK, cohort(64)])
def test_rows_of_the_page_table_may_have_room_for_2_to_the_31_tokens(strategy: Strategy) -> None:
    shape, outs = Shape(4, 2, 16, dtype="fp32", page_size=128), []
    tensors = tensors_of(shape)
    for width in (4, 1 << 24):
        kernel, table, lengths = kernel_of(shape, width, strategy)
        table[0, :3] = torch.arange(3)
        table[1, :3] = torch.tensor([0, 1, 3])
        lengths[:] = torch.tensor([300, 290])
        batch = LiveBatch(128)
        batch.add(290, batch.add(300), 256)
        kernel.update(batch)
        kernel.step()
        outs.append(kernel(*tensors))
        assert kernel.counters()["planned"] == 2
    assert torch.equal(*outs)
