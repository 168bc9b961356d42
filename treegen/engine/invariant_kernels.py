"""Batch-invariant attention in steps of the engine: each query row is a request of its own.

    branch of 300 tokens, 4 of them new       rows that see 297, 298, 299 and 300 tokens

Batch-invariant kernels serve one query row for each request. So rows of a step have lengths and rows of the page table
of their own. They share with the last row of their branch, and that with the last rows of other branches.
"""

from __future__ import annotations

import numpy as np
import torch

from treegen.api.compile_batch import compile_batch
from treegen.backends.page_table import PageTable
from treegen.engine.attention_kernels import AttentionKind, StepKernel, score_options
from treegen.engine.step import Step
from treegen.ir.live_batch import LiveBatch


def invariant_kernels(step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> StepKernel:
    """Makes a batch-invariant kernel. See KernelMaker."""
    return InvariantSteps(step, kind, sinks)


class InvariantSteps:
    """A batch-invariant kernel for a step. It plans anew where branches come, end, fork or have other new tokens.

    Args:
        step: The step.
        kind: The kind of attention layer.
        sinks: `[num_qo_heads]`, where the layers have them.
    """

    def __init__(self, step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> None:
        self._step = step
        self._places = torch.zeros(2, step.kernel_rows, dtype=torch.int32, device=step.pool.device)
        """The row of the page table, and the tokens, of each query row."""
        pages = PageTable(step.pages.table, self._places[1], step.pool.num_pages, table_rows=self._places[0])
        self._kernel = compile_batch(
            step.pool.shape, pages, max_tokens=step.max_tokens, batch_invariant=True, **score_options(step, kind, sinks)
        )
        self._rows = LiveBatch(step.pool.page_size, max_seats=step.kernel_rows)
        self._planned = b""

    @property
    def rows(self) -> int:
        """See StepKernel."""
        return self._kernel.rows

    def prepare(self, batch: LiveBatch) -> None:
        """See StepKernel."""
        lengths, new = self._step.host_lengths
        table_rows = np.flatnonzero(new)
        counts = new[table_rows].astype(np.int64)
        ends, total = counts.cumsum(), int(counts.sum())
        places = np.zeros(tuple(self._places.shape), np.int32)
        places[0, :total] = np.repeat(table_rows, counts)
        places[1, :total] = np.repeat(lengths[table_rows] - ends, counts) + np.arange(1, total + 1)
        self._places.copy_(torch.from_numpy(places), non_blocking=True)
        tokens = places[1, :total]
        running = batch.seats
        seats = running[np.argsort(batch.row[running])][np.searchsorted(np.sort(batch.row[running]), table_rows)]
        last = np.full(len(batch.row) + 1, -1)  # by seat: the branch's last query row; and one more for seat -1
        last[seats] = ends - 1
        owner = np.repeat(ends - 1, counts)
        shared = tokens.astype(np.int64)
        owner[ends - 1] = last[batch.shared_with[seats]]
        shared[ends - 1] = np.where(owner[ends - 1] >= 0, batch.shared_tokens[seats], 0)
        state = (table_rows, counts, batch.epoch[seats], owner[ends - 1], shared[ends - 1])
        planned = b"".join(each.astype(np.int64).tobytes() for each in state)
        if planned == self._planned:
            self._rows.set_tokens(np.arange(total), tokens)
            return
        while len(self._rows) < total:
            self._rows.add(0)
        for seat in range(total, len(self._rows)):
            self._rows.finish(seat)
        self._rows.found(np.arange(total), self._rows.epoch[:total], tokens, owner, shared)
        self._kernel.update(self._rows)
        self._planned = planned

    def step(self) -> None:
        """See StepKernel."""
        self._kernel.step()

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, out: torch.Tensor) -> None:
        """See StepKernel."""
        self._kernel(q, k_cache, v_cache, out=out)

    def refresh(self, batch: LiveBatch) -> None:
        """Does nothing: plans are good however much branches grow."""
