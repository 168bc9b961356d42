"""Which requests of a running batch a plan serves: those that it was made for, and others that took their seats."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np

from treegen.cost.token_rates import TokenRates
from treegen.ir.arrays import Bools, Ints, Longs, largest
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import NO_EPOCH, RequestSchedule
from treegen.ir.request_tables import NO_REQUEST
from treegen.runtime.planned_claims import PlannedClaims

MOST_LOOKED_AT = 64
"""The most new requests in others' seats that are looked at; with more of them a new plan is due."""
ALONE_US = 4.0
"""Microseconds that a layer takes longer while a request is served alone.

On an H200 one of 500 to 40,000 tokens adds 0 to 5 us to layers of 24 to 89 us (8:1 heads). With 1, steps of 128
requests of a recorded server take 1.03 times as long, because plans are in use for longer.
"""
_NO_SEATS = np.empty(0, bool)
_NOBODY = NO_EPOCH, 0


class PlannedRequests:
    """The requests that a plan serves together.

    It serves a request that it was made for. It also serves another one that took its seat, if that has the same number
    of query rows and is not so much longer that it is faster alone. Both must share with other seats what the plan
    assumes. The rest are served alone.

    made: the plan's schedule. epochs: by seat, those that the plan was made for; NO_EPOCH where it knows no request.

    Args:
        made: The plan's schedule.
        tokens: By seat, the tokens of the requests that it was made for.
        rates: The time that tokens take, by which a request is too long for a seat; without them, only room counts.
    """

    def __init__(self, made: RequestSchedule, tokens: Ints | None = None, rates: TokenRates | None = None) -> None:
        self._tokens, self._rates = tokens, rates
        self.made, self.epochs = made, made.epoch
        self._known, self._claims = made.epoch != NO_EPOCH, PlannedClaims(made)
        self._begun: dict[int, tuple[int, int]] = {}  # by seat: the epoch of another request, and its tokens then
        self._seen: Ints | None = None  # rows, epochs and sharing by seat, when `served` was asked last
        self._same = _NO_SEATS
        self._arrived: set[int] = set()  # the seats of requests that the plan was not made for
        self._others: set[int] = set()  # those that it serves
        self._ended: set[int] = set()  # owners that ended, and have not been looked at for heirs

    def inherit(self, batch: LiveBatch) -> Served:
        """Lets heirs take over what the plan reads from ended requests; then tells which requests it serves.

        The heir is, of the requests that still run, the one that shares most with the ended one. None is needed where
        all others, or all but one, share as much with a request that has come into the seat and is served there. The
        first pages of the ended request that its heir has, too, are read from the heir, and claims on them are claims
        on the heir; whoever comes into the seat of the ended request has to share these pages as well. Claims on more
        pages of the ended request do not hold any more. Plans in chunks read on in all rows, and have no heirs.
        """
        served, again = self.served(batch), set[int]()
        for owner in sorted(self._ended) if self.made.chunks is None else ():
            claims = self._claims.of_running(owner, self._same)
            lost = len(self._claims.lost(batch, claims))
            served.worse |= lost > 0
            if lost > (owner in self._others):
                again |= {owner} | self._claims.relying_on(owner)
                self._claims.pass_on(owner, claims)
        self._ended.clear()
        if again := again & self._arrived:
            served.worse |= self._look_again(batch, again)
        return served

    def running(self, batch: LiveBatch, served: Served) -> Ints:
        """Returns the running requests of a batch as kernels are to see them, `[RUNNING_FIELDS, seats]`."""
        table = running_requests(batch)
        if len(served.others):
            table[1, served.others] = self.epochs.take(served.others)
        for ended, (heir, pages) in self._claims.heirs.items():
            table[2:, ended] = batch.row.item(heir), pages
        return table

    def served(self, batch: LiveBatch) -> Served:
        """Tells which requests of a later batch the plan serves.

        Host work before a launch: it looks only at seats that have changed since the last call.
        """
        now = batch.table[:4]
        if self._seen is None or self._seen.shape != now.shape:
            self._seen, self._same = now.copy(), self.same(batch)
            self._others.clear()
            self._arrived.clear()
            changed, worse = {*np.greater(self._known, self._same[: len(self._known)]).nonzero()[0].tolist()}, True
        else:
            changed, worse = {*(now != self._seen).nonzero()[1].tolist()}, False
            self._seen[:], self._same = now, self._same.copy()
        worse |= self._look_at(batch, changed)
        return Served(self, batch, worse=worse)

    def _look_at(self, batch: LiveBatch, changed: set[int]) -> bool:
        """Updates which requests are the same as planned, and which others the plan serves. Returns whether one of
        those looked at is served alone, or shares more than the plan assumes.
        """
        ended, again, worse = [], set(), False
        for seat in changed:
            runs = batch.row.item(seat) >= 0
            if seat >= len(self.epochs) or not self._known.item(seat):
                worse |= runs
            else:
                self._same[seat] = same = runs and batch.epoch.item(seat) == self.epochs.item(seat)
                if not same and self._claims.is_owner.item(seat):
                    ended.append(seat)
                if runs and not same:
                    again.add(seat)
                else:
                    self._arrived.discard(seat)
                    self._others.discard(seat)
        if self._arrived:
            for owner in ended:
                again |= self._arrived & self._claims.relying_on(owner)
        self._arrived |= again
        self._ended.update(ended, filter(self._claims.is_owner.item, again))
        if len(again) > MOST_LOOKED_AT:  # the plan serves none of them
            self._others.clear()
            self._seen = None
            return True
        return self._look_again(batch, again) or worse

    def _look_again(self, batch: LiveBatch, arrived: set[int]) -> bool:
        """Decides whether the plan serves requests that it was not made for; returns what `_look_at` does."""
        worse = False
        for seat in arrived:
            epoch, shared = batch.epoch.item(seat), batch.shared_tokens.item(seat)
            if self._begun.get(seat, _NOBODY)[0] != epoch:
                self._begun[seat] = epoch, batch.tokens.item(seat)
            if self._fits(batch, seat, shared):
                self._others.add(seat)
                worse |= shared > self._claims.most_tokens(batch, seat)
            else:
                self._others.discard(seat)
                worse = True
        return worse

    def same_seats(self) -> Bools:
        """See Served.same."""
        return self._same

    def other_seats(self) -> Longs:
        """See Served.others."""
        return np.array(sorted(self._others), np.int64)

    def same(self, batch: LiveBatch) -> Bools:
        """Tells for each seat, of a later batch or of the plan, whether the planned request still runs there."""
        row, epoch = batch.row, batch.epoch
        both = min(len(row), len(self.epochs))
        same = np.zeros(max(len(row), len(self.epochs)), bool)
        np.equal(epoch[:both], self.epochs[:both], out=same[:both])
        same[: len(row)] &= row >= 0
        return same

    def planned(self, batch: LiveBatch, served: Served, *, ignores_lengths: bool = False) -> Bools:
        """See Served.planned. ignores_lengths: whether it serves requests that are too long or too short as well."""
        made, same, others = self.made, served.same, served.others
        planned = same.copy()
        planned[others] = True
        if not ignores_lengths:
            fits = self.fits(batch)
            planned[: len(fits)] &= fits
        kept = same.take(self._claims.table[1])
        if np.count_nonzero(kept) < len(kept):
            lost = self._claims.lost(batch, (~kept).nonzero()[0])
            planned[self._claims.table[0].take(lost)] = False
        if made.queries is not None or largest(batch.rows) > 1:
            rows = np.ones(len(planned), np.int32)
            if made.queries is not None:
                rows[: len(made.queries.rows)] = made.queries.rows
            planned[: len(batch.rows)] &= batch.rows == rows[: len(batch.rows)]
        of_batch: Bools = planned[: len(batch.row)]
        return of_batch

    def fits(self, batch: LiveBatch) -> Bools:
        """Tells by seat whether the request has neither too few nor too many tokens for the plan."""
        both = min(len(batch.tokens), len(self.made.most))
        tokens = batch.tokens[:both]
        fits: Bools = (tokens >= self.made.least[:both]) & (tokens <= self.made.most[:both])
        return fits

    def lost_claims(self, same: Bools) -> int:
        """Counts the claims on seats whose requests have gone. same: see above."""
        kept = same.take(self._claims.table[1])
        return len(kept) - int(np.count_nonzero(kept))

    def begun(self, seats: Longs) -> Longs:
        """Returns the tokens that other requests in these seats had when they were first looked at."""
        return np.array([self._begun[seat][1] for seat in seats.tolist()], np.int64)

    def _fits(self, batch: LiveBatch, seat: int, shared: int) -> bool:
        """Says whether the plan has room for another request than planned, which is not faster alone and shares with
        the requests in other seats what the plan assumes. shared: the tokens that it shares.
        """
        tokens = self._begun[seat][1]
        if not self.made.least.item(seat) <= tokens <= self.made.most.item(seat):
            return False
        return not self._is_faster_alone(seat, tokens, shared) and self._claims.hold(batch, seat)

    def _is_faster_alone(self, seat: int, tokens: int, shared: int) -> bool:
        """Says whether a request is faster alone than in the place of a shorter one.

        Alone it reads again what it shares. In the place of a shorter one it makes an item longer.
        """
        if self._tokens is None or self._rates is None:
            return False
        rates, then = self._rates, self._tokens.item(seat)
        longer_us = (rates.read_of(tokens) - rates.read_of(then)) * rates.lone_token_us
        again = max(shared - tokens + rates.read_of(tokens), 0)
        return longer_us > ALONE_US + again * rates.token_us


