"""Page tables of serving engines, which become trees: requests that begin with the same pages share them.

Requests are sorted by their pages, so that requests with a common prefix are neighbours. A request branches off where
it differs from the one before it; the rest of its pages are its own.

    pages, sorted   shared with the one before   own pages   nodes
    7 5             -                            7 5         node 0: 7, and node 1: 5, cut for the next request
    7 9 4           1 page                       9 4         node 2: 9 4, below node 0
    7 9 4 8         3 pages                      8           node 3: 8, below node 2
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import (
    INT32_MAX,
    Ints,
    IntsLike,
    Longs,
    frozen,
    host_array,
    int32_array,
    largest,
    number,
    offsets,
    positive_int,
    ramp,
    whole_numbers,
)
from treegen.ir.errors import TreeError
from treegen.ir.tree.kv import KVRuns
from treegen.ir.tree.page_order import in_order_of_pages
from treegen.ir.tree.topology import Ranks


class TreeParts(NamedTuple):
    """The parts of a tree, as in Tree."""

    parent: Ints
    tokens: Ints
    row_node: Ints
    row_sees: Ints
    kv: KVRuns


Sorted: TypeAlias = tuple[TreeParts, Ranks]
"""A tree whose nodes are in depth-first order, and its ranks."""


def from_page_table(kv_indptr: IntsLike, kv_indices: IntsLike, kv_last_page_len: IntsLike, page_size: int) -> Sorted:
    """See Tree.from_page_table."""
    page_size = positive_int("page_size", page_size, TreeError)
    indptr = int32_array("kv_indptr", kv_indptr, low=0, copy=False)
    indices = int32_array("kv_indices", kv_indices, low=0, high=last_page(page_size), copy=False)
    last = int32_array("kv_last_page_len", kv_last_page_len, low=0, high=page_size, copy=False)
    ends = indptr.astype(np.int64)
    begin = ends[:-1]
    pages = ends[1:] - begin
    check_table(indptr, pages, indices, last)
    return tree_parts(begin, pages, indices, last, page_size)


def from_block_table(block_table: npt.ArrayLike, seq_lens: IntsLike, page_size: int) -> Sorted:
    """See Tree.from_block_table."""
    page_size = positive_int("page_size", page_size, TreeError)
    lengths = int32_array("seq_lens", seq_lens, low=0, copy=False).astype(np.int64)
    table = host_array("block_table", block_table)
    if table.size == 0 and table.ndim < 2:
        table = np.empty((len(lengths), 0), np.int32)
    if table.ndim != 2:
        raise TreeError("block_table", f"shape {table.shape}", "is not a table", "give [requests, blocks] page ids")
    table = whole_numbers("block_table", block_table, table)
    if len(table) != len(lengths):
        raise TreeError("seq_lens", f"{len(lengths)} entries", f"does not match {len(table)} requests", "give one each")
    counts = -(-lengths // page_size)
    if len(counts) and largest(counts) > table.shape[1]:
        request = int(counts.argmax())
        reason = f"needs {counts[request]} pages, the table has room for {table.shape[1]}"
        raise TreeError(f"seq_lens[{request}]", int(lengths[request]), reason, "correct the length or the page size")
    width = table.shape[1]
    everything = np.count_nonzero(counts == width) == len(counts)
    used = table.reshape(-1) if everything else table[np.arange(width) < counts[:, None]]
    last = lengths - (counts - 1) * page_size  # of requests without pages it is not read
    indices = int32_array("block_table's pages", used, low=0, high=last_page(page_size), copy=False)
    return tree_parts(offsets(counts)[:-1], counts, indices, last, page_size)


def last_page(page_size: int) -> int:
    """The highest page id whose slots are all below 2^31 - 1."""
    return INT32_MAX // page_size - 1


def check_table(indptr: Ints, pages: Longs, indices: Ints, last: Ints) -> None:
    """Raises TreeError unless these are a page table in FlashInfer's form. pages: the pages of each request."""
    if len(indptr) == 0 or indptr[0] != 0 or indptr[-1] != len(indices):
        found = f"{indptr[:1].tolist()} to {indptr[-1:].tolist()}"
        raise TreeError("kv_indptr", found, f"does not run from 0 to {len(indices)} pages", "give offsets of requests")
    if len(pages) and pages.item(pages.argmin()) < 0:
        request = int((pages < 0).argmax())
        raise TreeError(f"kv_indptr[{request + 1}]", int(indptr[request + 1]), "falls", "give ascending offsets")
    if len(last) != len(pages):
        reason = f"does not match {len(pages)} requests"
        raise TreeError("kv_last_page_len", f"{len(last)} entries", reason, "give one per request")
    if np.count_nonzero(last) < len(last) and len(wrong := np.flatnonzero((pages > 0) & (last == 0))):
        raise TreeError(f"kv_last_page_len[{wrong[0]}]", 0, "leaves a request's last page empty", "drop that page")


