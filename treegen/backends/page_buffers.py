"""Buffers that page tables in FlashInfer's form are brought into, step by step, without waiting for the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from treegen.backends.triton_program import on_device
from treegen.ir.arrays import int32_array
from treegen.ir.errors import InputError

_BLOCK = 1024


class PageBuffers(NamedTuple):
    """Tensors for a page table, int32 on one device, and for the lengths that follow from it."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def rows(self) -> int:
        """Requests that there is room for."""
        return len(self.last_page_len)

    @property
    def pages(self) -> int:
        """Pages of all requests that there is room for."""
        return len(self.indices)

    @classmethod
    def of_tensors(cls, given: tuple[torch.Tensor | None, ...]) -> PageBuffers | None:
        """Buffers in the caller's indptr, indices and last_page_len; None where these are not flat int32 tensors on one
        device, without gaps.
        """
        indptr, indices, last_page_len = (tensor for tensor in given if tensor is not None)
        tensors = indptr, indices, last_page_len
        fits = all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in tensors)
        fits = fits and len({tensor.device for tensor in tensors}) == 1
        return cls(*tensors, torch.zeros_like(last_page_len)) if fits else None

    @classmethod
    def of(cls, rows: int, pages: int, device: torch.device) -> PageBuffers:
        """Buffers for so many requests and pages."""
        return cls(*(torch.zeros(count, dtype=torch.int32, device=device) for count in (rows + 1, pages, rows, rows)))

    def take(self, indptr: Any, indices: Any, last_page_len: Any, page_size: int, backend: str) -> None:
        """Brings a page table that there is room for here, on the current stream, and computes lengths: one launch for
        tensors on the device, on the triton backend. Values are not checked.
        """
        given = indptr, indices, last_page_len
        if backend == "triton" and all(
            isinstance(part, torch.Tensor) and part.device == self.indices.device and part.is_contiguous()
            for part in given
        ):
            self._launch(*given, page_size)
            return
        rows = len(last_page_len)
        ends, last, lengths = self.indptr[: rows + 1], self.last_page_len[:rows], self.seq_lens[:rows]
        _copy("kv_indptr", indptr, ends)
        _copy("kv_indices", indices, self.indices)
        _copy("kv_last_page_len", last_page_len, last)
        torch.sub(ends[1:], ends[:-1], out=lengths)
        torch.add(last, lengths, alpha=page_size, out=lengths)
        lengths.sub_(page_size).clamp_(min=0)

    def _launch(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> None:
        from treegen.backends import table_kernels

        rows, pages = len(last_page_len), len(indices)
        programs = max(rows // _BLOCK + 1, -(-pages // _BLOCK))
        with on_device(self.indices.device):
            table_kernels.take_table[(programs,)](
                indptr, indices, last_page_len, *self[:4], rows, pages, page_size, _BLOCK, num_warps=4
            )


def _copy(name: str, part: Any, buffer: torch.Tensor) -> None:
    """Copies integers to the begin of a buffer on the current stream; waits for nothing."""
    if not isinstance(part, torch.Tensor):
        part = torch.from_numpy(int32_array(name, part, low=-(2**31), error=InputError).copy())
    if part.device.type == "cpu" and buffer.device.type == "cuda":
        part = part.pin_memory()
    if len(part):
        buffer[: len(part)].copy_(part, non_blocking=True)
