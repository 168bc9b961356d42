"""Page tables, as serving engines keep them, become trees: requests that begin with the same pages share them.

Requests are sorted by their pages, so that those which share a prefix are neighbours; where a request stops agreeing
with the one before it, it branches off, and the rest of its pages are its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import (
    INT32_MAX,
    Ints,
    IntsLike,
    Longs,
    frozen,
    int32_array,
    offsets,
    positive_int,
    ragged_ranges,
)
from treegen.ir.errors import TreeError
from treegen.ir.kv import KVRuns

_WINDOW = 64


class TreeParts(NamedTuple):
    """What a tree is made of, in Tree's terms."""

    parent: Ints
    tokens: Ints
    row_node: Ints
    row_sees: Ints
    kv: KVRuns


class _Requests(NamedTuple):
    """Requests in the order of their pages: the caller's numbers, where their pages begin in the caller's list, how
    many they have, and how many they have in common with the request before.
    """

    number: Longs
    begin: Longs
    pages: Longs
    shared: Longs


def from_page_table(kv_indptr: IntsLike, kv_indices: IntsLike, kv_last_page_len: IntsLike, page_size: int) -> TreeParts:
    """See Tree.from_page_table."""
    positive_int("page_size", page_size, TreeError)
    indptr, indices, last = (
        int32_array(name, _on_host(name, values), low=0, high=high)
        for name, values, high in (
            ("kv_indptr", kv_indptr, INT32_MAX),
            ("kv_indices", kv_indices, (INT32_MAX + 1) // page_size - 1),
            ("kv_last_page_len", kv_last_page_len, page_size),
        )
    )
    _check_table(indptr, indices, last)
    return _tree_parts(indptr.astype(np.int64), indices.astype(np.int64), last.astype(np.int64), page_size)


def from_block_table(block_table: npt.ArrayLike, seq_lens: IntsLike, page_size: int) -> TreeParts:
    """See Tree.from_block_table."""
    positive_int("page_size", page_size, TreeError)
    lengths = int32_array("seq_lens", _on_host("seq_lens", seq_lens), low=0).astype(np.int64)
    table = np.asarray(_on_host("block_table", block_table))
    if table.size == 0 and table.ndim < 2:
        table = np.empty((len(lengths), 0), np.int32)
    if table.ndim != 2 or table.dtype.kind not in "iu":
        found = f"shape {table.shape} of {table.dtype}"
        raise TreeError("block_table", found, "is not a table of integers", "give [requests, blocks] page ids")
    if len(table) != len(lengths):
        raise TreeError("seq_lens", f"{len(lengths)} entries", f"does not match {len(table)} requests", "give one each")
    counts = -(-lengths // page_size)
    if counts.max(initial=0) > table.shape[1]:
        request = int(counts.argmax())
        reason = f"needs {counts[request]} pages, the table has room for {table.shape[1]}"
        raise TreeError(f"seq_lens[{request}]", int(lengths[request]), reason, "correct the length or the page size")
    used = table[np.arange(table.shape[1]) < counts[:, None]]
    last = np.where(lengths > 0, (lengths - 1) % page_size + 1, 0)
    indices = int32_array("block_table's pages", used, low=0, high=(INT32_MAX + 1) // page_size - 1)
    return _tree_parts(offsets(counts), indices.astype(np.int64), last, page_size)


def _on_host(argument: str, values: Any) -> Any:
    """Tensors as arrays; those of a GPU are refused, since fetching them would wait for it."""
    if getattr(values, "is_cuda", False):
        raise TreeError(
            argument, f"on {values.device}", "is not on the host", "pass its copy there, as engines keep one"
        )
    return values.numpy() if hasattr(values, "numpy") else values


def _check_table(indptr: Ints, indices: Ints, last: Ints) -> None:
    if len(indptr) == 0 or indptr[0] != 0 or indptr[-1] != len(indices):
        found = f"{indptr[:1].tolist()} to {indptr[-1:].tolist()}"
        raise TreeError("kv_indptr", found, f"does not run from 0 to {len(indices)} pages", "give offsets of requests")
    counts = np.diff(indptr)
    if (counts < 0).any():
        request = int((counts < 0).argmax())
        raise TreeError(f"kv_indptr[{request + 1}]", int(indptr[request + 1]), "falls", "give ascending offsets")
    if len(last) != len(counts):
        reason = f"does not match {len(counts)} requests"
        raise TreeError("kv_last_page_len", f"{len(last)} entries", reason, "give one per request")
    wrong = np.flatnonzero((counts > 0) & (last == 0))
    if len(wrong):
        raise TreeError(f"kv_last_page_len[{wrong[0]}]", 0, "leaves a request's last page empty", "drop that page")


def _tree_parts(indptr: Longs, indices: Longs, last: Longs, page_size: int) -> TreeParts:
    requests = _sorted(indptr, indices)
    number, begin, pages, shared = requests
    owner = _owners(shared)

    # A node is a piece of what a request does not share with the one before, cut where later requests branch off. Its
    # key says where it ends: after how many pages of which request.
    scale = int(pages.max(initial=0)) + 1
    branching = (shared > 0) & (shared < pages[owner])
    own = np.flatnonzero(pages > shared)
    keys = np.unique(np.concatenate([own * scale + pages[own], owner[branching] * scale + shared[branching]]))
    of_request, end = keys // scale, keys % scale
    first = np.append(True, of_request[1:] != of_request[:-1])[: len(keys)]
    start = np.where(first, shared[of_request], np.append(0, end[:-1])[: len(keys)])
    above = np.searchsorted(keys, owner[of_request] * scale + shared[of_request])
    parent = np.where(first, np.where(start > 0, above, -1), np.arange(len(keys)) - 1)

    # A request ends where its own last piece does, or, with nothing of its own, where it branches off. One without any
    # page is a row of an empty root.
    ending = np.where(pages > shared, np.arange(len(number)), owner)
    empty = pages == 0
    node = np.where(empty, len(keys), np.searchsorted(keys, ending * scale + pages))
    sees = np.where(empty, 0, (pages - np.append(start, 0)[node] - 1) * page_size + last[number])
    tokens = (end - start) * page_size
    leaf = np.ones(len(keys), bool)
    leaf[parent[parent >= 0]] = False
    longest = np.zeros(len(keys) + 1, np.int64)
    np.maximum.at(longest, node, sees)
    tokens[leaf] = longest[:-1][leaf]

    kv = KVRuns.of_pages(tokens, indices[ragged_ranges(begin[of_request] + start, end - start)], page_size)
    if empty.any() or not len(keys):
        parent, tokens = np.append(parent, -1), np.append(tokens, 0)
        kv = KVRuns(frozen(np.append(kv.indptr, kv.indptr[-1])), kv.start, kv.length)
    row_node, row_sees = np.empty((2, len(number)), np.int64)
    row_node[number], row_sees[number] = node, sees
    if int(tokens.sum()) > INT32_MAX:
        raise TreeError("kv_indices", int(tokens.sum()), "total exceeds 2^31 - 1 tokens", "split the batch")
    return TreeParts(frozen(parent), frozen(tokens), frozen(row_node), frozen(row_sees), kv)


def _sorted(indptr: Longs, indices: Longs) -> _Requests:
    """Requests in the order of their pages: a request before those that go on where it ends.

    Pages are compared in windows; only requests that agree with a neighbour in all of a window go on to the next.
    """
    pages = np.diff(indptr)
    number, shared = np.arange(len(pages)), np.zeros(len(pages), np.int64)
    place, group, depth = np.arange(len(pages)), np.zeros(len(pages), np.int64), 0
    while len(place):
        begin, left = indptr[number[place]] + depth, pages[number[place]] - depth
        columns = np.arange(min(_WINDOW, int(left.max())))
        window = np.zeros((len(place), 2 + len(columns)), ">u4")  # big-endian numbers compare as their bytes do
        window[:, 0] = group
        inside = columns < left[:, None]
        window[:, 1:-1][inside] = indices[(begin[:, None] + columns)[inside]] + 1
        window[:, -1] = left > len(columns)
        order = np.argsort(window.view(f"V{window.itemsize * window.shape[1]}")[:, 0], kind="stable")
        window, left, number[place] = window[order], left[order], number[place[order]]
        # What neighbours have in common: as much as they agree in, and no more than both have.
        equal = window[1:] == window[:-1]
        agreeing = np.where(equal.all(1), len(columns), equal.argmin(1) - 1)
        related = equal[:, 0]
        common = np.minimum(agreeing, np.minimum(left[1:], left[:-1]))
        shared[place[1:][related]] = depth + common[related]
        depth += len(columns)
        undecided = equal.all(1) & (left[1:] > len(columns))
        goes_on = np.append(undecided, False) | np.append(False, undecided)
        group = np.cumsum(~np.append(False, undecided))[goes_on]
        place = place[goes_on]
    return _Requests(number, indptr[:-1][number], pages[number], shared)


def _owners(shared: Longs) -> Longs:
    """For every request the one whose own pages hold the last page that it shares: the nearest before it that shares
    less with its own predecessor; 0 for those that share nothing. By pointer doubling.
    """
    owner = np.maximum(np.arange(len(shared)) - 1, 0)
    while (further := (shared[owner] >= shared) & (shared > 0)).any():
        owner = np.where(further, owner[owner], owner)
    return owner