class ServingRequests(Protocol):
    """What Served asks of PlannedRequests, in NumPy or in C."""

    def same_seats(self) -> Bools:
        """See Served.same."""

    def other_seats(self) -> Longs:
        """See Served.others."""

    def planned(self, batch: LiveBatch, served: Served) -> Bools:
        """See Served.planned."""


class Served:
    """Which requests of a batch a plan serves. It is asked before the batch changes, and before the next call of
    `PlannedRequests.served`.

    worse: whether requests may have come to be served alone, or to share more than the plan assumes, since the last
    call.
    """

    def __init__(self, requests: ServingRequests, batch: LiveBatch, *, worse: bool) -> None:
        self._requests, self._batch, self.worse = requests, batch, worse

    @cached_property
    def same(self) -> Bools:
        """By seat, whether the request that the plan was made for still runs."""
        return self._requests.same_seats()

    @cached_property
    def others(self) -> Longs:
        """The seats, ascending, in which the plan serves another request than it was made for, unless that has got too
        long or too short since it came; the kernel is given the plan's epoch there.
        """
        return self._requests.other_seats()

    @cached_property
    def planned(self) -> Bools:
        """By seat, whether the plan serves the request. A step can begin without it: step kernels find out."""
        return self._requests.planned(self._batch, self)


def running_requests(batch: LiveBatch) -> Ints:
    """Returns the running requests of a batch, `[RUNNING_FIELDS, seats]`, without heirs."""
    table: Ints = NO_REQUEST.repeat(len(batch.row), 1)
    table[:2] = batch.table[:2]
    return table
