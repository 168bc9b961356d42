"""FlashInfer's wrappers as providers of running batches, against stand-ins with the same signatures on the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from support.small_batches import BATCH, CHUNKS, DRAFTS, case_of, settings
from treegen import Shape
from treegen.bench.batch_providers import BatchProvider
from treegen.bench.batch_runs import measure_batch
from treegen.bench.flashinfer_batch_cascade import FlashInferBatchCascade
from treegen.bench.flashinfer_batch_decode import FlashInferBatchDecode, FlashInferBatchMla
from treegen.bench.flashinfer_batch_prefill import FlashInferBatchPrefill
from treegen.workloads.served_batch import ServedBatch

SHAPE = Shape(4, 2, 64, dtype="bf16", page_size=4)
LATENT = Shape(4, 1, 24, 16, dtype="bf16", page_size=4, shared_kv=True)
SINGLE = replace(SHAPE, page_size=1)


class StandInPaged:
    """Requests of several queries over paged caches, in the mode for CUDA graphs: sizes are fixed by the first plan."""

    def __init__(self, batch_size: int | None, cells: int | None) -> None:
        self.batch_size, self.cells, self.rows, self.window_left = batch_size, cells, None, -1

    def take(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> None:
        assert {tensor.dtype for tensor in (qo_indptr, indptr, indices, last)} == {torch.int32}
        assert all(tensor.device.type == "cpu" for tensor in (qo_indptr, indptr, last))
        assert len(qo_indptr) == len(indptr) == len(last) + 1
        assert indptr[-1] == len(indices) > 0
        if self.batch_size is not None:
            assert len(last) == self.batch_size
            assert self.cells is not None
            assert len(indices) <= self.cells
            self.rows = self.rows or int(qo_indptr[-1])
            assert self.rows == qo_indptr[-1]
        self.tables = qo_indptr.tolist(), indptr.tolist(), indices.clone(), last.tolist()
        self.mask, self.causal = mask, causal

    def attend(
        self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and lse of all query rows."""
        qo_indptr, indptr, indices, last = self.tables
        assert len(q) == qo_indptr[-1]
        page, group = caches[0].shape[1], q.shape[1] // caches[0].shape[2]
        out = q.new_zeros(*q.shape[:2], caches[1].shape[-1], dtype=torch.float64)
        lse, read = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64), 0
        for request, ((first, end), (begin, until)) in enumerate(
            zip(pairwise(qo_indptr), pairwise(indptr), strict=True)
        ):
            tokens = (until - begin - 1) * page + last[request] if until > begin else 0
            ids = indices[begin:until].long()
            k, v = (cache[ids].flatten(0, 1)[:tokens].repeat_interleave(group, 1).double() for cache in caches)
            scores = torch.einsum("rhd,thd->rht", q[first:end].double(), k) * scale
            seen = torch.ones(end - first, tokens, dtype=torch.bool)
            if self.mask is not None:
                seen = self.mask[read : read + seen.numel()].view_as(seen)
                read += seen.numel()
            elif self.causal:
                seen = seen.tril(tokens - (end - first))
            if self.window_left >= 0:
                seen = seen.triu(tokens - (end - first) - self.window_left)
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            lse[first:end] = scores.logsumexp(-1)
            weights = (scores - lse[first:end].nan_to_num(neginf=0.0)[..., None]).exp()
            out[first:end] = torch.einsum("rht,thd->rhd", weights, v)
        assert self.mask is None or read == len(self.mask)
        return out, lse


class StandInDecodeGraph(StandInPaged):
    def __init__(
        self, workspace: torch.Tensor, kv_layout: str, *, use_tensor_cores: bool, backend: str,
        use_cuda_graph: bool = False, paged_kv_indptr_buffer: Any = None, paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
    ) -> None:  # fmt: skip
        assert (kv_layout, backend) == ("NHD", "fa2")
        sizes = (len(paged_kv_last_page_len_buffer), len(paged_kv_indices_buffer)) if use_cuda_graph else (None, None)
        super().__init__(*sizes)

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, q_data_type: torch.dtype, kv_data_type: torch.dtype,
        sm_scale: float, window_left: int,
    ) -> None:  # fmt: skip
        self.take(torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len)
        assert (last_page_len > 0).all()
        self.scale, self.window_left = sm_scale, window_left

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        out.copy_(self.attend(q, caches, self.scale)[0])


