"""Page tables of batches by request as callers give them: their sizes, and which request is in each row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from treegen.ir.errors import InputError

_DTYPES = (torch.int32, torch.int64)


def table_sizes(indptr: Any, indices: Any, last_page_len: Any) -> tuple[int, int]:
    """Returns the requests and the pages of a page table in FlashInfer's form. Raises InputError."""
    rows, pages = _count("kv_indptr", indptr) - 1, _count("kv_indices", indices)
    if rows < 0:
        raise InputError("kv_indptr", "no entries", "has no first offset", "give one entry more than requests")
    if (last := _count("kv_last_page_len", last_page_len)) != rows:
        reason = f"do not match {rows} requests of kv_indptr"
        raise InputError("kv_last_page_len", f"{last} entries", reason, "give one entry per request")
    return rows, pages


def request_names(ids: Sequence[Hashable | None] | None, rows: int, known: Sequence[Hashable]) -> Sequence[Hashable]:
    """Returns a distinct name for the request in each row.

    ids: the caller's; None for row numbers. A row whose id is None gets a name of its own. known: the names of the plan
    before, which are returned where they have not changed. Raises InputError.
    """
    if ids is None:
        return range(rows)
    if getattr(ids, "is_cuda", False):
        raise InputError("request_ids", "a tensor on a GPU", "is not on the host", "give a list")
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    if not hasattr(listed, "__iter__") or isinstance(listed, str):
        raise InputError("request_ids", ids, "is no list of ids", "give one id per request, or None")
    given: list[Hashable | None] = list(listed)
    if len(given) != rows:
        reason = f"does not match {rows} requests"
        raise InputError("request_ids", f"{len(given)} ids", reason, "give one id per request")
    if given == known:
        return known
    names: list[Hashable] = [(_Unnamed, row) if name is None else name for row, name in enumerate(given)]
    try:
        distinct = len(set(names)) == rows
    except TypeError as cause:
        raise InputError("request_ids", "an id", "cannot be hashed", "give integers or strings") from cause
    if not distinct:
        fix = "give each request one row, and None to rows without a request"
        raise InputError("request_ids", given, "names a request twice", fix)
    return names


def _count(name: str, part: Any) -> int:
    """Counts the entries of a flat list, array or tensor of integers."""
    if isinstance(part, torch.Tensor):
        if part.dim() != 1 or part.dtype not in _DTYPES:
            found = f"{part.dim()} dimensions of {part.dtype}"
            raise InputError(name, found, "is not a flat tensor of int32", "give FlashInfer's page table")
        return len(part)
    try:
        return len(part)
    except TypeError as cause:
        raise InputError(name, type(part).__name__, "is not an array", "give FlashInfer's page table") from cause


class _Unnamed:
    """Stands for rows without a request in the names of requests."""
