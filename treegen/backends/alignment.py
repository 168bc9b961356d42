"""Alignment: warns about tensors that kernels cannot read in vectors of 16 bytes."""

from __future__ import annotations

import torch

from treegen.ir.errors import PerformanceWarning, warn

_ALIGNED_BYTES = 16

warned_unaligned = False
"""Whether this process has warned already."""


def warn_unaligned(*tensors: torch.Tensor) -> None:
    """Warns, once per process, of a tensor whose storage offset or strides are not multiples of 16 bytes."""
    global warned_unaligned
    if warned_unaligned:
        return
    for tensor in tensors:
        per_vector = _ALIGNED_BYTES // tensor.element_size()
        strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1][:-1]
        if tensor.data_ptr() % _ALIGNED_BYTES or any(stride % per_vector for stride in strides):
            warned_unaligned = True
            warn(
                PerformanceWarning,
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not aligned to 16 bytes: "
                "the result is right but slower; align storage offset and strides (said once)",
            )
            return
