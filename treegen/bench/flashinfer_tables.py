"""Page tables of a tree in FlashInfer's form. A request is a row, a shared run of tokens, or a root with all below it.

A request's tokens fill the KV slots of its pages in order; only its last page may be filled in part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import INT32_MAX, Ints, Longs, frozen, offsets, ragged, ragged_ranges
from treegen.ir.errors import InputError
from treegen.ir.tree import Tree


@dataclass(frozen=True, slots=True, eq=False)
class PagesOnHost:
    """A page table on the host: request r has the pages `indices[indptr[r]:indptr[r + 1]]`.

    `last_page_len[r]` is the number of tokens in the last of them. A request without tokens has no pages and a
    `last_page_len` of 0.
    """

    indptr: Ints
    indices: Ints
    last_page_len: Ints

    def __len__(self) -> int:
        return len(self.last_page_len)

    def tokens(self, page_size: int) -> Longs:
        """Returns the tokens of every request."""
        full: Longs = np.maximum(np.diff(self.indptr).astype(np.int64) - 1, 0) * page_size
        return full + self.last_page_len


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """One level of a cascade: the ranks `qo_indptr[r]:qo_indptr[r + 1]` share request r of the table.

    The requests cover all ranks. Ranks that see nothing on this level have a request without tokens.
    """

    qo_indptr: Ints
    table: PagesOnHost


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRequests:
    """Requests with several query rows: the ranks `qo_indptr[r]:qo_indptr[r + 1]` belong to request r of the table.

    mask: for each request which tokens each query row sees, `[queries, tokens]`, flattened and joined.
    """

    qo_indptr: Ints
    table: PagesOnHost
    mask: npt.NDArray[np.bool_]


def masked_requests(tree: Tree) -> MaskedRequests:
    """Makes one request of each root with rows: all tokens below it that some row sees, in pages of one token."""
    topology = tree.topology
    spans, ends = topology.spans, np.unique(topology.rank_hi[tree.parent < 0])
    indptr = np.append(0, ends[ends > 0])
    request = np.searchsorted(indptr, spans.lo, side="right") - 1  # spans are in depth-first order, as ranks are
    table = _table(tree, np.arange(len(spans)), np.bincount(request, minlength=len(indptr) - 1), 1)
    masks = []
    for number, (first, last) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
        own = request == number
        lo, hi = (ranks[own].repeat(spans.lengths[own]) for ranks in (spans.lo, spans.hi))
        rank = np.arange(first, last)[:, None]
        masks.append(((lo <= rank) & (rank < hi)).reshape(-1))
    return MaskedRequests(frozen(indptr), table, np.concatenate([np.empty(0, bool), *masks]))


def row_table(tree: Tree, page_size: int = 1) -> PagesOnHost:
    """Makes one request of each row, in the caller's order: the pages of its whole path.

    Raises InputError where a row's tokens do not fill their pages.
    """
    spans = tree.topology.spans
    seeing = spans.hi.astype(np.int64) - spans.lo
    row = tree.topology.row_of_rank[ragged_ranges(spans.lo, seeing)]
    order = np.argsort(row, kind="stable")  # spans come in depth-first order: every row keeps its own root first
    span = np.repeat(np.arange(len(spans)), seeing)[order]
    return _table(tree, span, np.bincount(row, minlength=tree.num_rows), page_size)


def level_tables(tree: Tree, page_size: int = 1) -> tuple[Level, ...]:
    """Cuts the tree into levels of a cascade, from the roots down. Rows are in rank order, and every level has tokens.

    A row's path is cut where the set of rows that see it changes, and its i-th part is on level i. A node with one
    child and no rows of its own forms one part with the child; rows inside a node cut the node.

    Raises InputError where the tokens of a part do not fill their pages.
    """
    spans = tree.topology.spans
    begins = np.ones(len(spans), bool)
    begins[1:] = (spans.lo[1:] != spans.lo[:-1]) | (spans.hi[1:] != spans.hi[:-1])
    lo, hi = spans.lo[begins], spans.hi[begins]
    # Parts are nested or disjoint, in depth-first order: all earlier parts that have not ended contain this one.
    depth = np.arange(len(lo)) - np.searchsorted(np.sort(hi), lo, side="right")
    part = np.cumsum(begins) - 1
    return tuple(
        _level(tree, lo[depth == number], hi[depth == number], np.flatnonzero(depth[part] == number), page_size)
        for number in range(int(depth.max(initial=-1)) + 1)
    )


def _level(tree: Tree, lo: Ints, hi: Ints, span: npt.NDArray[Any], page_size: int) -> Level:
    """Makes the level of the parts that the ranks `lo:hi` see. span: the spans of all these parts."""
    bounds = np.unique(np.concatenate([[0], lo, hi, [tree.num_rows]]))
    request = np.searchsorted(bounds, tree.topology.spans.lo[span])
    return Level(frozen(bounds), _table(tree, span, np.bincount(request, minlength=len(bounds) - 1), page_size))


def _table(tree: Tree, span: npt.NDArray[Any], counts: npt.NDArray[Any], page_size: int) -> PagesOnHost:
    """Makes the page table of requests with `counts` spans each. Raises InputError."""
    spans = tree.topology.spans
    lengths = spans.lengths[span]
    ends = offsets(lengths)
    if ends[-1] > INT32_MAX:
        reason = "is more than a page table of 32-bit integers can count"
        raise InputError("tokens of all requests", int(ends[-1]), reason, "use fewer rows or shorter paths")
    slot_of_token = ragged_ranges(tree.kv.start, tree.kv.length)
    first = offsets(tree.tokens)[spans.node[span]] + spans.start[span]
    slots = slot_of_token[ragged_ranges(first, lengths)]
    tokens = np.diff(ends[offsets(counts)])
    if page_size == 1:
        return PagesOnHost(frozen(offsets(tokens)), frozen(slots), frozen(np.minimum(tokens, 1)))
    return _paged(slots, tokens, page_size)


def _paged(slots: Longs, tokens: Longs, page_size: int) -> PagesOnHost:
    request, position = ragged(tokens)
    offset = position % page_size
    begins = offset == 0
    pages = slots[begins] // page_size
    wrong = np.flatnonzero(slots != pages[np.cumsum(begins) - 1] * page_size + offset)
    if len(wrong):
        at = int(wrong[0])
        reason = f"token {position[at]} of request {request[at]} is in KV slot {slots[at]}: its pages are partly filled"
        raise InputError("page_size", page_size, reason, "use a page size of 1")
    last_page_len = np.where(tokens > 0, (tokens - 1) % page_size + 1, 0)
    return PagesOnHost(frozen(offsets(-(-tokens // page_size))), frozen(pages), frozen(last_page_len))