def tree_parts(begin: Longs, pages: Longs, indices: Ints, last: Ints | Longs, page_size: int) -> Sorted:
    """Returns the tree of a page table that was checked, in which each shared prefix is stored once, and its ranks.

    begin: where each request's pages begin in `indices`. pages: their number.
    """
    if np.count_nonzero(pages) == len(pages) > 0:
        return _tree_of_filled(begin, pages, indices, last, page_size)
    filled = np.flatnonzero(pages)
    root, row_node, row_sees = np.zeros(1, np.int64), np.zeros(len(pages), np.int64), np.zeros(len(pages), np.int64)
    if not len(filled):
        parts = TreeParts(frozen(root - 1), frozen(root), frozen(row_node), frozen(row_sees), KVRuns.contiguous(root))
        return parts, Ranks(frozen(np.array([0, len(pages)])), frozen(np.arange(len(pages))), True)
    parts, ranks = _tree_of_filled(begin[filled], pages[filled], indices, last[filled], page_size)
    row_node[:] = len(parts.parent)
    row_node[filled], row_sees[filled] = parts.row_node, parts.row_sees
    parts = TreeParts(
        frozen(np.append(parts.parent, -1)),
        frozen(np.append(parts.tokens, 0)),
        frozen(row_node),
        frozen(row_sees),
        KVRuns(frozen(np.append(parts.kv.indptr, parts.kv.indptr[-1])), parts.kv.start, parts.kv.length),
    )
    row = np.concatenate([filled[ranks.row], np.flatnonzero(pages == 0)])
    return parts, Ranks(frozen(np.append(ranks.first, len(pages))), frozen(row), ranks.whole)


def _tree_of_filled(begin: Longs, pages: Longs, indices: Ints, last: Ints | Longs, page_size: int) -> Sorted:
    """Returns the tree of requests that all have pages: `pages` of them from `begin` on in `indices`."""
    request, shared = in_order_of_pages(begin, pages, indices)
    begin, pages = begin[request], pages[request]
    distinct = pages > shared
    alike = np.count_nonzero(distinct) < len(distinct)
    if alike:
        begin, pages, shared = begin[distinct], pages[distinct], shared[distinct]
    parent, owner, depth, last_node = _nodes(pages, shared)
    own = pages - shared
    before = offsets(own)[:-1] - shared  # where a request's pages would begin among all own pages, with shared ones
    ends = np.zeros(len(parent) + 1, np.int64)
    np.add(before[owner], depth, out=ends[1:])
    place = (begin - before).repeat(own)
    place += ramp(len(place))
    paged = indices.take(place)
    tokens = (ends[1:] - ends[:-1]) * number(page_size)
    # Requests of the same pages as the one before end where it does.
    row_last = last_node[np.cumsum(distinct) - 1] if alike else last_node
    sees, missing, whole = tokens[row_last], None, True
    if np.count_nonzero(last == page_size) < len(last):
        sees -= page_size - last[request]
        if alike:
            order = np.lexsort((sees, row_last))
            request, sees = request[order], sees[order]
        # Leaves are as long as the longest of their rows; inner nodes, which later requests go on from, are full.
        leaf = np.append(parent[last_node[:-1] + 1] != last_node[:-1], True)
        longest = np.maximum.reduceat(sees, distinct.nonzero()[0]) if alike else sees
        full, tokens = tokens, tokens.copy()
        tokens[last_node[leaf]] = longest[leaf]
        missing, whole = full - tokens, np.count_nonzero(sees == tokens[row_last]) == len(sees)
    if len(indices) * page_size > INT32_MAX and int(tokens.sum()) > INT32_MAX:
        raise TreeError("kv_indices", int(tokens.sum()), "total exceeds 2^31 - 1 tokens", "split the batch")
    row_node, row_sees = np.empty(len(request), np.int64), np.empty(len(request), np.int64)
    row_node[request], row_sees[request] = row_last, sees
    kv = KVRuns.of_pages(paged, page_size, ends, missing)
    first = np.empty(len(parent) + 1, np.int32)
    first[:-1], first[-1] = distinct.nonzero()[0][owner] if alike else owner, len(request)
    parts = TreeParts(frozen(parent), frozen(tokens), frozen(row_node), frozen(row_sees), kv)
    return parts, Ranks(frozen(first), frozen(request), whole)


