"""Finding sharing: compares page ids to find requests with a common prefix.

Engines with a radix cache give such requests the same pages, but do not report it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from treegen.backends.devices import backend_for, on_device
from treegen.backends.kept_tensors import for_kept_tensors
from treegen.backends.page_table import PageTable
from treegen.ir.arrays import INT32_MAX, Ints

ROWS, BLOCK = 1024, 1024
"""The most rows and pages that a thread block compares at a time."""


class Sharing(NamedTuple):
    """The common prefixes of a batch, as int32 arrays with an entry for each row of the batch.

    shared_with, shared_tokens: the arguments of Tree.from_requests. Each row shares whole pages with an earlier row.
    lengths: the engine's lengths. A row with an impossible length shares nothing.
    """

    shared_with: Ints
    shared_tokens: Ints
    lengths: Ints


class SharingReader:
    """Finds common prefixes on the device, and copies them to the host, without waiting for either.

        reader = SharingReader(pages, page_size=16)
        reader.start()                  # two kernels and a copy on the current stream
        if reader.ready():              # in a later step
            sharing = reader.result()

    The result is exact for the page table at the time when the stream reached it: for each row, the longest common
    prefix with any earlier row, in whole pages, before the first impossible page id. The cost grows with the number of
    pages, and with the square of the number of rows.

    Args:
        pages: The engine's page table.
        page_size: Tokens of a page.
        most_tokens: The most tokens of a request; longer requests share nothing.
        backend: "triton" or "torch"; by default what the page table's device can run.
    """

    @for_kept_tensors()
    def __init__(
        self, pages: PageTable, page_size: int, most_tokens: int = INT32_MAX, backend: str | None = None
    ) -> None:
        self._pages, self._page_size, self._most_tokens = pages, page_size, most_tokens
        self._backend = backend_for(pages.table.device, backend)
        self._event: Any = None  # torch.cuda.Event, which has no types
        self._rows = 0
        rows, device = len(pages.seq_lens), pages.table.device
        on_gpu = device.type == "cuda"
        self._result = torch.empty((3, rows), dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        if self._backend == "triton":
            entries = len(pages.table) if pages.indptr is not None else rows * pages.table.shape[1]
            self._hashes = torch.empty(entries, dtype=torch.int32, device=device)
            self._whole = torch.empty(rows, dtype=torch.int32, device=device)
            self._found = torch.empty((3, rows), dtype=torch.int32, device=device) if on_gpu else self._result

    def start(self, rows: int | None = None) -> None:
        """Starts to compare the first `rows` rows of the batch, by default all. Earlier results are lost."""
        self._rows = len(self._pages.seq_lens) if rows is None else rows
        if self._backend != "triton":
            found = _found_on_host(self._pages, self._rows, self._page_size, self._most_tokens)
            for part, values in zip(self._result.numpy(), found, strict=True):
                part[: self._rows] = values
            return
        if not self._rows:
            return
        device = self._pages.table.device
        with on_device(device):
            self._launch(self._rows)
            if device.type == "cuda":
                self._result.copy_(self._found, non_blocking=True)
                if self._event is None:
                    self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()

    def ready(self) -> bool:
        """Says whether the last start has finished, without waiting."""
        return self._event is None or bool(self._event.query())

    def result(self) -> Sharing:
        """Returns the result of the last start, and waits for it if necessary."""
        if self._event is not None:
            self._event.synchronize()
        return Sharing(*self._result[:, : self._rows].numpy().copy())

    def _launch(self, rows: int) -> None:
        from treegen.backends import sharing_kernels

        pages, page_size = self._pages, self._page_size
        table, named, indptr, batch = pages.table, pages.table_rows, pages.indptr, len(pages.seq_lens)
        stride, width = 0 if indptr is not None else table.stride(0), table.shape[-1]
        addressed = (
            pages.seq_lens if named is None else named,
            table,
            table if indptr is None else indptr,
            self._hashes,
            self._whole,
            self._found,
        )
        kinds = (named is not None, indptr is not None)
        block = min(max(32, _power(self._hashes.numel() // batch)), 4 * BLOCK)
        sharing_kernels.hash_pages[(rows,)](
            pages.seq_lens, *addressed, batch, stride, width, pages.num_pages, self._most_tokens,
            page_size, block, *kinds, num_warps=4,
        )  # fmt: skip
        most = min(max(32, _power(batch)), ROWS)
        sharing_kernels.find_shared[(rows,)](
            *addressed, batch, stride, width, page_size, most, min(block, BLOCK), *kinds,
            num_warps=8 if most > 512 else 4,
        )  # fmt: skip


def _power(count: int) -> int:
    """Returns the next power of two."""
    return 1 << max(count - 1, 0).bit_length()


def _found_on_host(pages: PageTable, rows: int, page_size: int, most_tokens: int) -> Sharing:
    """Finds the same as sharing_kernels, with a dictionary of all prefixes. Waits for the device."""
    lengths, of_rows = pages.lengths()[:rows], pages.of_rows()
    shared_with, shared_tokens = np.full(rows, -1, np.int32), np.zeros(rows, np.int32)
    nodes: dict[tuple[int, int], tuple[int, int]] = {}  # (node before, page): (node, its first row)
    for row, length in enumerate(lengths.tolist()):
        own, node = of_rows[row], 0
        if not 0 <= length <= min(most_tokens, len(own) * page_size):
            continue
        for depth, page in enumerate(own[: length // page_size].tolist(), 1):
            if not 0 <= page < pages.num_pages:
                break
            node, first = nodes.setdefault((node, page), (len(nodes) + 1, row))
            if first < row:
                shared_with[row], shared_tokens[row] = first, depth * page_size
    return Sharing(shared_with, shared_tokens, lengths)
