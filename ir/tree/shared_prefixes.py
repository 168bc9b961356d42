"""Prefixes that requests share, found in page tables on the host without reading all of their entries.

Where two requests have the same page at the same place, the pages before it are taken to be the same, too. So one page
says whether a prefix is shared, and a binary search finds where two requests part. Requests enter a trie in order. Its
edges are runs of pages, cut where a later request branches off. The first request with these pages owns the edge:

    request 0   7 3 9 4      7 3 ─┬─ 9 4      both edges are owned by request 0
    request 1   7 3 5 8 6         └─ 5 8 6    owned by request 1, which shares 2 pages with request 0
    request 2   7 3 5 8                       ends within the last edge: it shares 4 pages with request 1
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints, IntsLike, Longs, host_array, int32_array, largest, positive_int, ramp, whole_numbers
from treegen.ir.errors import TreeError

_ROOT = -1


class HostPages(NamedTuple):
    """The page ids of requests, in a table on the host.

    table: the page ids, `[rows, blocks]` with contiguous rows, or flat.
    begin: `[requests]`; the distance of each request's first page from the first entry of the table, in entries.
    length: `[requests]`; its tokens.
    """

    table: Ints
    begin: Longs
    length: Ints

    def rows(self) -> list[Ints]:
        """Returns for each request an array that begins with its pages."""
        if self.table.ndim == 2:
            return list(self.table[: len(self.length)])
        return [self.table[first:] for first in self.begin.tolist()]


def host_pages(
    block_table: npt.ArrayLike, seq_lens: IntsLike, page_size: int, kv_indptr: IntsLike | None = None
) -> HostPages:
    """Checks the arguments of `treegen.shared_prefixes`, and returns where the pages of each request are.

    Reads lengths and offsets alone, and copies only tables that are no int32 arrays with contiguous rows.
    """
    page_size = positive_int("page_size", page_size, TreeError)
    length = int32_array("seq_lens", seq_lens, low=0, copy=False).copy()  # so that nobody changes what was checked
    table = _table(block_table, (len(length), 0) if kv_indptr is None else (0,))
    if kv_indptr is None:
        if len(table) < len(length):
            reason = f"does not match {len(length)} lengths"
            raise TreeError("block_table", f"{len(table)} rows", reason, "give a row of page ids for each request")
        begin = ramp(len(length)) * (table.strides[0] // table.itemsize)
        if len(length) and largest(length) > table.shape[1] * page_size:
            raise _too_long(length, int(length.argmax()), page_size, table.shape[1])
    else:
        indptr = int32_array("kv_indptr", kv_indptr, low=0, copy=False).astype(np.int64)
        _check_offsets(indptr, len(length), len(table))
        begin = indptr[:-1]
        room = indptr[1:] - begin
        beyond = length > room * page_size
        if np.count_nonzero(beyond):
            request = int(beyond.argmax())
            raise _too_long(length, request, page_size, room.item(request))
    return HostPages(table, begin, length)


def _table(block_table: npt.ArrayLike, empty: tuple[int, ...]) -> Ints:
    """Returns the table as aligned int32 with contiguous rows. Raises TreeError if it is no table of integers.

    empty: the shape of a table without page ids, whose number of dimensions every table has.
    """
    table = host_array("block_table", block_table)
    if table.size == 0 and table.ndim < len(empty):
        return np.empty(empty, np.int32)
    if table.ndim != len(empty):
        reason = "is not a table" if table.ndim < len(empty) else "is not flat, but there is kv_indptr"
        fix = "give [requests, blocks] page ids, or flat ones with kv_indptr"
        raise TreeError("block_table", f"shape {table.shape}", reason, fix)
    if table.dtype == np.int32 and table.flags.aligned and table.strides[-1] == table.itemsize:
        return table
    if not (hasattr(block_table, "dtype") and table.dtype.kind in "iu"):  # the check would copy some arrays
        table = whole_numbers("block_table", block_table, table)
    return table.astype(np.int32, "C")


def _check_offsets(indptr: Longs, requests: int, pages: int) -> None:
    """Raises TreeError unless the offsets cut a table of flat page ids into a part for each request."""
    if len(indptr) != requests + 1:
        reason = f"does not match {requests} lengths"
        raise TreeError("kv_indptr", f"{len(indptr)} entries", reason, f"give {requests + 1} offsets")
    falls = indptr[1:] < indptr[:-1]
    if np.count_nonzero(falls):
        request = int(falls.argmax())
        raise TreeError(f"kv_indptr[{request + 1}]", int(indptr[request + 1]), "falls", "give ascending offsets")
    if indptr[-1] > pages:
        reason = f"is beyond the table of {pages} pages"
        raise TreeError(f"kv_indptr[{requests}]", int(indptr[-1]), reason, "give offsets of page ids in the table")


def _too_long(length: Ints, request: int, page_size: int, room: int) -> TreeError:
    """Returns the error for a request that needs more pages than the `room` in its row."""
    tokens = length.item(request)
    reason = f"needs {-(-tokens // page_size)} pages, its row has room for {room}"
    return TreeError(f"seq_lens[{request}]", tokens, reason, "correct the length or the page size")


def shared_pages(rows: list[Ints], pages: list[int]) -> tuple[list[int], list[int]]:
    """Returns for each request the first request with its longest shared prefix, -1 for none, and the prefix's pages.

    Args:
        rows: The page ids of each request; `item(place)` reads one.
        pages: How many of them count.
    """
    owner: list[int] = []  # of each edge, by the node below it; the edge has its pages first:end
    first: list[int] = []
    end: list[int] = []
    below: dict[tuple[int, int], int] = {}  # (node, page): the node below the edge that begins with this page
    found, shared = [-1] * len(rows), [0] * len(rows)

    def add(node: int, place: int, of: int, stop: int) -> int:
        """Adds an edge below this node, which begins at this place of a request, and returns the node below it."""
        below[node, rows[of].item(place)] = len(owner)
        owner.append(of)
        first.append(place)
        end.append(stop)
        return len(owner) - 1

    for request, (row, count) in enumerate(zip(rows, pages, strict=True)):
        node, depth = _ROOT, 0
        while depth < count:
            edge = below.get((node, row.item(depth)))
            if edge is None:
                add(node, depth, request, count)
                break
            of, last = owner[edge], min(end[edge], count)
            depth = _common(row, rows[of], first[edge], last)
            found[request], shared[request] = of, depth
            if depth < last:  # it branches off within the edge, which becomes two
                upper = add(node, first[edge], of, depth)
                first[edge], below[upper, rows[of].item(depth)] = depth, edge
                add(upper, depth, request, count)
                break
            node = edge
    return found, shared


def _common(row: Ints, other: Ints, first: int, last: int) -> int:
    """Returns the place from `first` to `last` where two requests part, which have the same page at `first`."""
    if row.item(last - 1) == other.item(last - 1):
        return last
    same, differs = first, last - 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if row.item(middle) == other.item(middle):
            same = middle
        else:
            differs = middle
    return differs
