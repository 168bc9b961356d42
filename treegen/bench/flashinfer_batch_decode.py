"""FlashInfer's wrappers for one query row per request as providers of running batches: decode, and MLA decode."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treegen.bench.batch_case import BatchCase
from treegen.bench.batch_providers import PlansAhead
from treegen.bench.flashinfer_batch_inputs import PageGather, int_buffer, page_offsets, paged_caches, workspace
from treegen.bench.flashinfer_package import check_served, flashinfer_package
from treegen.bench.providers import UnavailableError
from treegen.workloads.batch_pages import BatchPages


@dataclass(frozen=True, slots=True)
class FlashInferBatchDecode:
    """BatchDecodeWithPagedKVCacheWrapper, in its mode for CUDA graphs.

    Args:
        tensor_cores: Whether the wrapper uses tensor cores.
        exact: Whether to plan for each step alone, without the mode for CUDA graphs.
    """

    tensor_cores: bool
    exact: bool = False

    @property
    def name(self) -> str:
        """See BatchProvider."""
        return f"flashinfer-decode{'-tc' if self.tensor_cores else ''}{'-exact' if self.exact else ''}"

    @property
    def replans(self) -> bool:
        """See BatchProvider."""
        return not self.exact

    def prepare(self, case: BatchCase) -> _DecodeServer:
        """See BatchProvider."""
        check_served(case.shape)
        if case.many_queries or case.shape.shared_kv:
            raise UnavailableError("decode wrappers serve one query a request and separate K and V")
        return _DecodeServer(case, self.tensor_cores, self.exact)


class _DecodeServer(PlansAhead):
    order = None

    def __init__(self, case: BatchCase, tensor_cores: bool, exact: bool) -> None:
        self._case, self._out, self._gather = case, case.new_out(), PageGather(case)
        rows, device = case.start.sizes.rows, case.device
        buffers: dict[str, Any] = {}
        if not exact:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": int_buffer(rows + 1, device),
                "paged_kv_indices_buffer": int_buffer(case.page_table.numel() + 1, device),
                "paged_kv_last_page_len_buffer": int_buffer(rows, device),
            }
        self._wrapper = flashinfer_package().BatchDecodeWithPagedKVCacheWrapper(
            workspace(case), "NHD", use_tensor_cores=tensor_cores, backend="fa2", **buffers
        )

    def plan(self, pages: BatchPages) -> None:
        shape = self._case.shape
        lengths = np.maximum(pages.lengths, 1)
        indptr, last, counts = page_offsets(lengths, pages.page_size)
        cells = np.arange(len(lengths)) * pages.table.shape[1]
        self._wrapper.plan(
            torch.from_numpy(indptr),
            self._gather.ids(cells, counts, indptr),
            torch.from_numpy(last),
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            q_data_type=self._case.q.dtype,
            kv_data_type=self._case.caches[0][0].dtype,
            sm_scale=shape.head_dim**-0.5,
            window_left=self._case.window_left,
        )

    def attend(self, layer: int) -> torch.Tensor:
        self._wrapper.run(self._case.q, paged_caches(self._case, layer), out=self._out)
        return self._out


@dataclass(frozen=True, slots=True)
class FlashInferBatchMla:
    """BatchMLAPagedAttentionWrapper, for caches of one latent KV head."""

    name: str = "flashinfer-mla"
    replans: bool = True

    def prepare(self, case: BatchCase) -> _MlaServer:
        """See BatchProvider."""
        if not case.shape.shared_kv:
            raise UnavailableError("MLA needs K and V in one cache")
        if case.window_left >= 0:
            raise UnavailableError("MLA has no windows")
        return _MlaServer(case)


class _MlaServer(PlansAhead):
    order = None

    def __init__(self, case: BatchCase) -> None:
        self._case, self._gather, self._out = case, PageGather(case), case.new_out()
        rows, device = case.start.sizes.rows, case.device
        flashinfer_package()
        self._mla: Any = importlib.import_module("flashinfer.mla")
        self._wrapper = self._mla.BatchMLAPagedAttentionWrapper(
            workspace(case),
            use_cuda_graph=True,
            qo_indptr=int_buffer(rows + 1, device),
            kv_indptr=int_buffer(rows + 1, device),
            kv_indices=int_buffer(case.page_table.numel() + 1, device),
            kv_len_arr=int_buffer(rows, device),
            backend="auto",
        )

    def plan(self, pages: BatchPages) -> None:
        shape = self._case.shape
        lengths = np.maximum(pages.lengths, 1)
        indptr, _, counts = page_offsets(lengths, pages.page_size)
        cells = np.arange(len(lengths)) * pages.table.shape[1]
        metadata = self._mla.MLAPlanMetadata.csr(
            qo_indptr=torch.arange(len(lengths) + 1, dtype=torch.int32),
            kv_indptr=torch.from_numpy(indptr),
            kv_indices=self._gather.ids(cells, counts, indptr),
            kv_len_arr=torch.from_numpy(lengths),
        )
        self._wrapper.plan(
            metadata=metadata,
            num_heads=shape.num_qo_heads,
            head_dim_ckv=shape.head_dim_v,
            head_dim_kpe=shape.head_dim - shape.head_dim_v,
            page_size=shape.page_size,
            causal=False,
            sm_scale=shape.head_dim**-0.5,
            q_data_type=self._case.q.dtype,
            kv_data_type=self._case.caches[0][0].dtype,
        )

    def attend(self, layer: int) -> torch.Tensor:
        self._wrapper.run(query=self._case.q, kv_cache=self._case.cache(layer)[0].squeeze(-2), out=self._out)
        return self._out
