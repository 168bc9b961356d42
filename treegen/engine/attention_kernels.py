"""Attention kernels of a step: the kinds of attention layers, and who makes the kernel of a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from treegen.api.compile_batch import check_served, compile_batch
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
    """A kernel for the attention of a step, as `treegen.BatchKernel` is one.

    A kernel that reads the page table on the device alone has an attribute `device_tables` that is True. With other
    kernels the host knows the page table of each step before it is launched, so controllers that fork branches on the
    device do not run ahead. The same goes for `device_lengths`, and controllers that accept drafts on the device.
    """

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
    """Returns the maker of kernels by `treegen.compile_batch` with a strategy.

    Raises:
        StrategyError: There is no such strategy, or `treegen.compile_batch` does not serve it.
    """
    check_served(strategy)

    def make(step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> StepKernel:
        return compile_batch(
            step.pool.shape, step.pages, max_tokens=step.max_tokens, max_rows=step.kernel_rows, strategy=strategy,
            **score_options(step, kind, sinks),
        )  # fmt: skip

    return make


def score_options(step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> dict[str, Any]:
    """Returns the arguments of `treegen.compile_batch` for the scores of a kind of layer in a step."""
    mask, window_left, mask_mod = step.draft_mask, kind.window_left, None
    if mask is not None and window_left < 0:
        mask_mod = mask.mask_mod
    elif mask is not None:
        mask_mod, window_left = mask.window_mod(window_left), window_left + mask.most
    return {
        "sm_scale": kind.sm_scale, "window_left": window_left, "logits_soft_cap": kind.logits_soft_cap, "sinks": sinks,
        "mask_mod": mask_mod,
    }  # fmt: skip
