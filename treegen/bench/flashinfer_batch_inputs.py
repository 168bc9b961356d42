"""Inputs of FlashInfer's wrappers for running batches: page ids, offsets, workspaces and caches.

Page ids are gathered on the device from the engine's page table, as engines do it. Offsets are made on the host, where
the wrappers plan. Free rows are requests of one token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treegen.bench.batch_case import BatchCase
from treegen.ir.arrays import Ints

WORKSPACE_BYTES = 512 << 20
"""Bytes of a wrapper's workspace. Plans for CUDA graphs split KV over the whole grid and need more than the recommended
128 MB."""


class PageGather:
    """Gathers page ids of requests from the page table on the device into one list."""

    def __init__(self, case: BatchCase) -> None:
        self._table = case.page_table.view(-1)
        self._ramp = torch.arange(self._table.numel(), device=case.device)

    def ids(self, cells: Ints, counts: Ints, indptr: Ints) -> torch.Tensor:
        """Returns `counts[r]` ids from cell `cells[r]` of the flat table on, for each request r.

        indptr: offsets of the requests in the result, `[requests + 1]`.
        """
        total = int(indptr[-1])
        host = np.stack([cells.astype(np.int64) - indptr[:-1], counts])
        shift, count = torch.from_numpy(host).to(self._table.device, non_blocking=True)
        spread = torch.repeat_interleave(shift, count, output_size=total)
        return self._table[spread + self._ramp[:total]]


def page_offsets(lengths: npt.NDArray[Any], page_size: int) -> tuple[Ints, Ints, Ints]:
    """Returns offsets of pages `[requests + 1]`, tokens of last pages and numbers of pages `[requests]`."""
    counts = (-(-lengths // page_size)).astype(np.int32)
    last = np.where(lengths > 0, (lengths - 1) % page_size + 1, 0).astype(np.int32)
    return np.append(0, np.cumsum(counts)).astype(np.int32), last, counts


def int_buffer(count: int, device: torch.device) -> torch.Tensor:
    """Returns a buffer of `count` int32 zeros."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def workspace(case: BatchCase) -> torch.Tensor:
    """Returns a workspace for one wrapper."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=case.device)


def paged_caches(case: BatchCase, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the caches of a layer as pages; caches by slot become pages of one token."""
    k_cache, v_cache = case.cache(layer)
    return (k_cache.unsqueeze(1), v_cache.unsqueeze(1)) if k_cache.dim() == 3 else (k_cache, v_cache)
