"""Attention kernels of a step: the kinds of attention layers, and who makes the kernel of a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch

from treegen.api.compile_batch import compile_batch
from treegen.ir.errors import InputError
from treegen.ir.live_batch import LiveBatch
from treegen.strategies import Strategy

if TYPE_CHECKING:
    from treegen.engine.step import Step


class AttentionKind(NamedTuple):
    """What layers that use one kernel have in common.

    sm_scale, window_left, logits_soft_cap: as in `treegen.compile`. sinks_of: the layer, where layers have sinks,
    because each has its own; None for others.
    """

    sm_scale: float
    window_left: int = -1
    logits_soft_cap: float | None = None
    sinks_of: int | None = None


class StepKernel(Protocol):
    """A kernel for the attention of a step, as `treegen.BatchKernel` is one."""

    @property
    def rows(self) -> int:
        """The rows of q that a call needs at least."""

    def prepare(self, batch: LiveBatch) -> object:
        """Does the host's work before a step."""

    def step(self) -> None:
        """Does the device's work before the first layer of a step."""

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, out: torch.Tensor) -> object:
        """Computes a layer's attention into `out`."""

    def refresh(self, batch: LiveBatch) -> object:
        """Does the host's work after the launches of a step."""


KernelMaker: TypeAlias = "Callable[[Step, AttentionKind, torch.Tensor | None], StepKernel | None]"
"""Makes the kernel of a step for a kind of layer, with the sinks `[num_qo_heads]` of the layer if it has some.

None leaves attention out, with the writes of K and V, to measure what the rest takes.
"""


def tree_kernels(strategy: str | Strategy = "auto") -> KernelMaker:
    """Returns the maker of kernels by `treegen.compile_batch` with a strategy."""

    def make(step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> StepKernel:
        mask = step.draft_mask
        if mask is not None and kind.window_left >= 0:
            reason, fix = "is not served with trees of drafts", "draft chains, or use a model without windows"
            raise InputError("window_left", kind.window_left, reason, fix)
        return compile_batch(
            step.pool.shape, step.pages, max_tokens=step.max_tokens, max_rows=step.kernel_rows, strategy=strategy,
            sm_scale=kind.sm_scale, window_left=kind.window_left, logits_soft_cap=kind.logits_soft_cap, sinks=sinks,
            mask_mod=None if mask is None else mask.mask_mod,
        )  # fmt: skip

    return make