class StandInCascadeGraph:
    def __init__(
        self, num_levels: int, workspace: torch.Tensor, kv_layout: str, *, use_cuda_graph: bool,
        qo_indptr_buf_arr: list[torch.Tensor], paged_kv_indptr_buf_arr: list[torch.Tensor],
        paged_kv_indices_buf_arr: list[torch.Tensor], paged_kv_last_page_len_buf_arr: list[torch.Tensor],
    ) -> None:  # fmt: skip
        assert use_cuda_graph
        sizes = zip(paged_kv_last_page_len_buf_arr, paged_kv_indices_buf_arr, strict=True)
        self._batch_prefill_wrappers = [StandInPaged(len(last), len(indices)) for last, indices in sizes]
        assert len(self._batch_prefill_wrappers) == num_levels

    def plan(
        self, qo_indptr_arr: list[torch.Tensor], indptr_arr: list[torch.Tensor], indices_arr: list[torch.Tensor],
        last_page_len_arr: list[torch.Tensor], num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        *, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        tables = zip(qo_indptr_arr, indptr_arr, indices_arr, last_page_len_arr, strict=True)
        for level, table in zip(self._batch_prefill_wrappers, tables, strict=True):
            level.take(*table)
        self.scale = sm_scale

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        parts = [level.attend(q, caches, self.scale) for level in self._batch_prefill_wrappers]
        outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
        return (outs * lses.softmax(0)[..., None]).sum(0).to(q.dtype)


class StandInPrefillGraph(StandInPaged):
    def __init__(
        self, workspace: torch.Tensor, kv_layout: str, *, use_cuda_graph: bool, qo_indptr_buf: torch.Tensor,
        paged_kv_indptr_buf: torch.Tensor, paged_kv_indices_buf: torch.Tensor,
        paged_kv_last_page_len_buf: torch.Tensor, backend: str, custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert backend == "fa2"
        assert len(qo_indptr_buf) == len(paged_kv_indptr_buf)
        super().__init__(len(paged_kv_last_page_len_buf), len(paged_kv_indices_buf))
        self.room = None if custom_mask_buf is None else len(custom_mask_buf)

    def plan(
        self, qo_indptr: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *, causal: bool, window_left: int,
        custom_mask: torch.Tensor | None, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert (custom_mask is None) == (self.room is None)
        if custom_mask is not None:
            assert self.room is not None
            assert len(custom_mask) // 8 + len(last_page_len) <= self.room
        self.take(qo_indptr, indptr, indices, last_page_len, custom_mask, causal)
        self.scale, self.window_left = sm_scale, window_left

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.attend(q, caches, self.scale)[0].to(q.dtype)


class StandInMla(StandInPaged):
    def __init__(
        self, workspace: torch.Tensor, *, use_cuda_graph: bool, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor, kv_len_arr: torch.Tensor, backend: str,
    ) -> None:  # fmt: skip
        super().__init__(len(kv_len_arr), len(kv_indices))

    def plan(
        self, *, metadata: dict[str, torch.Tensor], num_heads: int, head_dim_ckv: int, head_dim_kpe: int,
        page_size: int, causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        lengths = metadata["kv_len_arr"]
        last = (lengths - 1) % page_size + 1
        self.take(metadata["qo_indptr"], metadata["kv_indptr"], metadata["kv_indices"], last)
        self.scale, self.value_dim = sm_scale, head_dim_ckv
        assert (head_dim_ckv, head_dim_kpe, causal) == (16, 8, False)

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        keys = kv_cache[:, :, None]
        out.copy_(self.attend(query, (keys, keys[..., : self.value_dim]), self.scale)[0])


class StandInMetadata:
    @staticmethod
    def csr(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        return tensors


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    for name, value in (
        ("BatchDecodeWithPagedKVCacheWrapper", StandInDecodeGraph),
        ("MultiLevelCascadeAttentionWrapper", StandInCascadeGraph),
        ("BatchPrefillWithPagedKVCacheWrapper", StandInPrefillGraph),
    ):
        monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(mla, "BatchMLAPagedAttentionWrapper", StandInMla, raising=False)
    monkeypatch.setattr(mla, "MLAPlanMetadata", StandInMetadata, raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    monkeypatch.setattr("treegen.bench.flashinfer_batch_inputs.WORKSPACE_BYTES", 1)


ALONE = replace(BATCH, name="pages of one", page_size=1)
SERVED: list[tuple[BatchProvider, ServedBatch, Shape]] = [
    (FlashInferBatchDecode(False), BATCH, SHAPE),
    (FlashInferBatchDecode(True, exact=True), BATCH, SHAPE),
    (FlashInferBatchDecode(True), ALONE, SINGLE),
    (FlashInferBatchCascade("fa2"), BATCH, SHAPE),
    (FlashInferBatchCascade("auto"), ALONE, SINGLE),
    (FlashInferBatchPrefill(), DRAFTS, SHAPE),
    (FlashInferBatchPrefill(), CHUNKS, SHAPE),
    (FlashInferBatchMla(), replace(BATCH, mla=True), LATENT),
]


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize(("provider", "batch", "shape"), SERVED, ids=lambda one: getattr(one, "name", ""))
def test_wrappers_serve_batches(provider: BatchProvider, batch: ServedBatch, shape: Shape) -> None:
    outcome = measure_batch(provider, case_of(batch, shape, 12), settings(12))
    assert (outcome.status, outcome.detail) == ("right", "")
    assert (outcome.step is None) == (not provider.replans)


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize(
    ("provider", "batch"),
    [(FlashInferBatchDecode(True), BATCH), (FlashInferBatchPrefill(), CHUNKS)],
    ids=lambda one: one.name,
)
def test_wrappers_serve_windows(provider: BatchProvider, batch: ServedBatch) -> None:
    outcome = measure_batch(provider, case_of(batch, SHAPE, 12, window_left=5), settings(12))
    assert (outcome.status, outcome.detail) == ("right", "")


@pytest.mark.usefixtures("flashinfer")
def test_wrappers_are_kept_to_what_they_serve() -> None:
    for provider, batch, shape in (
        (FlashInferBatchDecode(True), DRAFTS, SHAPE),
        (FlashInferBatchPrefill(), BATCH, SHAPE),
        (FlashInferBatchCascade("fa2"), replace(BATCH, grouped=False), SHAPE),
        (FlashInferBatchMla(), BATCH, SHAPE),
        (FlashInferBatchDecode(True), BATCH, replace(SHAPE, head_dim=80, head_dim_v=80)),
    ):
        assert measure_batch(provider, case_of(batch, shape), settings()).status == "unavailable"
    for provider, batch, shape in SERVED[3:6] + SERVED[7:]:  # cascades, drafts and MLA
        outcome = measure_batch(provider, case_of(batch, shape, window_left=5), settings())
        assert outcome.status == "unavailable"
        assert "windows" in outcome.detail
