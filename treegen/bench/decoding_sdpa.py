"""PyTorch's attention function in steps of the decoding system: pages are gathered to tables of equal length."""

from __future__ import annotations

import numpy as np
import torch

from treegen.bench.providers import UnavailableError
from treegen.engine.attention_kernels import AttentionKind, StepKernel
from treegen.engine.step import Step
from treegen.ir.live_batch import LiveBatch


def sdpa_kernel(step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> StepKernel:
    """Makes scaled_dot_product_attention for a step. See treegen.engine.KernelMaker.

    Raises UnavailableError for layers that the function cannot compute.
    """
    for wanted, name in (
        (sinks is not None, "sinks"),
        (kind.logits_soft_cap, "soft caps"),
        (step.max_new > 1, "drafts"),
    ):
        if wanted:
            raise UnavailableError(f"PyTorch's scaled_dot_product_attention is compared in layers without {name}")
    return SdpaDecode(step, kind)


class SdpaDecode:
    """Gathers the pages of each row, pads to one length and masks the rest; the heads of a group are query rows.

    Rows without a token read one of the table's first row.

    Attributes:
        pads: Whether to pad to the most tokens of a branch, as captured steps need it, and not to those of the step's
            longest one. On a GPU it is set.
    """

    rows = 0

    def __init__(self, step: Step, kind: AttentionKind) -> None:
        self._step, self._kind = step, kind
        self._places = torch.zeros(2, step.max_rows, dtype=torch.int64, device=step.pool.device)
        """The row of the page table of each query row, and its tokens."""
        self.pads = step.pool.device.type == "cuda"
        self._pages = 0

    def prepare(self, batch: LiveBatch) -> None:
        """Copies the rows of the step to the device."""
        lengths, new = self._step.host_lengths
        table_rows = np.flatnonzero(new)
        places = np.zeros(tuple(self._places.shape), np.int64)
        places[1] = 1
        places[0, : len(table_rows)], places[1, : len(table_rows)] = table_rows, lengths[table_rows]
        self._places.copy_(torch.from_numpy(places), non_blocking=True)
        width = self._step.host_table.shape[1]
        self._pages = width if self.pads else self._step.pool.pages_for(int(places[1].max()))

    def step(self) -> None:
        """Does nothing: `prepare` has done all work."""

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, out: torch.Tensor) -> None:
        """Computes a layer."""
        shape, rows = self._step.pool.shape, len(q)
        table_rows, lengths = self._places[:, :rows]
        pages = self._step.pages.table[table_rows, : self._pages].long()
        keys, values = (
            (cache if cache.dim() == 4 else cache.unsqueeze(1))[pages].flatten(1, 2).transpose(1, 2)
            for cache in (k_cache, v_cache)
        )
        position = torch.arange(keys.shape[2], device=q.device)
        mask = position < lengths[:, None]
        if self._kind.window_left >= 0:
            mask &= position >= lengths[:, None] - 1 - self._kind.window_left
        query = q.reshape(rows, shape.num_kv_heads, shape.group, -1)
        result = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, mask[:, None, None], scale=self._kind.sm_scale
        )
        out.copy_(result.flatten(1, 2))

    def refresh(self, batch: LiveBatch) -> None:
        """Does nothing."""
