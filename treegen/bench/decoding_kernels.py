"""Attention of other providers in steps of the decoding system: FlashInfer's kernels, and none at all."""

from __future__ import annotations

import torch

from treegen.bench.flashinfer_package import check_served
from treegen.bench.flashinfer_steps import FlashInferDecodeSteps, FlashInferDraftSteps
from treegen.bench.providers import UnavailableError
from treegen.engine.attention_kernels import AttentionKind, StepKernel
from treegen.engine.step import Step


def no_kernel(step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> None:
    """Leaves attention out. See treegen.engine.KernelMaker."""


def flashinfer_kernel(step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> StepKernel:
    """Makes FlashInfer's kernel for a step: decode with tensor cores, or masked prefill where branches have drafts.

    See treegen.engine.KernelMaker.

    Raises UnavailableError where the package is missing or does not serve such layers.
    """
    check_served(step.pool.shape)
    if sinks is not None or kind.window_left >= 0:
        raise UnavailableError("FlashInfer's kernels are compared in full layers without sinks")
    return FlashInferDecodeSteps(step, kind) if step.max_new == 1 else FlashInferDraftSteps(step, kind)
