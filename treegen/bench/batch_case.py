"""Cases of the suite of batches: caches, queries, page tables and lengths on a device, and a float64 reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from treegen.backends import oracle
from treegen.backends.check_inputs import KV_TORCH_DTYPES, TORCH_DTYPES
from treegen.backends.kv_views import tokens_at
from treegen.backends.softmax import softmax
from treegen.ir.arrays import Ints
from treegen.ir.shape import Shape
from treegen.workloads.batch_pages import BatchPages, BatchSizes
from treegen.workloads.served_batch import BatchEvents, ServedBatch
from treegen.workloads.stand_ins import stand_ins

BATCH_HEADS = ("32:8", "8:1")
"""Query heads and KV heads of the batches."""
MLA_HEADS = ("128:1", "16:1")
"""Query heads and KV heads of batches with one latent KV head."""
_MLA_DIMS = (576, 512)
_CHECKED_ROWS = 12
"""The most rows of the table to compare with the reference. Of several query rows of a request, the first, one in the
middle and the last are compared."""
_REUSED_BYTES = 256 << 20
"""Bytes that are read between two reads of the same cache, several times an L2 cache: layers get enough caches for it.
"""


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """The attention shapes that batches are measured with.

    Args:
        heads: "query heads:KV heads" of each shape. Batches with one latent KV head use MLA_HEADS instead.
        head_dim: Head dimension of q, K and V. Batches with one latent KV head have their own.
        dtype: Element type of q and the caches.
        kv_dtype: Element type of the caches, where that is another one: e4m3 or e5m2.
    """

    heads: Sequence[str]
    head_dim: int = 128
    dtype: str = "bf16"
    kv_dtype: str | None = None

    def of(self, batch: ServedBatch) -> list[Shape]:
        """Returns the shapes for a batch."""
        dims = _MLA_DIMS if batch.mla else (self.head_dim, self.head_dim)
        pairs = [tuple(map(int, text.split(":"))) for text in (MLA_HEADS if batch.mla else self.heads)]
        shapes = [
            Shape(query, kv, dims[0], dims[1], dtype=self.dtype, page_size=batch.page_size, shared_kv=batch.mla)
            for query, kv in pairs
        ]
        return [replace(shape, kv_dtype=self.kv_dtype or shape.kv_dtype) for shape in shapes]


@dataclass(frozen=True, slots=True)
class BatchStart:
    """A batch, its events, and the two stand-ins that are served before it.

    Args:
        batch: The batch that is measured.
        events: Its events, step by step.
        earlier: Its stand-ins.
        sizes: Sizes of a page table and a cache that have room for all three batches.
    """

    batch: ServedBatch
    events: tuple[BatchEvents, ...]
    earlier: tuple[ServedBatch, ServedBatch]
    sizes: BatchSizes

    @classmethod
    def of(cls, batch: ServedBatch, steps: int) -> BatchStart:
        """Prepares a course of `steps` steps."""
        events = tuple(batch.events(steps))
        earlier = stand_ins(batch)
        sizes = BatchSizes.of(batch, events)
        for each in earlier:
            sizes = sizes.joined(BatchSizes.of(each, ()))
        return cls(batch, events, earlier, sizes)

    def pages(self, batch: ServedBatch) -> BatchPages:
        """Sets up one of the three batches at its first step."""
        return BatchPages(batch, self.sizes)


class BatchCase:
    """The tensors that providers of batches compute on.

    Where every request has one query row, row r of the batch has query row r, also where the row is free. Otherwise the
    query rows of requests follow one another in order of their rows, without gaps.

        q [query rows, num_qo_heads, head_dim]       standard normal
        caches                                       pairs of K and V; layers 0, 1, ... cycle through them
        page_table [rows, width], seq_lens [rows]    int32, of the latest `upload`
        qo_indptr [rows + 1]                         int32, of the latest `upload`: offsets of each row's query rows;
                                                     None where every request has one query row

    A row sees `window_left` tokens before its own, or all of them where that is -1.
    """

    def __init__(
        self, start: BatchStart, shape: Shape, layers: int, device: torch.device, window_left: int = -1
    ) -> None:
        self.start, self.shape, self.layers, self.device = start, shape, layers, device
        self.window_left = window_left
        sizes = start.sizes
        self.draft = start.batch.draft
        self.many_queries = any(request.queries > 1 for request in start.batch.requests)
        self.query_rows = sizes.queries if self.many_queries else sizes.rows
        generator = torch.Generator(device).manual_seed(0)
        dtype, kv_dtype = TORCH_DTYPES[shape.dtype], KV_TORCH_DTYPES[shape.kv_dtype]

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        self.q = normal(self.query_rows, shape.num_qo_heads, shape.head_dim)
        read = max(1, start.batch.unique_tokens * shape.kv_token_bytes)
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(min(layers, -(-_REUSED_BYTES // read)) if device.type == "cuda" else 1):
            k_size, v_size = shape.cache_sizes(sizes.pages)
            k_cache = normal(*k_size).to(kv_dtype)
            v_cache = k_cache[..., : shape.head_dim_v] if shape.shared_kv else normal(*v_size).to(kv_dtype)
            self.caches.append((k_cache, v_cache))
        self.page_table = torch.zeros(sizes.rows, sizes.width, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(sizes.rows, dtype=torch.int32, device=device)
        self.qo_indptr: torch.Tensor | None = None
        if self.many_queries:
            self.qo_indptr = torch.zeros(sizes.rows + 1, dtype=torch.int32, device=device)

    def cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the K and V cache of a layer."""
        return self.caches[layer % len(self.caches)]

    def new_out(self) -> torch.Tensor:
        """Allocates an output `[query rows, num_qo_heads, head_dim_v]`."""
        return self.q.new_zeros(self.query_rows, self.shape.num_qo_heads, self.shape.head_dim_v)

    def upload(self, pages: BatchPages) -> None:
        """Copies page table, lengths and offsets of query rows to the device, as every engine does before a step."""
        cells, ids = pages.taken_writes()
        on_device = torch.from_numpy(np.stack([cells, ids.astype(np.int64)])).to(self.device)
        self.page_table.view(-1)[on_device[0]] = on_device[1].int()
        self.seq_lens.copy_(torch.from_numpy(pages.lengths))
        if self.qo_indptr is not None:
            self.qo_indptr[1:].copy_(torch.from_numpy(np.cumsum(pages.queries)))

    def first_queries(self, pages: BatchPages, order: npt.NDArray[np.integer] | None = None) -> Ints:
        """Returns the first query row of each row, `[rows]`.

        order: the row at each query row, where a provider has reordered them.
        """
        if not self.many_queries:
            places = np.arange(len(pages.lengths), dtype=np.int32)
            return places if order is None else np.argsort(order).astype(np.int32)
        return (np.cumsum(pages.queries) - pages.queries).astype(np.int32)

    def error_of(
        self, out: torch.Tensor, pages: BatchPages, layer: int = 0, order: npt.NDArray[np.integer] | None = None
    ) -> float:
        """Returns `max |out - reference| / max |reference|` of some rows; infinity where a running row has a NaN."""
        rows, first = pages.rows, self.first_queries(pages, order)
        places = np.concatenate([first[row] + np.arange(pages.queries[row]) for row in rows.tolist()])
        if bool(out[torch.from_numpy(places.astype(np.int64)).to(out.device)].isnan().any()):
            return math.inf
        found, expected = [], []
        for row in rows[np.unique(np.linspace(0, len(rows) - 1, _CHECKED_ROWS).round().astype(int))].tolist():
            count = int(pages.queries[row])
            for query in sorted({0, count // 2, count - 1}):
                place = int(first[row]) + query
                found.append(out[place])
                expected.append(self._reference(pages, layer, row, query, place))
        return oracle.error(torch.stack(found), torch.stack(expected))

    def _reference(self, pages: BatchPages, layer: int, row: int, query: int, place: int) -> torch.Tensor:
        """Computes one query row in float64, `[num_qo_heads, head_dim_v]`."""
        shape = self.shape
        slots = self.slots(pages, row, query)
        index = torch.from_numpy(slots).to(self.device)
        keys, values = (tokens_at(cache, index).double() for cache in self.cache(layer))
        q = self.q[place].double().view(shape.num_kv_heads, shape.group, shape.head_dim)
        weights, _ = softmax(torch.einsum("hgd,thd->hgt", q, keys) * shape.head_dim**-0.5, -1)
        return torch.einsum("hgt,thd->hgd", weights, values).flatten(0, 1)

    def slots(self, pages: BatchPages, row: int, query: int) -> npt.NDArray[np.int64]:
        """Returns the KV slots that a query row sees."""
        length, queries, page = int(pages.lengths[row]), int(pages.queries[row]), pages.page_size
        tokens = np.arange(length - queries + query + 1)
        if self.draft:
            path = [query]
            while self.draft[path[-1]] >= 0:
                path.append(self.draft[path[-1]])
            tokens = np.concatenate([np.arange(length - queries), length - queries + np.array(path[::-1])])
        if self.window_left >= 0:
            tokens = tokens[-1 - self.window_left :]
        slots: npt.NDArray[np.int64] = pages.table[row, tokens // page].astype(np.int64) * page + tokens % page
        return slots
