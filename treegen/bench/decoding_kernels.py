"""Attention of other providers in steps of the decoding system: FlashInfer's decode, and none at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from treegen.bench.flashinfer_batch_inputs import WORKSPACE_BYTES, int_buffer, page_offsets
from treegen.bench.flashinfer_drafts import FlashInferDrafts
from treegen.bench.flashinfer_package import check_served, flashinfer_package
from treegen.bench.providers import UnavailableError
from treegen.engine.attention_kernels import AttentionKind, StepKernel
from treegen.engine.step import Step
from treegen.ir.live_batch import LiveBatch


def no_kernel(step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> None:
    """Leaves attention out. See treegen.engine.KernelMaker."""


def flashinfer_kernel(step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> StepKernel:
    """Makes FlashInfer's kernel for a step: decode with tensor cores, or masked prefill where branches have drafts.

    See treegen.engine.KernelMaker.

    Raises UnavailableError where the package is missing or does not serve such layers.
    """
    check_served(step.pool.shape)
    if sinks is not None or kind.window_left >= 0:
        raise UnavailableError("FlashInfer's kernels are compared in full layers without sinks")
    return _FlashInferDecode(step, kind) if step.max_new == 1 else FlashInferDrafts(step, kind)


class _FlashInferDecode:
    """A wrapper for each number of rows, planned in each step. Rows without a token read one of the spare page."""

    rows = 0

    def __init__(self, step: Step, kind: AttentionKind) -> None:
        self._step, self._kind = step, kind
        self._package, device = flashinfer_package(), step.pool.device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[int, Any] = {}

    def prepare(self, batch: LiveBatch) -> None:
        """Plans for the rows of the step."""
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
            torch.from_numpy(indptr), torch.from_numpy(ids).to(step.pool.device, non_blocking=True),
            torch.from_numpy(last), shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.page_size,
            q_data_type=step.pool.keys.dtype, kv_data_type=step.pool.keys.dtype, sm_scale=self._kind.sm_scale,
            logits_soft_cap=self._kind.logits_soft_cap,
        )  # fmt: skip

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
        rows, device = self._step.rows, self._step.pool.device
        if rows not in self._wrappers:
            self._wrappers[rows] = self._package.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=True, backend="fa2", use_cuda_graph=True,
                paged_kv_indptr_buffer=int_buffer(rows + 1, device),
                paged_kv_indices_buffer=int_buffer(self._step.host_table.size + rows, device),
                paged_kv_last_page_len_buffer=int_buffer(rows, device),
            )  # fmt: skip
        return self._wrappers[rows]
