"""HostCopy: a tensor on its way from the device to the host."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy of a tensor to the host, that is waited for when it is read.

    Args:
        tensor: The tensor, which is not written again before the copy is read.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy, self._done = tensor, None
        if tensor.device.type == "cuda":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> torch.Tensor:
        """Waits for the copy, and returns it."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy
