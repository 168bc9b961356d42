"""LateRequests in C: prepare asks them before the launch of each step in which requests came, ended or moved."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, NoReturn

import numpy as np

import treegen.compiled.c_library as c_library
from treegen.compiled.batch_tables import BatchTables
from treegen.compiled.c_library import address_of
from treegen.cost.token_rates import TokenRates
from treegen.ir.arrays import Bools, Ints, Longs
from treegen.ir.errors import InputError
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_tables import NO_REQUEST, RUNNING_FIELDS
from treegen.runtime.lateness import LEAST_GROWN, LEAST_SHORT, AloneTime, LateFacts, LateRequests, RequestGrowth
from treegen.runtime.planned_requests import ALONE_US, MOST_LOOKED_AT, Served

_SAME, _IS_OTHER, _LINES = 4, 5, 16
"""Lines of the state in planned_seats.h, and the number of all."""
_Facts = ctypes.c_int64 * 5


class _SeatedPlan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("known", "claims", "in_chunks", "then_seats")),
        *((name, ctypes.c_void_p) for name in ("fields", "then", "claim")),
        ("queries", ctypes.c_int64),
        ("query_rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("seats", "is_seen")),
        ("state", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("page_size", "most_looked_at", "window_left")),
        *((name, ctypes.c_double) for name in ("token_us", "lone_token_us", "alone_us")),
        ("lone_items", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("layer_us", "least_part", "most_late_us")),
    )


class _Told(NamedTuple):
    """What C tells of the requests of a batch, and the address that it writes to."""

    running: Ints
    address: int


def requests_of(
    made: BatchTables, then: LiveBatch, rates: TokenRates, alone: AloneTime
) -> LateRequests | CompiledRequests:
    """Makes the requests that a plan serves, in C where that is possible. See LateRequests."""
    if c_library.library() is None:
        return LateRequests(made.schedule, then, rates, alone)
    return CompiledRequests(made, then, rates, alone)


class CompiledRequests:
    """LateRequests in C. See there.

    Args:
        made: The plan.
        then: The batch as the plan was made for, which stays as it is.
        rates: The time that tokens take.
        alone: The time of requests that are served alone.
    """

    def __init__(self, made: BatchTables, then: LiveBatch, rates: TokenRates, alone: AloneTime) -> None:
        library, queries, table = c_library.library(), made.queries, then.table
        assert library is not None
        known, count, at_seats, at_claims = made.seated
        claim, state = np.empty(3 * count, np.int64), np.empty((_LINES, table.shape[1]), np.int32)
        self._library, self._kept = library, (made, claim, table)  # C reads these
        self._states: tuple[Ints, ...] = (state,)  # C uses one of them
        self._planned = _SeatedPlan(
            *(known, count, made.chunks is not None, table.shape[1]),
            *(at_seats, address_of(table), address_of(claim)),
            *((0, None) if queries is None else (len(queries.rows), address_of(queries.rows))),
            *(table.shape[1], 0, address_of(state)),
            *(then.page_size, MOST_LOOKED_AT, rates.window_left),
            *(rates.token_us, rates.lone_token_us, ALONE_US),
            *(alone.items, alone.layer_us, 1 / alone.parts, 0.0),
        )
        self._at = ctypes.addressof(self._planned)
        self._batch: tuple[Ints, int] | None = None  # the table of the batch that was seen last, and its address
        library.begin_requests(self._at, at_claims)
        self._told = _Told(NO_REQUEST, 0)  # at the last call of `served`

    def __reduce__(self) -> NoReturn:
        raise InputError("requests", "CompiledRequests", "cannot be copied: they hold addresses", "make others")

    def inherit(self, batch: LiveBatch) -> Served:
        """See PlannedRequests."""
        return self._serve(batch, inherits=True)

    def served(self, batch: LiveBatch) -> Served:
        """See PlannedRequests."""
        return self._serve(batch, inherits=False)

    def same_seats(self) -> Bools:
        """See Served.same."""
        same: Bools = self._state[_SAME] != 0
        return same

    def other_seats(self) -> Longs:
        """See Served.others."""
        seats: Longs = self._state[_IS_OTHER].nonzero()[0]
        return seats

    def planned(self, batch: LiveBatch, served: Served) -> Bools:
        """See PlannedRequests. served: of the last call of `served` or `inherit`, here and below."""
        made = np.empty(len(batch.row), np.bool_)
        self._library.planned_requests(self._at, self._address_of(batch), address_of(made))
        return made

    def running(self, batch: LiveBatch, served: Served) -> Ints:
        """See PlannedRequests. Later calls of `served` and `inherit` change it."""
        return self._told.running

    def most_late_us(self, batch: LiveBatch, served: Served) -> float:
        """See LateRequests. Lengths are those at the last call of `served` or `inherit`."""
        most_us: float = self._planned.most_late_us
        return most_us

    def late_facts(self, batch: LiveBatch, served: Served) -> LateFacts:
        """See LateRequests."""
        facts = _Facts()
        self._library.late_facts(self._at, self._address_of(batch), ctypes.addressof(facts))
        return LateFacts(*facts)

    def growth(self, batch: LiveBatch, served: Served) -> RequestGrowth:
        """See LateRequests."""
        facts = _Facts()
        table = self._address_of(batch)
        self._library.growth(self._at, table, LEAST_SHORT, LEAST_GROWN, ctypes.addressof(facts))
        return RequestGrowth(*facts[:3])

    def _serve(self, batch: LiveBatch, *, inherits: bool) -> Served:
        table, told = self._address_of(batch), self._told
        if told.running.shape[1] != len(batch.row) or not told.address:
            running = np.empty((len(RUNNING_FIELDS), len(batch.row)), np.int32)
            told = self._told = _Told(running, address_of(running))
        worse = self._library.serve_requests(self._at, table, inherits, told.address)
        return Served(self, batch, worse=bool(worse))

    @property
    def _state(self) -> Ints:
        """The state that C uses."""
        return next(each for each in self._states if address_of(each) == self._planned.state)

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
                self._library.widen_state(self._at, address_of(self._states[-1]), seats)
            self._batch = table, address_of(table)
        return self._batch[1]
