"""PlannedRequests in C: prepare asks it before the launch of each step in which requests came, ended or moved."""

from __future__ import annotations

import ctypes
from typing import NoReturn

import numpy as np

import treegen.compiled.c_library as c_library
from treegen.cost.token_rates import TokenRates
from treegen.ir.arrays import Ints, Longs
from treegen.ir.errors import InputError
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import RequestSchedule
from treegen.ir.request_tables import RUNNING_FIELDS
from treegen.runtime.planned_requests import ALONE_US, MOST_LOOKED_AT, PlannedRequests, Served

_BEGUN_TOKENS, _LINES = 11, 14
"""A line of the state in planned_seats.c, and the number of all."""


class _SeatedPlan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("known", "claims", "in_chunks")),
        *((name, ctypes.c_void_p) for name in ("fields", "claim", "planned_tokens")),
        *((name, ctypes.c_int64) for name in ("seats", "is_seen")),
        ("state", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("page_size", "most_looked_at", "window_left")),
        *((name, ctypes.c_double) for name in ("token_us", "lone_token_us", "alone_us")),
    )


def requests_of(made: RequestSchedule, tokens: Longs, rates: TokenRates) -> PlannedRequests:
    """Makes the requests that a plan serves, in C where that is possible. Arguments are those of PlannedRequests."""
    return (PlannedRequests if c_library.library() is None else CompiledRequests)(made, tokens, rates)


class CompiledRequests(PlannedRequests):
    """PlannedRequests whose seats are looked at in C. See there."""

    def __init__(self, made: RequestSchedule, tokens: Longs, rates: TokenRates) -> None:
        library, known = c_library.library(), len(made.epoch)
        assert library is not None
        claims, state = np.empty((3, len(made.claims)), np.int64), np.empty((_LINES, known), np.int32)
        self._library = library
        self._states: tuple[Ints, ...] = (state,)  # C uses one of them
        self._planned = _SeatedPlan(
            *(known, len(made.claims), made.chunks is not None),
            *(made.seats.ctypes.data, claims.ctypes.data, tokens.ctypes.data),
            *(known, 0, state.ctypes.data),
            *(0, MOST_LOOKED_AT, rates.window_left),
            *(rates.token_us, rates.lone_token_us, ALONE_US),
        )
        self._at = ctypes.addressof(self._planned)
        self._batch: tuple[Ints, int] | None = None  # the table of the batch that was seen last, and its address
        library.begin_requests(self._at, made.claims.ctypes.data)
        super().__init__(made, tokens, rates, claims)

    def __reduce__(self) -> NoReturn:
        raise InputError("requests", "CompiledRequests", "cannot be copied: they hold addresses", "make others")

    def inherit(self, batch: LiveBatch) -> Served:
        """See PlannedRequests."""
        return self._serve(batch, inherits=True)

    def served(self, batch: LiveBatch) -> Served:
        """See PlannedRequests."""
        return self._serve(batch, inherits=False)

    def running(self, batch: LiveBatch, others: Longs) -> Ints:
        """See PlannedRequests. others: those of the last call of `served` or `inherit`."""
        made = np.empty((len(RUNNING_FIELDS), len(batch.row)), np.int32)
        self._library.running_requests(self._at, self._address_of(batch), made.ctypes.data)
        return made

    def late_tokens(self, batch: LiveBatch, served: Served, shared: Ints) -> tuple[int, int, int, int]:
        """See PlannedRequests."""
        facts, both = (ctypes.c_int64 * 4)(), min(len(batch.row), len(shared))
        self._library.late_tokens(self._at, self._address_of(batch), shared.ctypes.data, both, facts)
        alone, most, unused, longer = facts
        return alone, most, unused, longer

    def begun(self, seats: Longs) -> Longs:
        """See PlannedRequests."""
        state = next(each for each in self._states if each.ctypes.data == self._planned.state)
        tokens: Longs = state[_BEGUN_TOKENS].take(seats).astype(np.int64)
        return tokens

    def _serve(self, batch: LiveBatch, *, inherits: bool) -> Served:
        table = self._address_of(batch)
        same, others = np.empty(self._planned.seats, np.bool_), np.empty(self._planned.seats, np.int64)
        self._planned.page_size = batch.page_size
        found = self._library.serve_requests(self._at, table, inherits, same.ctypes.data, others.ctypes.data)
        return Served(self, batch, same, others[: found >> 1], bool(found & 1))

    def _address_of(self, batch: LiveBatch) -> int:
        """Returns the address of the batch's table, for which the state has room.

        It may be stopped at any line: C switches to a wider state at once, and what it uses is kept before that.
        """
        table = batch.table
        if self._batch is None or self._batch[0] is not table:
            seats = table.shape[1]
            if seats < self._planned.seats:
                found, reason = f"{seats} seats", f"has fewer than the batch that was planned, {self._planned.seats}"
                raise InputError("batch", found, reason, "give that batch")
            if seats > self._planned.seats:
                self._states = *self._states, np.empty((_LINES, seats), np.int32)
                self._library.widen_state(self._at, self._states[-1].ctypes.data, seats)
            self._batch = table, table.ctypes.data
        return self._batch[1]
