"""Bound calls: a program for tensors of one form, with everything settled that does not change from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

Call: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    None,
]
"""Fills out, and lse unless it is None, from q, k_cache and v_cache, on the current stream of their device."""

Program: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, float],
    None,
]
"""A schedule on one device: the same from q, k_cache, v_cache, out, lse, sm_scale and lse_scale, by TritonProgram or
TorchProgram."""

_ALIGNMENT = 256


class Launch(NamedTuple):
    """A compiled kernel on its grid: it takes pointers to the tensors from number `first` on (of arguments.Tensors),
    and `rest` behind them.
    """

    run: Callable[..., None]
    first: int
    rest: tuple[Any, ...]


class BoundCall:
    """Launches that need nothing but pointers. Calls share no scratch memory, so streams may overlap.

    owner: what the pointers within `launches` belong to.
    """

    __slots__ = ("_current_stream", "_device", "_index", "_launches", "_lse_at", "_out_at", "_owner", "_scratch")

    def __init__(
        self,
        launches: tuple[Launch, ...],
        owner: object,
        device: torch.device,
        current_stream: Callable[[int], int],
        lse_bytes: int,
        part_out_bytes: int,
        part_lse_bytes: int,
    ) -> None:
        self._launches, self._owner = launches, owner
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._current_stream = current_stream
        # Partial results come first, so that calls with an lse of their own need no more.
        self._out_at = _aligned(part_lse_bytes)
        self._lse_at = self._out_at + _aligned(part_out_bytes)
        self._scratch = self._lse_at + lse_bytes

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """See Call."""
        size = self._scratch if lse is None else self._lse_at
        scratch = torch.empty(size, dtype=torch.uint8, device=self._device) if size else None
        base = 0 if scratch is None else scratch.data_ptr()
        pointers = (
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(),
            base + self._lse_at if lse is None else lse.data_ptr(),
            base + self._out_at, base,
        )  # fmt: skip
        if torch.cuda.current_device() == self._index:
            self._launch(pointers)
        else:
            with torch.cuda.device(self._index):
                self._launch(pointers)

    def _launch(self, pointers: tuple[int, ...]) -> None:
        stream = self._current_stream(self._index)
        for run, first, rest in self._launches:
            run(*pointers[first:], *rest, stream=stream)


def unbound(program: Program, sm_scale: float, lse_scale: float) -> Call:
    """A call for tensors of any form, which settles everything anew."""

    def call(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        if lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        program(q, k_cache, v_cache, out, lse, sm_scale, lse_scale)

    return call


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
