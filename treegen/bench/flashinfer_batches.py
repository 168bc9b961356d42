"""FlashInfer's wrappers as providers of running batches (flashinfer-python 0.7.2), in their mode for CUDA graphs.

Page ids are gathered on the device from the engine's page table, as engines do it. Offsets are made on the host, where
the wrappers plan. Free rows are requests of one token.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treegen.bench.batch_case import BatchCase
from treegen.bench.batch_providers import PlansAhead
from treegen.bench.providers import UnavailableError
from treegen.ir.arrays import Ints
from treegen.workloads.batch_pages import BatchPages

_WORKSPACE_BYTES = 512 << 20
"""Plans for CUDA graphs split KV as far as the grid reaches: more than the recommended 128 MB."""
_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class FlashInferBatchDecode:
    """BatchDecodeWithPagedKVCacheWrapper, with or without tensor cores. exact: outside its mode for CUDA graphs, where
    plans suit one step alone."""

    tensor_cores: bool
    exact: bool = False

    @property
    def name(self) -> str:
        """What its results are listed under."""
        return f"flashinfer-decode{'-tc' if self.tensor_cores else ''}{'-exact' if self.exact else ''}"

    @property
    def replans(self) -> bool:
        """See BatchProvider."""
        return not self.exact

    def prepare(self, case: BatchCase) -> _DecodeServer:
        """See BatchProvider."""
        _check(case)
        if case.many_queries or case.shape.shared_kv:
            raise UnavailableError("decode wrappers serve one query a request and separate K and V")
        return _DecodeServer(case, self.tensor_cores, self.exact)


class _Gather:
    """Page ids of requests, gathered from the page table on the device into one list."""

    def __init__(self, case: BatchCase) -> None:
        self._table = case.page_table.view(-1)
        self._ramp = torch.arange(self._table.numel(), device=case.device)

    def ids(self, cells: Ints, counts: Ints, indptr: Ints) -> torch.Tensor:
        """`counts[r]` ids from cell `cells[r]` of the flat table on, for each request r; indptr: their offsets."""
        total = int(indptr[-1])
        host = np.stack([cells.astype(np.int64) - indptr[:-1], counts])
        shift, count = torch.from_numpy(host).to(self._table.device, non_blocking=True)
        spread = torch.repeat_interleave(shift, count, output_size=total)
        return self._table[spread + self._ramp[:total]]


class _DecodeServer(PlansAhead):
    order = None

    def __init__(self, case: BatchCase, tensor_cores: bool, exact: bool) -> None:
        self._case, self._out, self._gather = case, case.new_out(), _Gather(case)
        rows, device = case.start.sizes.rows, case.device
        buffers: dict[str, Any] = {}
        if not exact:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": _ints(rows + 1, device),
                "paged_kv_indices_buffer": _ints(case.page_table.numel() + 1, device),
                "paged_kv_last_page_len_buffer": _ints(rows, device),
            }
        self._wrapper = _flashinfer().BatchDecodeWithPagedKVCacheWrapper(
            _workspace(case), "NHD", use_tensor_cores=tensor_cores, backend="fa2", **buffers
        )

    def plan(self, pages: BatchPages) -> None:
        shape = self._case.shape
        lengths = np.maximum(pages.lengths, 1)
        indptr, last, counts = _page_offsets(lengths, pages.page_size)
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
        )

    def begin(self) -> None:
        """Nothing: all is in the plan."""

    def attend(self, layer: int) -> torch.Tensor:
        self._wrapper.run(self._case.q, _paged(self._case, layer), out=self._out)
        return self._out


@dataclass(frozen=True, slots=True)
class FlashInferBatchCascade:
    """MultiLevelCascadeAttentionWrapper with two levels: what each group of requests shares, and the rest of each.

    backend: "auto" is FlashInfer's own choice, "fa2" that of its decode wrapper. Query rows are ordered by group.
    """

    backend: str
    replans: bool = True

    @property
    def name(self) -> str:
        """What its results are listed under."""
        return "flashinfer-cascade" if self.backend == "auto" else f"flashinfer-cascade-{self.backend}"

    def prepare(self, case: BatchCase) -> _CascadeServer:
        """See BatchProvider."""
        _check(case)
        if not case.start.batch.grouped or case.many_queries or case.shape.shared_kv:
            raise UnavailableError("a cascade needs groups of requests that share their first tokens")
        return _CascadeServer(case, self.backend)


class _CascadeServer(PlansAhead):
    def __init__(self, case: BatchCase, backend: str) -> None:
        self.order: npt.NDArray[np.integer[Any]] | None = None
        self._case, self._gather = case, _Gather(case)
        rows, device = case.start.sizes.rows, case.device
        cells = case.page_table.numel() + 1
        self._wrapper = _flashinfer().MultiLevelCascadeAttentionWrapper(
            2,
            _workspace(case),
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf_arr=[_ints(rows + 1, device) for _ in range(2)],
            paged_kv_indptr_buf_arr=[_ints(rows + 1, device) for _ in range(2)],
            paged_kv_indices_buf_arr=[_ints(cells, device) for _ in range(2)],
            paged_kv_last_page_len_buf_arr=[_ints(rows, device) for _ in range(2)],
        )
        if backend != "auto":
            for level in self._wrapper._batch_prefill_wrappers:
                level._backend = backend

    def plan(self, pages: BatchPages) -> None:
        shape, page = self._case.shape, pages.page_size
        rows, width = pages.table.shape
        groups = pages.groups()
        free = np.flatnonzero(pages.lengths == 0)
        order = np.concatenate([*(members for members, _ in groups), free])
        sizes = np.array([len(members) for members, _ in groups] + [len(free)])
        shared = np.array([tokens // page for _, tokens in groups] + [0])
        if not shared.any() and int(pages.lengths[order[0]]) > page:
            shared[0] = 1  # plans need some page on each level
        # The first level has as many requests as the second, most of them without queries.
        ends = np.cumsum(sizes)
        first_queries = np.full(rows + 1, rows, np.int32)
        first_queries[: len(ends) + 1] = np.append(0, ends)[: rows + 1]
        common = np.zeros(rows, np.int32)
        common[: len(groups)] = shared[:-1]
        owners = np.zeros(rows, np.int64)
        owners[: len(groups)] = [int(members[0]) * width for members, _ in groups]
        rest = np.maximum(pages.lengths[order] - np.repeat(shared, sizes) * page, 1)
        offsets = [_page_offsets(common * page, page), _page_offsets(rest, page)]
        cells = [owners, order.astype(np.int64) * width + np.repeat(shared, sizes)]
        ids = [self._gather.ids(at, counts, indptr) for at, (indptr, _, counts) in zip(cells, offsets, strict=True)]
        self.order = order
        self._wrapper.plan(
            [torch.from_numpy(first_queries), torch.arange(rows + 1, dtype=torch.int32)],
            [torch.from_numpy(indptr) for indptr, _, _ in offsets],
            ids,
            [torch.from_numpy(last) for _, last, _ in offsets],
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            page,
            sm_scale=shape.head_dim**-0.5,
            q_data_type=self._case.q.dtype,
            kv_data_type=self._case.caches[0][0].dtype,
        )

    def begin(self) -> None:
        """Nothing: all is in the plan."""

    def attend(self, layer: int) -> torch.Tensor:
        out: torch.Tensor = self._wrapper.run(self._case.q, _paged(self._case, layer))
        return out


@dataclass(frozen=True, slots=True)
class FlashInferBatchPrefill:
    """BatchPrefillWithPagedKVCacheWrapper for requests of several queries: causal chunks, or drafts under a mask."""

    name: str = "flashinfer-prefill"
    replans: bool = True

    def prepare(self, case: BatchCase) -> _PrefillServer:
        """See BatchProvider."""
        _check(case)
        if not case.many_queries:
            raise UnavailableError("requests of one query are for decode wrappers")
        return _PrefillServer(case)


class _PrefillServer(PlansAhead):
    order = None

    def __init__(self, case: BatchCase) -> None:
        self._case, self._gather = case, _Gather(case)
        requests, device = case.start.sizes.rows + 1, case.device  # the last one has the query rows that are left
        masks: dict[str, Any] = {}
        if case.draft:
            longest = case.start.sizes.width * case.shape.page_size
            mask_bytes = case.query_rows * longest // 8 + requests
            masks = {
                "custom_mask_buf": torch.zeros(mask_bytes, dtype=torch.uint8, device=device),
                "mask_indptr_buf": _ints(requests + 1, device),
            }
        self._wrapper = _flashinfer().BatchPrefillWithPagedKVCacheWrapper(
            _workspace(case),
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=_ints(requests + 1, device),
            paged_kv_indptr_buf=_ints(requests + 1, device),
            paged_kv_indices_buf=_ints(case.page_table.numel() + 1, device),
            paged_kv_last_page_len_buf=_ints(requests, device),
            backend="fa2",
            **masks,
        )
        self._ones = torch.ones(1, dtype=torch.bool, device=device)
        self._draft_mask = torch.from_numpy(draft_mask(case.draft)).to(device)

    def plan(self, pages: BatchPages) -> None:
        case, shape = self._case, self._case.shape
        queries = np.append(pages.queries, case.query_rows - pages.queries.sum())
        lengths = np.append(np.maximum(pages.lengths, 1), 1)
        indptr, last, counts = _page_offsets(lengths, pages.page_size)
        cells = np.append(np.arange(len(pages.lengths)) * pages.table.shape[1], 0)
        self._wrapper.plan(
            torch.from_numpy(np.append(0, np.cumsum(queries)).astype(np.int32)),
            torch.from_numpy(indptr),
            self._gather.ids(cells, counts, indptr),
            torch.from_numpy(last),
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=not case.draft,
            custom_mask=self._mask(queries, lengths) if case.draft else None,
            sm_scale=shape.head_dim**-0.5,
            q_data_type=case.q.dtype,
            kv_data_type=case.caches[0][0].dtype,
        )

    def begin(self) -> None:
        """Nothing: all is in the plan."""

    def attend(self, layer: int) -> torch.Tensor:
        out: torch.Tensor = self._wrapper.run(self._case.q, _paged(self._case, layer))
        return out

    def _mask(self, queries: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> torch.Tensor:
        """The masks [queries, tokens] of all requests, flat, on the device."""
        drafts = len(self._case.draft)
        parts = []
        for count, length in zip(queries.tolist(), lengths.tolist(), strict=True):
            if count == drafts and length > drafts:
                context = self._ones.expand(drafts, length - drafts)
                parts.append(torch.cat([context, self._draft_mask], 1).view(-1))
            else:
                parts.append(self._ones.expand(count * length))
        return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class FlashInferBatchMla:
    """BatchMLAPagedAttentionWrapper: caches of one latent KV head."""

    name: str = "flashinfer-mla"
    replans: bool = True

    def prepare(self, case: BatchCase) -> _MlaServer:
        """See BatchProvider."""
        if not case.shape.shared_kv:
            raise UnavailableError("K and V are apart")
        return _MlaServer(case)


class _MlaServer(PlansAhead):
    order = None

    def __init__(self, case: BatchCase) -> None:
        self._case, self._gather, self._out = case, _Gather(case), case.new_out()
        rows, device = case.start.sizes.rows, case.device
        _flashinfer()
        self._mla: Any = importlib.import_module("flashinfer.mla")
        self._wrapper = self._mla.BatchMLAPagedAttentionWrapper(
            _workspace(case),
            use_cuda_graph=True,
            qo_indptr=_ints(rows + 1, device),
            kv_indptr=_ints(rows + 1, device),
            kv_indices=_ints(case.page_table.numel() + 1, device),
            kv_len_arr=_ints(rows, device),
            backend="auto",
        )

    def plan(self, pages: BatchPages) -> None:
        shape = self._case.shape
        lengths = np.maximum(pages.lengths, 1)
        indptr, _, counts = _page_offsets(lengths, pages.page_size)
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

    def begin(self) -> None:
        """Nothing: all is in the plan."""

    def attend(self, layer: int) -> torch.Tensor:
        self._wrapper.run(query=self._case.q, kv_cache=self._case.cache(layer)[0].squeeze(-2), out=self._out)
        return self._out


def draft_mask(parents: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Which draft tokens each draft token sees, itself among them [drafts, drafts]."""
    mask = np.eye(len(parents), dtype=bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask


def _page_offsets(lengths: npt.NDArray[Any], page_size: int) -> tuple[Ints, Ints, Ints]:
    """Offsets of pages [requests + 1], tokens of the last pages [requests], and numbers of pages [requests]."""
    counts = (-(-lengths // page_size)).astype(np.int32)
    last = np.where(lengths > 0, (lengths - 1) % page_size + 1, 0).astype(np.int32)
    return np.append(0, np.cumsum(counts)).astype(np.int32), last, counts


def _ints(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _workspace(case: BatchCase) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=case.device)


def _paged(case: BatchCase, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches with a dimension for pages."""
    k_cache, v_cache = case.cache(layer)
    return (k_cache.unsqueeze(1), v_cache.unsqueeze(1)) if k_cache.dim() == 3 else (k_cache, v_cache)


def _check(case: BatchCase) -> None:
    shape = case.shape
    if shape.dtype not in ("fp16", "bf16"):
        raise UnavailableError(f"FlashInfer takes fp16 and bf16, not {shape.dtype}")
    if shape.head_dim not in _HEAD_DIMS:
        raise UnavailableError(f"FlashInfer takes head dims {_HEAD_DIMS}, not {shape.head_dim}")


def _flashinfer() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as cause:
        if isinstance(cause, ModuleNotFoundError) and cause.name == "flashinfer":
            raise UnavailableError("flashinfer is not installed") from cause
        raise UnavailableError(f"flashinfer cannot be imported: {cause}") from cause
