"""Custom masks of serving engines, which become trees where they have the shape of one.

A mask has this shape when the sets of rows that see its tokens are laminar: any two of them are nested or disjoint.
Each set is then a run of tokens that extends the smallest set around it. The tokens that all rows of a request see are
its prefix; requests whose prefixes begin with the same slots share them.

    tokens       0 1 2 3 4 5
    row 0        x x x x . .      sets   {0 1 2}  tokens 0, 1      the prefix
    row 1        x x x . x .             {0 1}    tokens 2         below the prefix
    row 2        x x . . . x             {0} {1}  tokens 3, 4      below token 2
                                         {2}      token 5          below the prefix
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import (
    INT32_MAX,
    Bools,
    Ints,
    IntsLike,
    Longs,
    frozen,
    host_array,
    int32_array,
    offsets,
    positive_int,
    ragged_ranges,
)
from treegen.ir.errors import CrossingError, TreeError
from treegen.ir.tree.edits import Edited
from treegen.ir.tree.page_tables import TreeParts, check_table, last_page, tree_parts
from treegen.ir.tree.queries import Grafts, grafted

# Most entries, at a time, of the table [sets, rows] that shows the smallest set around each set.
MOST_ENTRIES = 1 << 22


class _Seen(NamedTuple):
    """The tokens that a request's rows see, as grafts: runs of tokens that the same rows see.

    Attributes:
        common: The tokens that all rows see.
        tokens: The other tokens that some row sees.
        graft: The graft of each of `tokens`.
        parent: `[grafts]`; the smallest graft around each graft, -1 for none. Parents come first.
        smallest: `[rows]`; the smallest graft that each row sees, -1 for none.
    """

    common: Longs
    tokens: Longs
    graft: Longs
    parent: Longs
    smallest: Longs


class Requests(NamedTuple):
    """Requests under masks: offsets of their queries and of their tokens, the tokens' slots, and the masks."""

    queries: Longs
    tokens: Longs
    slots: Longs
    masks: list[Bools]


class _Table(NamedTuple):
    """The places of requests' tokens.

    Attributes:
        begin: The first page of each request.
        tokens: The number of its tokens.
        pages: The ids of all pages; None where a page is the slot of the same number.
    """

    begin: Longs
    tokens: Longs
    pages: Ints | None


def from_custom_mask(
    custom_mask: npt.ArrayLike,
    qo_indptr: IntsLike,
    kv_indptr: IntsLike,
    kv_indices: IntsLike | None,
    kv_last_page_len: IntsLike | None,
    page_size: int,
) -> Edited:
    """See Tree.from_custom_mask."""
    queries, indptr, slots, masks = requests_of(
        custom_mask, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size
    )
    rows = queries[1:] - queries[:-1]
    seen = [_seen(mask, request) for request, mask in enumerate(masks)]

    common = np.array([len(one.common) for one in seen], np.int64)
    shared = _joined([one.common for one in seen], indptr)
    base, _ = tree_parts(offsets(common)[:-1], common, frozen(slots[shared]), frozen(common > 0), 1)
    number = np.array([len(one.parent) for one in seen], np.int64)
    first = offsets(number)
    graft = _joined([one.graft for one in seen], first)
    order = np.argsort(graft, kind="stable")
    tokens = _joined([one.tokens for one in seen], indptr)[order]
    request = np.arange(len(seen))
    grafts = Grafts(
        request.repeat(number),
        _joined([one.parent for one in seen], first),
        np.bincount(graft, minlength=int(first[-1])),
        slots[tokens],
    )
    return grafted(base, grafts, request.repeat(rows), _joined([one.smallest for one in seen], first))


