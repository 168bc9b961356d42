"""Attention in steps of the engine where ranks divide the tokens of branches: each attends to its own, then all merge.

Rows of a branch end at different tokens of a rank, so each query row is a request of its own.
"""

from __future__ import annotations

import torch

from treegen.distributed.compile_parallel import compile_batch
from treegen.distributed.parallel import Parallel
from treegen.engine.attention_kernels import AttentionKind, KernelMaker, StepKernel, score_options
from treegen.engine.row_requests import RowRequests
from treegen.engine.step import Step
from treegen.ir.live_batch import LiveBatch
from treegen.strategies import Strategy


def context_kernels(parallel: Parallel, strategy: str | Strategy = "auto") -> KernelMaker:
    """Returns the maker of kernels for ranks that divide tokens.

    Args:
        parallel: The ranks; all of them make the same kernels. The pool has the heads of this rank already.
        strategy: As in `treegen.compile_batch`, for the rank's own tokens.
    """
    among = Parallel(context=parallel.context, interleave=parallel.interleave)

    def make(step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> StepKernel:
        return ContextSteps(step, kind, sinks, among, strategy)

    return make


class ContextSteps:
    """A rank's kernel for a step, whose calls merge the results of all ranks.

    It plans anew where branches come, end, fork or have other new tokens, and where growth makes a plan pay.

    Attributes:
        kernel: The kernel; its `local` is that of this rank's tokens.

    Args:
        step: The step.
        kind: The kind of attention layer.
        sinks: `[num_qo_heads]`, where the layers have them.
        parallel: The ranks that divide tokens.
        strategy: See context_kernels.
    """

    def __init__(
        self, step: Step, kind: AttentionKind, sinks: torch.Tensor | None, parallel: Parallel,
        strategy: str | Strategy,
    ) -> None:  # fmt: skip
        self._rows = RowRequests(step)
        self.kernel = compile_batch(
            step.pool.shape, self._rows.pages, parallel, max_tokens=step.max_tokens, positions=step.positions,
            strategy=strategy, **score_options(step, kind, sinks),
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """See StepKernel."""
        return self.kernel.rows

    def prepare(self, batch: LiveBatch) -> None:
        """See StepKernel."""
        if self._rows.take(batch):
            self.kernel.update(self._rows.batch)

    def step(self) -> None:
        """See StepKernel."""
        self.kernel.step()

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, out: torch.Tensor) -> None:
        """See StepKernel. All ranks call it."""
        merged = self.kernel(q, k_cache, v_cache)
        assert isinstance(merged, torch.Tensor)
        out.copy_(merged)

    def refresh(self, batch: LiveBatch) -> None:
        """See StepKernel."""
        self.kernel.refresh(self._rows.batch)
