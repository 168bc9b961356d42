"""Staging: host memory from which a copy to a device need not be waited for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from treegen.compiled.c_library import address_of
from treegen.ir.arrays import Ints

_TAKEN_AT_ONCE = 1 << 16
"""The most bytes of ordinary memory that are copied without waiting.

CUDA moves them to memory of its own before the call returns. On an H200 such a copy takes the host half the time of one
from new pinned memory (88 and 184 us between other work).
"""


def staging_for(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocates host memory of a tensor's size and type, for one copy to a device that is not waited for.

    It is pinned where it is large. PyTorch reuses the memory of a pinned tensor only when copies from it are done. So
    each copy has its own buffer, and there are no more buffers than copies in flight at a time.
    """
    return torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=not taken_at_once(part, device))


def copy_at_once(part: torch.Tensor, words: Ints) -> None:
    """Copies a contiguous array, whose bytes are `taken_at_once`, to a part of a device, on the current stream.

    On an H200 PyTorch takes 20 to 37 us for that between other work, and the CUDA driver 10 to 12.
    """
    copy, index = _driver_copy(), part.device.index
    if copy is None or part.device.type != "cuda" or index != torch.cuda.current_device():
        part.copy_(torch.from_numpy(words).view(part.shape), non_blocking=True)
        return
    from triton.runtime import driver

    stream = driver.active.get_current_stream(index)
    if copy(part.data_ptr(), address_of(words), part.nbytes, stream):
        part.copy_(torch.from_numpy(words).view(part.shape), non_blocking=True)  # raises what is wrong


@cache
def _driver_copy() -> Callable[[int, int, int, int], int] | None:
    """Returns cuMemcpyHtoDAsync of the CUDA driver, which Triton loads as well; None where there is none."""
    try:
        copy = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
    except (OSError, AttributeError):
        return None
    copy.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    copy.restype = ctypes.c_int
    return copy


def taken_at_once(part: torch.Tensor, device: torch.device) -> bool:
    """Tells whether a copy from ordinary memory has read it when the call returns, so that one buffer serves all."""
    return device.type != "cuda" or part.nbytes <= _TAKEN_AT_ONCE