def requests_of(
    custom_mask: npt.ArrayLike,
    qo_indptr: IntsLike,
    kv_indptr: IntsLike,
    kv_indices: IntsLike | None,
    kv_last_page_len: IntsLike | None,
    page_size: int,
) -> Requests:
    """Checks the arguments of Tree.from_custom_mask and returns the requests. Raises TreeError.

    A request without queries counts as one without tokens, so that the size of the masks bounds the work.
    """
    queries = _checked_indptr("qo_indptr", qo_indptr)
    table = _checked_table(kv_indptr, kv_indices, kv_last_page_len, page_size)
    if len(queries) != len(table.begin) + 1:
        reason = f"does not match {len(table.begin)} requests of kv_indptr"
        raise TreeError("qo_indptr", f"{len(queries) - 1} requests", reason, "give both for the same requests")
    rows = queries[1:] - queries[:-1]
    tokens = np.where(rows > 0, table.tokens, 0)
    masks = list(_masks(custom_mask, rows, tokens))
    slots = ragged_ranges(table.begin * page_size, tokens)
    if table.pages is not None:
        slots = table.pages[slots // page_size].astype(np.int64) * page_size + slots % page_size
    return Requests(queries, offsets(tokens), slots, masks)


def under_masks(requests: Requests) -> TreeParts:
    """Returns the tree of requests in which every query sees all tokens of its request, whatever its mask says.

    Requests share the slots that they begin with.
    """
    rows = requests.queries[1:] - requests.queries[:-1]
    asked, tokens = rows > 0, requests.tokens[1:] - requests.tokens[:-1]
    rows, tokens = rows[asked], tokens[asked]
    base, _ = tree_parts(offsets(tokens)[:-1], tokens, frozen(requests.slots), frozen(tokens > 0), 1)
    return base._replace(row_node=frozen(base.row_node.repeat(rows)), row_sees=frozen(base.row_sees.repeat(rows)))


def _checked_table(
    kv_indptr: IntsLike, kv_indices: IntsLike | None, kv_last_page_len: IntsLike | None, page_size: int
) -> _Table:
    """Returns the places of requests' tokens, in a cache with pages or without. Raises TreeError."""
    page_size = positive_int("page_size", page_size, TreeError)
    indptr = _checked_indptr("kv_indptr", kv_indptr)
    counts = indptr[1:] - indptr[:-1]
    if kv_indices is None:
        if page_size != 1 or kv_last_page_len is not None:
            given = "page_size" if page_size != 1 else "kv_last_page_len"
            raise TreeError("kv_indices", None, f"is missing beside {given}", "give the pages of all requests")
        return _Table(indptr[:-1], counts, None)
    pages = int32_array("kv_indices", kv_indices, low=0, high=last_page(page_size))
    if kv_last_page_len is None:
        if page_size != 1:
            raise TreeError("kv_last_page_len", None, "is missing", f"give it, for pages of {page_size} tokens")
        kv_last_page_len = np.ones(max(len(indptr) - 1, 0), np.int32)
    last = int32_array("kv_last_page_len", kv_last_page_len, low=0, high=page_size)
    check_table(frozen(indptr), counts, pages, last)
    tokens = np.where(counts > 0, (counts - 1) * page_size + last, 0)
    if tokens.sum() > INT32_MAX:
        raise TreeError("kv_indices", int(tokens.sum()), "total exceeds 2^31 - 1 tokens", "split the batch")
    return _Table(indptr[:-1], tokens, pages)


def _checked_indptr(name: str, values: IntsLike) -> Longs:
    """Returns offsets of requests, which begin with 0 and ascend. Raises TreeError."""
    indptr = int32_array(name, values, low=0).astype(np.int64)
    if len(indptr) == 0 or indptr[0] != 0:
        raise TreeError(name, indptr[:1].tolist(), "does not begin with 0", "give offsets of requests")
    if (indptr[1:] < indptr[:-1]).any():
        request = int((indptr[1:] < indptr[:-1]).argmax())
        raise TreeError(f"{name}[{request + 1}]", int(indptr[request + 1]), "falls", "give ascending offsets")
    return indptr


def _masks(custom_mask: npt.ArrayLike, rows: Longs, tokens: Longs) -> Iterator[Bools]:
    """Yields the mask of each request `[rows, tokens]`."""
    mask = host_array("custom_mask", custom_mask)
    mask = mask if mask.size else mask.astype(np.bool_)  # an empty list is of no type
    entries = rows * tokens
    if mask.dtype not in (np.bool_, np.uint8) or mask.ndim != 1:
        found = f"shape {mask.shape} of {mask.dtype}"
        raise TreeError(
            "custom_mask", found, "is no flat mask", "give bool, or uint8 for packed bits, of one dimension"
        )
    packed = mask.dtype == np.uint8
    sizes = (entries + 7) // 8 if packed else entries
    if len(mask) != sizes.sum():
        unit = "bytes of packed bits" if packed else "entries"
        fix = "give rows x tokens of every request" + (", or bool where it is not packed" if packed else "")
        raise TreeError("custom_mask", f"{len(mask)} {unit}", f"does not match the {sizes.sum()} of all requests", fix)
    ends = offsets(sizes)
    for request, (count, width) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
        part = mask[ends[request] : ends[request + 1]]
        if packed:
            part = np.unpackbits(part, count=count * width, bitorder="little").view(np.bool_)
        yield part.reshape(count, width)


def _seen(mask: Bools, request: int) -> _Seen:
    """Returns the grafts of a request's mask. Raises CrossingError where no tree has it."""
    nothing = np.empty(0, np.int64)
    if not len(mask):
        return _Seen(nothing, nothing, nothing, nothing, nothing)
    everywhere = mask.all(0)
    tokens = np.flatnonzero(mask.any(0) & ~everywhere)
    if not len(tokens):
        return _Seen(np.flatnonzero(everywhere), nothing, nothing, nothing, np.full(len(mask), -1))
    columns = mask[:, tokens]
    # Tokens that the same rows see are a set. Larger sets come first, because a set is smaller than those around it.
    bits = np.ascontiguousarray(np.packbits(columns, axis=0).T)
    _, first, member = np.unique(bits.view(f"V{bits.shape[1]}")[:, 0], return_index=True, return_inverse=True)
    order = np.lexsort((first, -np.count_nonzero(columns[:, first], axis=0)))
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    sets = np.ascontiguousarray(columns[:, first[order]].T)
    parent, smallest = _nested(sets, tokens[first[order]], request)
    return _Seen(np.flatnonzero(everywhere), tokens, number[member], parent, smallest)


def _nested(sets: Bools, token: Longs, request: int) -> tuple[Longs, Longs]:
    """Returns the smallest set around each set, and the smallest set of each row; -1 for none.

    sets: `[sets, rows]`, larger ones first. token: the first token of each set, which names it in errors. Raises
    CrossingError where two sets cross.
    """
    count, rows = sets.shape
    parent, around = np.empty(count, np.int64), np.full(rows, -1)
    step = max(1, MOST_ENTRIES // rows)
    for begin in range(0, count, step):
        block = sets[begin : begin + step]
        last = np.vstack((around, np.where(block, np.arange(begin, begin + len(block))[:, None], -1)))
        np.maximum.accumulate(last, out=last)
        # The last earlier set that each row is in. In laminar sets it is the same for all rows of a set.
        before, around = last[:-1], last[-1]
        parent[begin : begin + len(block)] = np.where(block, before, count).min(1)
        other = np.where(block, before, -1).max(1)
        crossing = np.flatnonzero(other != parent[begin : begin + len(block)])
        if len(crossing):
            _refuse(sets, int(other[crossing[0]]), begin + int(crossing[0]), token, request)
    return parent, around


def _refuse(sets: Bools, one: int, other: int, token: Longs, request: int) -> None:
    """Raises CrossingError for two sets, and names rows and tokens that show it."""
    both, first, second = sets[one] & sets[other], sets[one] & ~sets[other], sets[other] & ~sets[one]
    raise CrossingError(
        f"custom_mask of request {request}",
        f"tokens {token[one]} and {token[other]}",
        f"cross: row {both.argmax()} sees both, row {first.argmax()} only token {token[one]}, "
        f"row {second.argmax()} only token {token[other]}, which no tree has",
        "let the rows that see any two tokens be nested or disjoint",
    )


def _joined(parts: list[Longs], first: Longs) -> Longs:
    """Joins numbers of all requests, each counted from its request's `first`; -1 stays."""
    own = np.concatenate([np.empty(0, np.int64), *parts])
    shift = np.repeat(first[: len(parts)], [len(part) for part in parts])
    return np.where(own >= 0, own + shift, -1)
