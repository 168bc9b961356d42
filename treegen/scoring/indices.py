"""Indices beyond the ends of a tensor, for score functions that are called on tensors instead of symbols."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class ClampedIndices(TorchFunctionMode):
    """Makes single entries of tensors behave as in kernels.

    A negative index counts from the end, and an index out of bounds takes the nearest entry.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Clamps the indices of `tensor[...]`, and leaves all other functions unchanged."""
        if func is torch.Tensor.__getitem__:
            tensor, given = args
            indices = given if isinstance(given, tuple) else (given,)
            if len(indices) == tensor.dim() and all(map(_is_whole, indices)):
                # This mode is off inside this method.
                places = (_clamped(index, size) for index, size in zip(indices, tensor.shape, strict=True))
                return tensor[tuple(places)]
        return func(*args, **(kwargs or {}))


def _is_whole(index: object) -> bool:
    if isinstance(index, torch.Tensor):
        return not index.is_floating_point() and index.dtype != torch.bool
    return isinstance(index, int) and not isinstance(index, bool)


def _clamped(index: int | torch.Tensor, size: int) -> int | torch.Tensor:
    if isinstance(index, torch.Tensor):
        return torch.where(index < 0, index + size, index).clamp(0, size - 1)
    return min(max(index + size if index < 0 else index, 0), size - 1)
