"""Batch-invariant attention in steps of the engine, which serves one query row for each request."""

from __future__ import annotations

import torch

from treegen.api.compile_batch import compile_batch
from treegen.engine.attention_kernels import AttentionKind, StepKernel, score_options
from treegen.engine.row_requests import RowRequests
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

    device_tables = True

    def __init__(self, step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> None:
        self._rows = RowRequests(step)
        self._kernel = compile_batch(
            step.pool.shape, self._rows.pages, max_tokens=step.max_tokens, batch_invariant=True,
            **score_options(step, kind, sinks),
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """See StepKernel."""
        return self._kernel.rows

    def prepare(self, batch: LiveBatch) -> None:
        """See StepKernel."""
        if self._rows.take(batch):
            self._kernel.update(self._rows.batch)

    def step(self) -> None:
        """See StepKernel."""
        self._kernel.step()

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, out: torch.Tensor) -> None:
        """See StepKernel."""
        self._kernel(q, k_cache, v_cache, out=out)

    def refresh(self, batch: LiveBatch) -> None:
        """Does nothing: plans are good however much branches grow."""
