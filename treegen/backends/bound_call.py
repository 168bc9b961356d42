"""Bound calls: launch a program for tensors of one form, with only pointers left to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from treegen.backends.scratch import Scratch

Call: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    None,
]
"""Takes q, k_cache, v_cache, out and lse; fills out, and lse unless it is None, on the current stream of the device."""

UnboundCall: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, float],
    None,
]
"""Takes q, k_cache, v_cache, out, lse, sm_scale and lse_scale; fills out and lse. TritonProgram and TorchProgram."""


class BoundLaunch(NamedTuple):
    """A compiled kernel on its grid.

    taken: the tensors of a call whose pointers it takes, as a slice of kernel_signature.Tensors. rest: its arguments
    after these pointers.
    """

    run: Callable[..., None]
    taken: slice
    rest: tuple[Any, ...]


class BoundCall:
    """The launches of a call, which need only pointers to its tensors.

    Each call allocates its scratch memory, so that calls on several streams may overlap, unless there is a workspace
    for all of them. owner: keeps the memory that `launches` point to alive.
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


def unbound(program: UnboundCall, sm_scale: float, lse_scale: float) -> Call:
    """Makes a call that runs the whole program each time, for tensors of any form, also under torch.autocast."""

    def call(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        if lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            program(q, k_cache, v_cache, out, lse, sm_scale, lse_scale)

    return call
