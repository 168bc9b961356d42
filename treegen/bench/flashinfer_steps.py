"""FlashInfer's kernels for decoding steps: decode, and prefill with a custom mask where branches have drafts."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch

from treegen.bench.flashinfer_batch_inputs import WORKSPACE_BYTES, int_buffer, page_offsets
from treegen.bench.flashinfer_package import flashinfer_package
from treegen.engine.attention_kernels import AttentionKind
from treegen.engine.step import Step
from treegen.ir.live_batch import LiveBatch


class FlashInferSteps:
    """A wrapper for each number of rows, planned in each step."""

    rows = 0

    def __init__(self, step: Step, kind: AttentionKind) -> None:
        self._step, self._kind, self._device = step, kind, step.pool.device
        self._package = flashinfer_package()
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._wrappers: dict[int, Any] = {}

    @abstractmethod
    def prepare(self, batch: LiveBatch) -> None:
        """Plans for the rows of the step."""

    def step(self) -> None:
        """Does nothing: `prepare` has done all work."""

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, out: torch.Tensor) -> None:
        """Computes a layer."""
        caches = (k_cache, v_cache) if k_cache.dim() == 4 else (k_cache.unsqueeze(1), v_cache.unsqueeze(1))
        self._wrapper().run(q.contiguous(), caches, out=out)

    def refresh(self, batch: LiveBatch) -> None:
        """Does nothing."""

    def _wrapper(self) -> Any:
        """Returns the wrapper for the rows of the step."""
        rows = self._step.rows
        if rows not in self._wrappers:
            self._wrappers[rows] = self._made(rows)
        return self._wrappers[rows]

    @abstractmethod
    def _made(self, rows: int) -> Any:
        """Makes the wrapper for a number of rows."""


class FlashInferDecodeSteps(FlashInferSteps):
    """The decode wrapper with tensor cores. Rows without a token read one of the spare page."""

    def prepare(self, batch: LiveBatch) -> None:
        """See FlashInferSteps."""
        step, shape = self._step, self._step.pool.shape
        lengths, new = step.host_lengths
        table_rows = np.flatnonzero(new)
        tokens = np.ones(step.rows, np.int64)
        tokens[: len(table_rows)] = lengths[table_rows]
        indptr, last, counts = page_offsets(tokens, shape.page_size)
        ids = np.full(indptr[-1], step.pool.num_pages, np.int32)
        own = counts[: len(table_rows)]
        places = np.arange(own.sum()) - np.repeat(indptr[: len(own)], own)
        ids[: len(places)] = step.host_table[np.repeat(table_rows, own), places]
        self._wrapper().plan(
            torch.from_numpy(indptr), torch.from_numpy(ids).to(self._device, non_blocking=True),
            torch.from_numpy(last), shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.page_size,
            q_data_type=step.pool.keys.dtype, kv_data_type=step.pool.keys.dtype, sm_scale=self._kind.sm_scale,
            logits_soft_cap=self._kind.logits_soft_cap,
        )  # fmt: skip

    def _made(self, rows: int) -> Any:
        return self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=True, backend="fa2", use_cuda_graph=True,
            paged_kv_indptr_buffer=int_buffer(rows + 1, self._device),
            paged_kv_indices_buffer=int_buffer(self._step.host_table.size + rows, self._device),
            paged_kv_last_page_len_buffer=int_buffer(rows, self._device),
        )  # fmt: skip


class FlashInferDraftSteps(FlashInferSteps):
    """The prefill wrapper with a custom mask.

    Each row of the page table is a request. One more has the rows that stand for no token, and the spare page.
    """

    def prepare(self, batch: LiveBatch) -> None:
        """See FlashInferSteps."""
        step, shape = self._step, self._step.pool.shape
        lengths, new = step.host_lengths
        queries = np.append(new, step.rows - new.sum())
        tokens = np.append(np.where(new > 0, lengths, 1), 1)
        indptr, last, counts = page_offsets(tokens, shape.page_size)
        ids = np.full(indptr[-1], step.pool.num_pages, np.int32)
        own = np.where(queries[:-1] > 0, counts[:-1], 0)
        places = np.arange(own.sum()) - np.repeat(own.cumsum() - own, own)
        ids[np.repeat(indptr[:-2], own) + places] = step.host_table[np.repeat(np.arange(len(own)), own), places]
        self._wrapper().plan(
            torch.from_numpy(np.append(0, queries.cumsum()).astype(np.int32)), torch.from_numpy(indptr),
            torch.from_numpy(ids).to(self._device, non_blocking=True), torch.from_numpy(last), shape.num_qo_heads,
            shape.num_kv_heads, shape.head_dim, shape.page_size, custom_mask=self._mask(queries, tokens),
            sm_scale=self._kind.sm_scale, logits_soft_cap=self._kind.logits_soft_cap,
            q_data_type=step.pool.keys.dtype, kv_data_type=step.pool.keys.dtype,
        )  # fmt: skip

    def _mask(self, queries: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any]) -> torch.Tensor:
        """Makes the masks `[queries, tokens]` of all requests, flattened and joined, on the device."""
        each = np.repeat(tokens, queries)
        sees = each - np.repeat(queries.cumsum(), queries) + np.arange(len(each)) + 1
        host = torch.from_numpy(np.stack([each, each.cumsum() - each, sees]).astype(np.int64))
        count, begin, seen = host.to(self._device, non_blocking=True)
        total = int(each.sum())
        row = torch.repeat_interleave(torch.arange(len(each), device=self._device), count, output_size=total)
        token = torch.arange(total, device=self._device) - begin[row]
        visible: torch.Tensor = token < seen[row]
        if self._step.draft_mask is not None:
            visible &= self._step.draft_mask.mask_mod(row, 0, seen[row] - 1, token)
        return visible

    def _made(self, rows: int) -> Any:
        requests = len(self._step.host_table) + 1
        bits = rows * self._step.max_tokens // 8 + requests
        return self._package.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_cuda_graph=True, backend="fa2",
            qo_indptr_buf=int_buffer(requests + 1, self._device),
            paged_kv_indptr_buf=int_buffer(requests + 1, self._device),
            paged_kv_indices_buf=int_buffer(self._step.host_table.size + requests, self._device),
            paged_kv_last_page_len_buf=int_buffer(requests, self._device),
            custom_mask_buf=torch.zeros(bits, dtype=torch.uint8, device=self._device),
            mask_indptr_buf=int_buffer(requests + 1, self._device),
        )  # fmt: skip
