"""The places of tokens in a tree by request: each node is a piece of a request, and requests share pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Ints, frozen, largest, offsets, ramp, stacked

_NO_RANGES = frozen(np.empty((4, 0)))


class Claims(NamedTuple):
    """The pages that requests share, as ranges.

    Request i has the ranges `indptr[i]:indptr[i + 1]`: its pages `first:end` are those of seat `owner`. The ranges of a
    request are ascending and not empty, and together run from page 0 to the end of its shared pages.
    """

    indptr: Ints
    owner: Ints
    first: Ints
    end: Ints


@dataclass(frozen=True, slots=True, eq=False)
class RequestKV:
    """The places of a tree's tokens, by request; arrays are read-only. A seat is the number of a running request.

    Node v holds the tokens of seat `owner[v]` from position `first[v]` on, a multiple of page_size. Where `open[v]`, it
    reaches to the present length of its seat, whatever that is; otherwise it has `tokens[v]` tokens, as in the tree.
    Request i is in seat `seat[i]`, and its rows are neighbours among the tree's rows.

    Attributes:
        page_size: Tokens of a page.
        of_nodes: `[3, nodes]`; owner, first, and the position where the node ends, 0 where it is open.
        seat: `[requests]`; the seat of each request.
        epoch: `[requests]`; the epoch of its seat.
        shared_with: `[requests]`; the seat that it shares its first tokens with, -1 for none. That seat shares fewer
            tokens itself.
        shared_tokens: `[requests]`; the number of these tokens, a multiple of page_size.
        length: `[requests]`; its tokens as far as the host knows.
        queries: `[requests]`; its rows, which are its last tokens; each sees itself and all tokens before it. None
            where each request has one row, and row i is request i.
    """

    page_size: int
    of_nodes: Ints
    seat: Ints
    epoch: Ints
    shared_with: Ints
    shared_tokens: Ints
    length: Ints
    queries: Ints | None = None

    @property
    def owner(self) -> Ints:
        """The seat whose tokens each node holds."""
        column: Ints = self.of_nodes[0]
        return column

    @property
    def first(self) -> Ints:
        """The position of each node's first token."""
        column: Ints = self.of_nodes[1]
        return column

    @property
    def open(self) -> Bools:
        """Whether each node goes on to the present length of its seat."""
        is_open: Bools = self.of_nodes[2] == 0
        is_open.setflags(write=False)
        return is_open

    def claims(self) -> Claims:
        """Returns the pages that each request shares, in ranges by the seat that owns them."""
        request, *columns = self.shared_ranges()
        return Claims(frozen(offsets(np.bincount(request, minlength=len(self.seat)))), *columns)

    def shared_ranges(self) -> Ints:
        """Returns the same as a table [4, ranges]: the request, and the columns of Claims; by request and page."""
        row = (self.shared_with >= 0).nonzero()[0]
        if not len(row):
            return _NO_RANGES
        owner, end = self.shared_with.take(row), self.shared_tokens.take(row)
        place = np.empty(largest(self.seat) + 1, np.int64)
        place[self.seat] = ramp(len(self.seat))
        levels = []
        while len(row):  # once per level of sharing
            above = place.take(owner)
            first = self.shared_tokens.take(above)
            levels.append(stacked(row, owner, first // self.page_size, end // self.page_size))
            further = first.nonzero()[0]
            row, end, owner = row.take(further), first.take(further), self.shared_with.take(above.take(further))
        if len(levels) == 1:
            return levels[0]
        ranges = np.concatenate(levels[::-1], axis=1)
        return frozen(ranges.take(ranges[0].argsort(kind="stable"), 1))

    def __reduce__(self) -> tuple[Callable[..., RequestKV], tuple[Any, ...]]:
        return _unpickled, tuple(getattr(self, field.name) for field in fields(self))


def _unpickled(page_size: int, *arrays: Any) -> RequestKV:
    """Makes a RequestKV of pickled arrays, and marks them as read-only again."""
    for array in arrays:
        if array is not None:
            array.setflags(write=False)
    return RequestKV(page_size, *arrays)
