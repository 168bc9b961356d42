"""Where the tokens of a tree by request are: which request each node is a piece of, and which pages requests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Ints, frozen, largest, offsets, ramp, stacked

_NO_RANGES = frozen(np.empty((4, 0)))


class Claims(NamedTuple):
    """The pages that requests share. Request i has the ranges `indptr[i]:indptr[i + 1]`: its pages `first:end` are
    those of seat `owner`. Its ranges are ascending, not empty, and together run from page 0 to the end of what it
    shares.
    """

    indptr: Ints
    owner: Ints
    first: Ints
    end: Ints


@dataclass(frozen=True, slots=True, eq=False)
class RequestKV:
    """Where a tree's tokens are, by request. A seat is the number of a running request; arrays are read-only.

    Node v holds the tokens of seat `owner[v]` from position `first[v]` on, a multiple of page_size. Where `open[v]`, it
    goes on to the seat's present length, whatever that is; else it ends behind the tree's `tokens[v]`. `of_nodes` [3,
    nodes] has these as columns: owner, first, and the position where the node ends, 0 where it is open.

    Request i is in seat `seat[i]` at epoch `epoch[i]`, with `length[i]` tokens as far as the host knows. Its first
    `shared_tokens[i]` tokens, a multiple of page_size, are those of seat `shared_with[i]` (-1: none), which itself
    shares fewer. Its `queries[i]` rows are neighbours among the tree's rows. They are its last tokens: each
    sees itself and all tokens before it. Where queries is None, each request has one row, and row i is request i.
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
        """The pages that each request shares, divided by the seat that owns them."""
        request, *columns = self.shared_ranges()
        return Claims(frozen(offsets(np.bincount(request, minlength=len(self.seat)))), *columns)

    def shared_ranges(self) -> Ints:
        """The same by request and page, as a table [4, ranges] of requests and of the columns of Claims."""
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
    """The places of arrays that were pickled, which come back without the mark that they are read-only."""
    for array in arrays:
        if array is not None:
            array.setflags(write=False)
    return RequestKV(page_size, *arrays)
