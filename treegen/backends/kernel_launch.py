"""Kernel launches, as Triton takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class KernelLaunch(NamedTuple):
    """A Triton kernel on a grid of thread blocks, with its arguments in the order of its parameters.

    taken: the tensors of a call whose pointers come first among the arguments, as a slice of kernel_signature.Tensors.
    """

    kernel: Any
    grid: tuple[int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    taken: slice = slice(0)

    def run(self) -> Any:
        """Launches the kernel; returns the compiled kernel, or None under Triton's interpreter."""
        return self.kernel[self.grid](*self.arguments, **self.options)

    @property
    def settled(self) -> tuple[Any, ...]:
        """The arguments of a compiled kernel after the pointers of a call's tensors, with pointers for tensors."""
        rest = self.arguments[self.taken.stop - (self.taken.start or 0) :]
        return tuple(each.data_ptr() if isinstance(each, torch.Tensor) else each for each in rest)
