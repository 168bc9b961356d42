"""Bound calls: a program for tensors of one form, with everything settled that does not change from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from treegen.ir.shape import Shape

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
_FP32_BYTES = 4
_FLAG_BYTES = 8


class Scratch(NamedTuple):
    """Where a call has its part_lse (at 0), part_out, flags and lse in one piece of memory, in bytes, and the size of
    all.

    Partial results come first, so that calls with an lse of their own need no more than `lse_at`.
    """

    out_at: int
    flags_at: int
    lse_at: int
    size: int

    @classmethod
    def of(cls, slots: int, rows: int, shape: Shape, flags: int = 0) -> Scratch:
        """Room for so many slots of partial results, flags, and the lse of so many rows."""
        of_lse = _FP32_BYTES * shape.num_qo_heads
        out_at = _aligned(slots * of_lse)
        flags_at = out_at + _aligned(slots * (shape.partial_bytes - of_lse))
        lse_at = flags_at + _aligned(flags * _FLAG_BYTES)
        return cls(out_at, flags_at, lse_at, lse_at + rows * of_lse)


class BoundLaunch(NamedTuple):
    """A compiled kernel on its grid. taken: which tensors of a call it takes pointers to, in the order of
    kernel_signature.Tensors. rest: its arguments behind these pointers.
    """

    run: Callable[..., None]
    taken: slice
    rest: tuple[Any, ...]


class BoundCall:
    """Launches that need nothing but pointers.

    Every call allocates its scratch memory, so that streams may overlap, unless there is a workspace for all of them.
    owner: what the pointers within `launches` belong to.
    """

    __slots__ = ("_current_stream", "_device", "_index", "_launches", "_owner", "_scratch", "_workspace")

    def __init__(
        self,
        launches: tuple[BoundLaunch, ...],
        owner: object,
        device: torch.device,
        current_stream: Callable[[int], int],
        scratch: Scratch,
        workspace: torch.Tensor | None = None,
    ) -> None:
        self._launches, self._owner = launches, owner
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._current_stream = current_stream
        self._scratch, self._workspace = scratch, workspace

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """See Call."""
        out_at, flags_at, lse_at, size = self._scratch
        workspace = self._workspace
        if workspace is None and (needed := size if lse is None else lse_at):
            workspace = torch.empty(needed, dtype=torch.uint8, device=self._device)
        base = 0 if workspace is None else workspace.data_ptr()
        pointers = (  # in the order of kernel_signature.Tensors
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(),
            base + lse_at if lse is None else lse.data_ptr(),
            base + out_at, base, base + flags_at,
        )  # fmt: skip
        if torch.cuda.current_device() == self._index:
            self._launch(pointers)
        else:
            with torch.cuda.device(self._index):
                self._launch(pointers)

    def _launch(self, pointers: tuple[int, ...]) -> None:
        stream = self._current_stream(self._index)
        for run, taken, rest in self._launches:
            run(*pointers[taken], *rest, stream=stream)


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
