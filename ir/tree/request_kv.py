"""The places of tokens in a tree by request: each node is a part of a request, and requests share pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Ints, frozen, offsets, stable_order, stacked

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
        of_requests: `[5, requests]`; seat, epoch, above, shared_tokens and length, which are properties as well.
        queries: `[requests]`; its rows, which are its last tokens; each sees itself and all tokens before it. None
            where each request has one row, and row i is request i.
        least: `[requests]`; the fewest tokens of each request for which the nodes have all that its rows see. None
            where they have all tokens.
    """

    page_size: int
    of_nodes: Ints
    of_requests: Ints
    queries: Ints | None = None
    least: Ints | None = None

    @property
    def seat(self) -> Ints:
        """The seat of each request."""
        column: Ints = self.of_requests[0]
        return column

    @property
    def epoch(self) -> Ints:
        """The epoch of each request's seat."""
        column: Ints = self.of_requests[1]
        return column

    @property
    def above(self) -> Ints:
        """The request that each one shares its first tokens with, -1 for none. It shares fewer tokens itself."""
        column: Ints = self.of_requests[2]
        return column

    @property
    def shared_with(self) -> Ints:
        """The seat of the request `above`, -1 for none."""
        return frozen(np.where(self.above >= 0, self.seat.take(self.above), -1))

    @property
    def shared_tokens(self) -> Ints:
        """The number of tokens that each request shares with the one above, a multiple of page_size."""
        column: Ints = self.of_requests[3]
        return column

    @property
    def length(self) -> Ints:
        """The tokens of each request, as far as the host knows."""
        column: Ints = self.of_requests[4]
        return column

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
        seat, _, above, shared, _ = self.of_requests
        row = (above >= 0).nonzero()[0]
        if not len(row):
            return _NO_RANGES
        owner, end, levels = above.take(row), shared.take(row), []
        while len(row):  # once per level of sharing
            first = shared.take(owner)
            levels.append(stacked(row, seat.take(owner), first // self.page_size, end // self.page_size))
            further = first.nonzero()[0]
            row, end, owner = row.take(further), first.take(further), above.take(owner.take(further))
        if len(levels) == 1:
            return levels[0]
        ranges = np.concatenate(levels[::-1], axis=1)
        return frozen(ranges.take(stable_order(ranges[0], len(seat)), 1))

    def __reduce__(self) -> tuple[Callable[..., RequestKV], tuple[Any, ...]]:
        return _unpickled, tuple(getattr(self, field.name) for field in fields(self))


def _unpickled(page_size: int, *arrays: Any) -> RequestKV:
    """Makes a RequestKV of pickled arrays, and marks them as read-only again."""
    for array in arrays:
        if array is not None:
            array.setflags(write=False)
    return RequestKV(page_size, *arrays)
