"""Page buffers: fixed memory into which each step copies its page table in FlashInfer's form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from treegen.backends.devices import on_device
from treegen.backends.kept_tensors import for_kept_tensors
from treegen.backends.staging import staging_for
from treegen.ir.arrays import int32_array
from treegen.ir.errors import InputError

_BLOCK = 1024


class PageBuffers(NamedTuple):
    """The int32 tensors of a page table on one device, and of the lengths that follow from it."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def rows(self) -> int:
        """The number of requests that the buffers hold."""
        return len(self.last_page_len)

    @property
    def pages(self) -> int:
        """The number of pages, of all requests, that the buffers hold."""
        return len(self.indices)

    @classmethod
    @for_kept_tensors()
    def of_tensors(cls, given: tuple[torch.Tensor | None, ...]) -> PageBuffers | None:
        """Takes the caller's indptr, indices and last_page_len as buffers.

        Returns None unless they are contiguous int32 tensors on one device.
        """
        indptr, indices, last_page_len = (tensor for tensor in given if tensor is not None)
        tensors = indptr, indices, last_page_len
        fits = all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in tensors)
        fits = fits and len({tensor.device for tensor in tensors}) == 1
        return cls(*tensors, torch.zeros_like(last_page_len)) if fits else None

    @classmethod
    @for_kept_tensors()
    def of(cls, rows: int, pages: int, device: torch.device) -> PageBuffers:
        """Allocates buffers for `rows` requests of `pages` pages in all."""
        return cls(*(torch.zeros(count, dtype=torch.int32, device=device) for count in (rows + 1, pages, rows, rows)))

    def take(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int, backend: str
    ) -> None:
        """Copies a page table to the buffers on the current stream, and computes lengths.

        On the triton backend this is one launch for tensors on the buffers' device. Values are not checked.
        """
        given = indptr, indices, last_page_len
        if backend == "triton" and all(part.device == self.indices.device and part.is_contiguous() for part in given):
            self._launch(*given, page_size)
            return
        rows = len(last_page_len)
        ends, last, lengths = self.indptr[: rows + 1], self.last_page_len[:rows], self.seq_lens[:rows]
        for part, buffer in zip(given, (ends, self.indices, last), strict=True):
            _copy(part, buffer)
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


def tensors_of(indptr: Any, indices: Any, last_page_len: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a page table as tensors. Raises InputError for other numbers than integers in lists and arrays."""
    return (
        _tensor("kv_indptr", indptr), _tensor("kv_indices", indices), _tensor("kv_last_page_len", last_page_len),
    )  # fmt: skip


def _tensor(name: str, part: Any) -> torch.Tensor:
    if isinstance(part, torch.Tensor):
        return part
    return torch.from_numpy(int32_array(name, part, low=-(2**31), error=InputError).copy())


def _copy(part: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copies integers to the beginning of a buffer on the current stream, without waiting.

    The caller may change them at once.
    """
    if part.device.type == "cpu" and buffer.device.type == "cuda":
        part = staging_for(part, buffer.device).copy_(part)
    if len(part):
        buffer[: len(part)].copy_(part, non_blocking=True)
