"""Warming for servers: compiles all kernels that batches of a shape can launch, by serving small batches once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from treegen.backends.check_inputs import KV_TORCH_DTYPES, TORCH_DTYPES
from treegen.backends.page_table import PageTable
from treegen.codegen.compile_counter import expected_compiles, kernel_counts
from treegen.ir.live_batch import LiveBatch
from treegen.ir.shape import Shape
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.call_options import BatchOptions
from treegen.strategies.baselines import query
from treegen.strategies.batch_invariant import BatchInvariant
from treegen.target.targets import Target

_PAGES = 4
ROWS = (1, 16, 48, 256, 1024)
"""Rows of the small batches, which cover each form of the merge kernel for any number of heads."""


def warm_batches(shapes: Sequence[Shape], target: Target, device: torch.device) -> Iterator[tuple[Shape, int]]:
    """Compiles the kernels of compile_batch with plain scores; yields each shape and its number of compiled kernels.

    These serve page tables in all three forms, with and without a qo_indptr, in batch-invariant mode or not, and any
    number of requests. A process that serves them later compiles nothing.
    """
    with expected_compiles():
        for shape in dict.fromkeys(shapes):
            before = kernel_counts().compiled
            for rows in ROWS:
                _serve(shape, rows, target, device)
            yield shape, kernel_counts().compiled - before


def _serve(shape: Shape, rows: int, target: Target, device: torch.device) -> None:
    """Serves one request with kernels for `rows` requests, one for each form of page table."""
    k_size, v_size = shape.cache_sizes(_PAGES)
    kv_dtype = KV_TORCH_DTYPES[shape.kv_dtype]
    k_cache = torch.zeros(k_size, device=device).to(kv_dtype)
    v_cache = k_cache[..., : shape.head_dim_v] if shape.shared_kv else torch.zeros(v_size, device=device).to(kv_dtype)
    q = torch.zeros(rows, shape.num_qo_heads, shape.head_dim, dtype=TORCH_DTYPES[shape.dtype], device=device)
    batch = LiveBatch(shape.page_size, rows)
    batch.add(shape.page_size)
    invariant = [(BatchInvariant(), pages) for pages in _tables(rows, device)] if rows == ROWS[0] else []
    plain = ((query(), pages) for queries in (False, True) for pages in _tables(rows, device, queries=queries))
    for strategy, pages in (*plain, *invariant):
        options = BatchOptions(strategy, "triton")
        kernel = BatchKernel(shape, pages, target, options, _PAGES * shape.page_size)
        kernel.update(batch)
        kernel.step()
        kernel(q, k_cache, v_cache)


def _tables(rows: int, device: torch.device, *, queries: bool = False) -> Iterator[PageTable]:
    """Yields page tables of empty requests: a block table, a pool of rows, a ragged one. queries: with a qo_indptr."""

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    lengths, of_rows = zeros(rows), zeros(rows + 1) if queries else None
    yield PageTable(zeros(rows, _PAGES), lengths, _PAGES, qo_indptr=of_rows)
    yield PageTable(zeros(rows, _PAGES), lengths, _PAGES, table_rows=zeros(rows), qo_indptr=of_rows)
    yield PageTable(zeros(rows * _PAGES), lengths, _PAGES, indptr=zeros(rows + 1), qo_indptr=of_rows)
