"""FlashInfer's prefill wrapper as a provider of running batches with several query rows per request."""

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
class FlashInferBatchPrefill:
    """BatchPrefillWithPagedKVCacheWrapper, in its mode for CUDA graphs: causal chunks, or token trees under a mask."""

    name: str = "flashinfer-prefill"
    replans: bool = True

    def prepare(self, case: BatchCase) -> _PrefillServer:
        """See BatchProvider."""
        check_served(case.shape)
        if not case.many_queries:
            raise UnavailableError("requests of one query row are for decode wrappers")
        if case.draft and case.window_left >= 0:
            raise UnavailableError("windows of drafts go by positions, which the mask does not have")
        return _PrefillServer(case)


class _PrefillServer(PlansAhead):
    order = None

    def __init__(self, case: BatchCase) -> None:
        self._case, self._gather = case, PageGather(case)
        requests, device = case.start.sizes.rows + 1, case.device  # one more, for unused query rows
        masks: dict[str, Any] = {}
        if case.draft:
            longest = case.start.sizes.width * case.shape.page_size
            mask_bytes = case.query_rows * longest // 8 + requests
            masks = {
                "custom_mask_buf": torch.zeros(mask_bytes, dtype=torch.uint8, device=device),
                "mask_indptr_buf": int_buffer(requests + 1, device),
            }
        self._wrapper = flashinfer_package().BatchPrefillWithPagedKVCacheWrapper(
            workspace(case),
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=int_buffer(requests + 1, device),
            paged_kv_indptr_buf=int_buffer(requests + 1, device),
            paged_kv_indices_buf=int_buffer(case.page_table.numel() + 1, device),
            paged_kv_last_page_len_buf=int_buffer(requests, device),
            backend="fa2",
            **masks,
        )
        self._ones = torch.ones(1, dtype=torch.bool, device=device)
        self._draft_mask = torch.from_numpy(draft_mask(case.draft)).to(device)

    def plan(self, pages: BatchPages) -> None:
        case, shape = self._case, self._case.shape
        queries = np.append(pages.queries, case.query_rows - pages.queries.sum())
        lengths = np.append(np.maximum(pages.lengths, 1), 1)
        indptr, last, counts = page_offsets(lengths, pages.page_size)
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
            window_left=case.window_left,
            custom_mask=self._mask(queries, lengths) if case.draft else None,
            sm_scale=shape.head_dim**-0.5,
            q_data_type=case.q.dtype,
            kv_data_type=case.caches[0][0].dtype,
        )

    def attend(self, layer: int) -> torch.Tensor:
        out: torch.Tensor = self._wrapper.run(self._case.q, paged_caches(self._case, layer))
        return out

    def _mask(self, queries: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> torch.Tensor:
        """Makes the masks `[queries, tokens]` of all requests, flattened and joined, on the device."""
        drafts = len(self._case.draft)
        parts = []
        for count, length in zip(queries.tolist(), lengths.tolist(), strict=True):
            if count == drafts and length > drafts:
                context = self._ones.expand(drafts, length - drafts)
                parts.append(torch.cat([context, self._draft_mask], 1).view(-1))
            else:
                parts.append(self._ones.expand(count * length))
        return torch.cat(parts)


def draft_mask(parents: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Returns which draft tokens each draft token sees, itself included: `[drafts, drafts]`."""
    mask = np.eye(len(parents), dtype=bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask
