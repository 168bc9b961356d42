"""FlashInfer's cascade as a provider of running batches: one level for shared tokens, one for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treegen.bench.batch_case import BatchCase
from treegen.bench.batch_providers import PlansAhead
from treegen.bench.flashinfer_batch_inputs import PageGather, int_buffer, page_offsets, paged_caches, workspace
from treegen.bench.flashinfer_package import check_served, flashinfer_package
from treegen.bench.providers import UnavailableError
from treegen.workloads.batch_pages import BatchPages


@dataclass(frozen=True, slots=True)
class FlashInferBatchCascade:
    """MultiLevelCascadeAttentionWrapper with two levels, in its mode for CUDA graphs.

    The first level holds the tokens that each group of requests shares, the second the rest of each request. Query rows
    are ordered by group.

    Args:
        backend: "auto" for FlashInfer's own choice, or "fa2", the backend of its decode wrapper.
        replans: See BatchProvider.
    """

    backend: str
    replans: bool = True

    @property
    def name(self) -> str:
        """See BatchProvider."""
        return "flashinfer-cascade" if self.backend == "auto" else f"flashinfer-cascade-{self.backend}"

    def prepare(self, case: BatchCase) -> _CascadeServer:
        """See BatchProvider."""
        check_served(case.shape)
        if not case.start.batch.grouped or case.many_queries or case.shape.shared_kv:
            raise UnavailableError("a cascade needs groups of requests that share their first tokens")
        if case.window_left >= 0:
            raise UnavailableError("a cascade has no windows")
        return _CascadeServer(case, self.backend)


class _CascadeServer(PlansAhead):
    def __init__(self, case: BatchCase, backend: str) -> None:
        self.order: npt.NDArray[np.integer[Any]] | None = None
        self._case, self._gather = case, PageGather(case)
        rows, device = case.start.sizes.rows, case.device
        cells = case.page_table.numel() + 1
        self._wrapper = flashinfer_package().MultiLevelCascadeAttentionWrapper(
            2,
            workspace(case),
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf_arr=[int_buffer(rows + 1, device) for _ in range(2)],
            paged_kv_indptr_buf_arr=[int_buffer(rows + 1, device) for _ in range(2)],
            paged_kv_indices_buf_arr=[int_buffer(cells, device) for _ in range(2)],
            paged_kv_last_page_len_buf_arr=[int_buffer(rows, device) for _ in range(2)],
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
            shared[0] = 1  # plans need at least one page on each level
        # Both levels have the same number of requests; most of those on the first level have no query rows.
        ends = np.cumsum(sizes)
        first_queries = np.full(rows + 1, rows, np.int32)
        first_queries[: len(ends) + 1] = np.append(0, ends)[: rows + 1]
        common = np.zeros(rows, np.int32)
        common[: len(groups)] = shared[:-1]
        owners = np.zeros(rows, np.int64)
        owners[: len(groups)] = [int(members[0]) * width for members, _ in groups]
        rest = np.maximum(pages.lengths[order] - np.repeat(shared, sizes) * page, 1)
        offsets = [page_offsets(common * page, page), page_offsets(rest, page)]
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

    def attend(self, layer: int) -> torch.Tensor:
        out: torch.Tensor = self._wrapper.run(self._case.q, paged_caches(self._case, layer))
        return out