def _nodes(pages: Longs, shared: Longs) -> tuple[Longs, Longs, Longs, Longs]:
    """Returns the nodes of sorted requests, in depth-first order.

    A node is a part of the pages that a request does not share with the one before it, cut where later requests branch
    off.

    Args:
        pages: The pages of each request.
        shared: The pages that it shares with the request before it, fewer than `pages`.

    Returns:
        The parent of each node; the request whose own pages it holds; the number of this request's pages up to its end;
        and the last node of each request.
    """
    # Neighbours that share the same number of pages, `depth`, are a run. They branch off at the same place: after
    # `depth` pages of the nearest earlier request that shares less with its own predecessor. That request ends an
    # earlier run, which pointer doubling finds.
    changes = (shared[1:] != shared[:-1]).nonzero()[0]
    if len(changes) == 1 and changes[0] == 0 and shared[1] < pages[0]:
        return _nodes_below_one(pages, shared.item(1))
    bounds = np.zeros(len(changes) + 2, np.int64)
    np.add(changes, 1, out=bounds[1:-1])
    bounds[-1] = len(shared)
    begin, behind = bounds[:-1], bounds[1:]
    depth, before = shared[begin], np.arange(-1, len(changes))
    before[0] = 0
    if len(changes) > 1:
        least = np.maximum(depth, 1)
        far = (depth[before] >= least).nonzero()[0]
        while len(far):
            before[far] = before[before[far]]
            far = far[depth[before[far]] >= least[far]]
    owner = behind[before] - 1

    # A key is a place to branch off: a request, and a number of its pages.
    bits = largest(pages).bit_length()
    keys = (owner << bits) + depth
    cuts = keys[(depth > 0) & (depth < pages[owner])]
    if len(cuts) > 1:
        cuts.sort()
        cuts = cuts[np.append(True, cuts[1:] != cuts[:-1])]
    cut = cuts >> bits
    sizes = np.bincount(cut, minlength=len(pages)) + 1
    owners, first = ramp(len(pages)).repeat(sizes), offsets(sizes)
    end, parent = pages[owners], np.arange(-1, len(owners) - 1)
    end[cut + ramp(len(cut))] = cuts & ((1 << bits) - 1)
    above = owner + cuts.searchsorted(keys)
    above[depth == 0] = -1
    parent[first[:-1]] = above.repeat(behind - begin)
    return parent, owners, end, first[1:] - 1


def _nodes_below_one(pages: Longs, depth: int) -> tuple[Longs, Longs, Longs, Longs]:
    """Returns the nodes, as `_nodes`, of requests with one common prefix of `depth` pages, which most batches have."""
    parent, owner, end = np.zeros((3, len(pages) + 1), np.int64)
    parent[0], end[0] = -1, depth
    owner[1:], end[1:] = ramp(len(pages)), pages
    return parent, owner, end, ramp(len(end))[1:]
