"""Staging: host memory from which a copy to a device need not be waited for."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from treegen.compiled.c_library import address_of
from treegen.ir.arrays import Ints

_TAKEN_AT_ONCE = 1 << 16
"""The most bytes of pageable host memory from which a copy need not be waited for: CUDA has read them into a buffer of
its own when the call returns. So the caller needs no buffer that is kept until the copy is done.
"""


def staging_for(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocates host memory of a tensor's size and type, for one copy to a device that is not waited for.

    It is pinned where it is large. PyTorch reuses the memory of a pinned tensor only when copies from it are done. So
    each copy has its own buffer, and there are no more buffers than copies in flight at a time.
    """
    return torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=not _taken_at_once(part, device))


class Upload:
    """Copies data from the host to one tensor on a device, any number of times, and never waits for a copy to finish.

    Write to what `words()` returns, then call `send`. A buffer is used again once its copy has finished. Buffers stay
    when the Upload is gone, as copies may still read them.

    Args:
        part: The tensor: contiguous int32, often a slice of a larger one.
    """

    def __init__(self, part: torch.Tensor) -> None:
        self._part, self._at_once = part, _taken_at_once(part, part.device)
        self._place = part.data_ptr(), part.nbytes, part.device.index if part.device.type == "cuda" else -1
        self._buffers: list[_Buffer] = []
        self._next: _Buffer | None = None
        weakref.finalize(self, _UNDER_WAY.extend, self._buffers).atexit = False
        for buffer in list(_UNDER_WAY):
            if buffer.is_free:
                with suppress(ValueError):  # another thread has removed it
                    _UNDER_WAY.remove(buffer)

    def words(self) -> Ints:
        """Returns memory of the part's size to write to, which no copy reads."""
        self._next = next((buffer for buffer in self._buffers if buffer.is_free), None)
        if self._next is None:
            self._next = _Buffer(self._part, pinned=not self._at_once)
            self._buffers.append(self._next)
        return self._next.words

    def send(self) -> None:
        """Copies what was written on the current stream."""
        assert self._next is not None
        self._copy(self._next.words)
        self._next.note_copy(self._part.device)

    def send_words(self, words: Ints) -> None:
        """Copies a contiguous array of the part's size on the current stream. It may change when this returns."""
        if not self._at_once:
            self.words()[:] = words.reshape(-1)
            self.send()
            return
        self._copy(words)

    def _copy(self, words: Ints) -> None:
        """Copies a contiguous array on the current stream. Memory that is pinned is read later.

        On an H200 PyTorch takes 20 to 37 us for that between other work, and the CUDA driver 10 to 12.
        """
        address, length, index = self._place
        driver = _driver_copy() if index >= 0 and index == torch.cuda.current_device() else None
        if driver is not None:
            copy, stream_of = driver
            if not copy(address, address_of(words), length, stream_of(index)):
                return
        part = self._part
        part.copy_(torch.from_numpy(words).view(part.shape), non_blocking=True)  # raises what is wrong


class _Buffer:
    """Host memory for copies to a part of a device. Where it is pinned, an event says when the last one is done."""

    def __init__(self, part: torch.Tensor, *, pinned: bool) -> None:
        self._kept = torch.empty(part.numel(), dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.words: Ints = self._kept.numpy()
        self._copied: Any = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    @property
    def is_free(self) -> bool:
        """Whether no copy from this memory is under way."""
        return self._copied is None or bool(self._copied.query())

    def note_copy(self, device: torch.device) -> None:
        """Notes a copy on the device's current stream."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(device))


_UNDER_WAY: list[_Buffer] = []
"""Buffers whose Upload is gone. PyTorch does not know that the driver may still read them."""


@cache
def _driver_copy() -> tuple[Callable[[int, int, int, int], int], Callable[[int], int]] | None:
    """Returns cuMemcpyHtoDAsync of the CUDA driver, which Triton loads as well, and what tells the current stream.

    None where there is no such driver.
    """
    try:
        copy = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
    except (OSError, AttributeError):
        return None
    copy.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    copy.restype = ctypes.c_int

    from triton.runtime import driver

    return copy, driver.active.get_current_stream


def _taken_at_once(part: torch.Tensor, device: torch.device) -> bool:
    """Tells whether a copy from pageable memory has read it when the call returns, so that one buffer serves all."""
    return device.type != "cuda" or part.nbytes <= _TAKEN_AT_ONCE
