"""Page tables of engines: the pages and lengths of all requests, in the three forms that engines use."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from treegen.ir.arrays import INT32_MAX
from treegen.ir.errors import InputError
from treegen.ir.scalars import plain_number

PAGE_SIZES = tuple(1 << power for power in range(8))
"""Page sizes, in tokens, that kernels for running batches serve."""
_OPTIONAL = ("table_rows", "indptr", "qo_indptr")


@dataclass(frozen=True, eq=False)
class PageTable:
    """An engine's page table and lengths, on the device. Kernels read both in every step; nothing is copied.

        block table    table      [ 7 3 9 - ]     row 0: 40 tokens in pages 7, 3, 9 of 16 tokens
                                  [ 7 5 - - ]     row 1: 20 tokens in pages 7, 5
        ragged         table      [ 7 3 9 | 7 5 ]
                       indptr     [ 0     | 3   | 5 ]
                       seq_lens   [ 40    | 20  ]

    Entries after a request's last page may hold anything.

    Args:
        table: int32 page ids: a block table `[rows, width]`, or ragged `[entries]` with `indptr`. With pages of one
            token these are KV slots.
        seq_lens: int32 `[batch]`, the tokens of the request in each row of the batch.
        num_pages: Pages of the cache. Kernels never follow ids outside of `0..num_pages - 1`.
        table_rows: int32 `[batch]`, the row of the block table for each row of the batch; by default the same row.
            Kernels do not check that those of running requests are rows of the table.
        indptr: int32 `[batch + 1]`, the offset of each row's page ids in a ragged table.
        qo_indptr: int32 `[batch + 1]`, the offset of each row's query rows in q, for requests of several query rows; by
            default each request has one query row, the row of the batch.

    Raises:
        InputError: A tensor is not int32, not contiguous or on another device, or the sizes do not fit one another.
    """

    table: torch.Tensor
    seq_lens: torch.Tensor
    num_pages: int
    table_rows: torch.Tensor | None = None
    indptr: torch.Tensor | None = None
    qo_indptr: torch.Tensor | None = None

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "num_pages"}
        for name, tensor in given.items():
            if tensor is None and name in _OPTIONAL:
                continue
            if not isinstance(tensor, torch.Tensor):
                raise InputError(name, type(tensor).__name__, "is not a tensor", "give an int32 tensor on the device")
            if tensor.is_meta:
                raise InputError(name, "a meta tensor", "has a shape and no values", "allocate it on the device")
            if tensor.dtype != torch.int32:
                raise InputError(name, tensor.dtype, "is not int32", "keep the engine's tables in int32")
            if tensor.device != self.table.device:
                raise InputError(name, tensor.device, f"is not on the table's device {self.table.device}", "move it")
            dims = 2 if name == "table" and self.indptr is None else 1
            if tensor.dim() != dims:
                of_indptr = dict.fromkeys(("indptr", "qo_indptr"), "[batch + 1]")
                form = {"table": "[rows, width], or [entries] with indptr", **of_indptr}.get(name, "[batch]")
                raise InputError(name, f"shape {tuple(tensor.shape)}", f"has {tensor.dim()} dimensions", f"give {form}")
            if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
                fix = f"call {name}.contiguous() once, and write to that"
                raise InputError(name, f"strides {tensor.stride()}", "is not contiguous", fix)
        batch = len(self.seq_lens)
        if not batch:
            raise InputError(
                "seq_lens", "0 entries", "leaves no room for requests", "give one for each row of the batch"
            )
        for name, expected in (("table_rows", batch), ("indptr", batch + 1), ("qo_indptr", batch + 1)):
            tensor = given[name]
            if tensor is not None and len(tensor) != expected:
                raise InputError(
                    name, f"{len(tensor)} entries", f"does not go with {batch} lengths", f"give {expected}"
                )
        if self.table_rows is not None and self.indptr is not None:
            raise InputError("table_rows", "a tensor", "does not go with indptr", "give one of them")
        if self.indptr is None and self.table_rows is None and len(self.table) < batch:
            raise InputError("table", f"{len(self.table)} rows", f"is less than {batch} lengths", "give a row for each")
        object.__setattr__(self, "num_pages", plain_number(self.num_pages))
        if type(self.num_pages) is not int or not 1 <= self.num_pages <= INT32_MAX:
            raise InputError("num_pages", self.num_pages, "is not a number of pages", "give those of the cache")

    def lengths(self) -> npt.NDArray[np.int32]:
        """Copies the lengths to the host, and waits for the device."""
        lengths: npt.NDArray[np.int32] = self.seq_lens.cpu().numpy()
        return lengths

    def queries(self) -> npt.NDArray[np.int32] | None:
        """Copies qo_indptr to the host, and waits for the device."""
        return None if self.qo_indptr is None else self.qo_indptr.cpu().numpy()

    def of_rows(self) -> list[npt.NDArray[np.int32]]:
        """Copies the page ids of each row of the batch to the host, and waits for the device.

        A row of a block table has all entries of the table's row. A row that table_rows or indptr places outside of the
        table, as they may for rows without a request, has none.
        """
        table = self.table.cpu().numpy()
        if self.indptr is not None:
            ends = self.indptr.cpu().numpy().tolist()
            return [table[begin if 0 <= begin <= end <= len(table) else end : end] for begin, end in pairwise(ends)]
        rows = range(len(self.seq_lens)) if self.table_rows is None else self.table_rows.cpu().numpy().tolist()
        return [table[row] if 0 <= row < len(table) else table[:0].ravel() for row in rows]
