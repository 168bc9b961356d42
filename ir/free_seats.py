"""The free seats and the taken rows of a LiveBatch, found without looking at all of them."""

from __future__ import annotations

from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from treegen.ir.arrays import Ints


class FreeSeats:
    """Seats without a request, and the rows of those with one; counted when somebody asks.

    Args:
        row: By seat, the request's row, -1 where the seat is free.
    """

    def __init__(self, row: Ints) -> None:
        self._row = row

    @cached_property
    def _free(self) -> list[int]:
        free: list[int] = (self._row < 0).nonzero()[0].tolist()
        return free  # a heap, as it ascends

    @cached_property
    def _taken(self) -> set[int]:
        return {*self._row[self._row >= 0].tolist()}

    @property
    def requests(self) -> int:
        """The number of requests."""
        counted: set[int] | None = self.__dict__.get("_taken")
        return int(np.count_nonzero(self._row >= 0)) if counted is None else len(counted)

    def is_taken(self, row: object) -> bool:
        """Says whether a request has this row."""
        return row in self._taken

    def take(self, row: int) -> int:
        """Takes the lowest free seat, for a request in this row, and returns it."""
        self._taken.add(row)
        return heappop(self._free)

    def give_back(self, seat: int, row: int) -> None:
        """Frees a seat, and the row of its request."""
        self._taken.discard(row)
        heappush(self._free, seat)


def no_requests(seats: int) -> Ints:
    """Returns the `LiveBatch.table` of this many free seats."""
    return np.array([[-1], [0], [-1], [0], [0], [1]], np.int32).repeat(seats, 1)
