"""Which requests of a running batch a plan serves: those that it was made for, and others that took their seats."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from treegen.cost.token_rates import TokenRates
from treegen.ir.arrays import Bools, Ints, Longs, largest
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import NO_EPOCH, RequestSchedule
from treegen.ir.seat_sharing import begin_alike, share

_LOOKED_AT = 64
"""The most new requests in others' seats that are looked at; with more of them a new plan is due."""
ALONE_US = 4.0
"""Microseconds that a layer takes longer while a request is served alone.

On an H200 one of 500 to 40,000 tokens adds 0 to 5 us to layers of 24 to 89 us (8:1 heads). With 1, steps of 128
requests of a recorded server take 1.03 times as long, because plans are in use for longer.
"""
_NO_HEIRS = np.empty((3, 0), np.int64)
_NO_SEATS = np.empty(0, bool)
_NOBODY = NO_EPOCH, 0


class PlannedRequests:
    """The requests that a plan serves together.

    It serves a request that it was made for. It also serves another one that took its seat, if that has the same number
    of query rows and is not so much longer that it is faster alone. Both must share with other seats what the plan
    assumes. The rest are served alone.

    made: the plan's schedule. epochs: by seat, those that the plan was made for; NO_EPOCH where it knows no request.
    with_queries: whether requests may have several query rows.

    Args:
        made: The plan's schedule.
        tokens: By seat, the tokens of the requests that it was made for.
        rates: The time that tokens take, by which a request is too long for a seat; without them, only room counts.
    """

    def __init__(self, made: RequestSchedule, tokens: Longs | None = None, rates: TokenRates | None = None) -> None:
        self._tokens, self._rates = tokens, rates
        self.with_queries = made.queries is not None
        self._begun: dict[int, tuple[int, int]] = {}  # by seat: the epoch of another request, and its tokens then
        self._take(made)

    def _take(self, made: RequestSchedule) -> None:
        self.made, self.epochs = made, made.epoch
        self._known, self._of_claims = made.epoch != NO_EPOCH, _table_of_claims(made)
        self._owners = frozenset(self._of_claims[1].tolist())
        self._seen: Ints | None = None  # rows, epochs and sharing by seat, when `served` was asked last
        self._same = _NO_SEATS
        self._arrived: set[int] = set()  # the seats of requests that the plan was not made for
        self._others: set[int] = set()  # those that it serves
        self._ended: set[int] = set()  # owners that ended since `heirs` was asked last

    def inherit(self, heirs: Longs, page_size: int) -> None:
        """Lets heirs take over what the plan reads from ended requests. See RequestSchedule.inherited."""
        self._take(self.made.inherited(heirs, page_size))

    def heirs(self, batch: LiveBatch, served: Served) -> Longs:
        """Finds heirs of requests that ended since the last call and whose pages others share; see
        RequestSchedule.inherited.

        The heir is, of the requests that still run, the one that shares most with the ended one. None is needed where
        all others, or all but one, share as much with a request that has come into the seat and is served there.
        """
        found = []
        for owner in sorted(self._ended):
            claims = self._claims_on(owner)
            claims = claims.compress(served.same.take(self._of_claims[0].take(claims)))
            lost = len(self._lost(batch, claims))
            served.worse |= lost > 0
            if lost > (owner in self._others):
                pages = self._of_claims[2].take(claims)
                heir = claims.compress(pages == largest(pages)).item(-1)
                found.append((owner, self._of_claims.item(0, heir), self._of_claims.item(2, heir)))
        self._ended.clear()
        return np.array(found, np.int64).T if found else _NO_HEIRS

    def served(self, batch: LiveBatch) -> Served:
        """Tells which requests of a later batch the plan serves.

        Host work before a launch: it looks only at seats that have changed since the last call.
        """
        now = batch.rows_to_sharing
        if self._seen is None or self._seen.shape != now.shape:
            self._seen, self._same = now.copy(), self.same(batch)
            self._others.clear()
            self._arrived.clear()
            changed, worse = {*np.greater(self._known, self._same[: len(self._known)]).nonzero()[0].tolist()}, True
        else:
            changed, worse = {*(now != self._seen).nonzero()[1].tolist()}, False
            self._seen[:], self._same = now, self._same.copy()
        worse |= self._look_at(batch, changed)
        return Served(self, batch, self._same, np.array(sorted(self._others), np.int64), worse)

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
                if not same and seat in self._owners:
                    ended.append(seat)
                if runs and not same:
                    again.add(seat)
                else:
                    self._arrived.discard(seat)
                    self._others.discard(seat)
        if self._arrived:
            for owner in ended:
                again |= self._arrived.intersection(self._of_claims[0].take(self._claims_on(owner)).tolist())
        self._arrived |= again
        self._ended.update(ended, again & self._owners)
        if len(again) > _LOOKED_AT:  # the plan serves none of them
            self._others.clear()
            self._seen = None
            return True
        for seat in again:
            epoch, shared = batch.epoch.item(seat), batch.shared_tokens.item(seat)
            if self._begun.get(seat, _NOBODY)[0] != epoch:
                self._begun[seat] = epoch, batch.tokens.item(seat)
            claims = self.made.claim_numbers(seat)
            if self._fits(batch, seat, shared, claims):
                self._others.add(seat)
                worse |= shared > (self._of_claims.item(2, claims[-1]) * batch.page_size if claims else 0)
            else:
                self._others.discard(seat)
                worse = True
        return worse

    def served_alone(self, batch: LiveBatch) -> Bools:
        """Tells for each seat of a later batch whether its request is served alone."""
        alone: Bools = (batch.row >= 0) & ~self.served(batch).planned
        return alone

    def same(self, batch: LiveBatch) -> Bools:
        """Tells for each seat, of a later batch or of the plan, whether the planned request still runs there."""
        row, epoch = batch.row, batch.epoch
        both = min(len(row), len(self.epochs))
        same = np.zeros(max(len(row), len(self.epochs)), bool)
        np.equal(epoch[:both], self.epochs[:both], out=same[:both])
        same[: len(row)] &= row >= 0
        return same

    def planned(self, batch: LiveBatch, same: Bools, others: Longs) -> Bools:
        """Tells for each seat of a later batch whether the plan serves its request. same, others: see above."""
        made, planned = self.made, same.copy()
        if len(others):
            tokens = batch.tokens.take(others)
            planned[others] = (tokens <= made.most.take(others)) & (tokens >= made.least.take(others))
        kept = same.take(self._of_claims[1])
        if np.count_nonzero(kept) < len(kept):
            planned[self._failing(batch, (~kept).nonzero()[0])] = False
        if made.queries is not None or largest(batch.rows) > 1:
            rows = np.ones(len(planned), np.int32)
            if made.queries is not None:
                rows[: len(made.queries.rows)] = made.queries.rows
            planned[: len(batch.rows)] &= batch.rows == rows[: len(batch.rows)]
        of_batch: Bools = planned[: len(batch.row)]
        return of_batch

    def lost_claims(self, same: Bools) -> int:
        """Counts the claims on seats whose requests have gone. same: see above."""
        kept = same.take(self._of_claims[1])
        return len(kept) - int(np.count_nonzero(kept))

    def begun(self, seats: Longs) -> Longs:
        """Returns the tokens that other requests in these seats had when they were first looked at."""
        return np.array([self._begun[seat][1] for seat in seats.tolist()], np.int64)

    def _fits(self, batch: LiveBatch, seat: int, shared: int, claims: range) -> bool:
        """Says whether the plan has room for another request than planned, which is not faster alone and shares with
        the requests in other seats what the plan assumes. shared: the tokens that it shares. claims: those of its seat.
        """
        most, least, tokens = self.made.most, self.made.least, self._begun[seat][1]
        if not least.item(seat) <= tokens <= most.item(seat) or self._is_faster_alone(seat, tokens, shared):
            return False
        for claim in claims:
            owner, tokens = self._of_claims.item(1, claim), self._of_claims.item(2, claim) * batch.page_size
            if not (
                min(batch.tokens.item(seat), batch.tokens.item(owner)) >= tokens
                and begin_alike(batch.shared_with, batch.shared_tokens, seat, owner, tokens)
            ):
                return False
        return True

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

    def _claims_on(self, owner: int) -> Longs:
        """Returns the claims that requests share pages with the one in this seat."""
        claims: Longs = (self._of_claims[1] == owner).nonzero()[0]
        return claims

    def _failing(self, batch: LiveBatch, claims: Longs) -> Longs:
        """Returns the seats of those of these claims that do not hold for the requests that are now in the seats."""
        failing: Longs = self._of_claims[0].take(self._lost(batch, claims))
        return failing

    def _lost(self, batch: LiveBatch, claims: Longs) -> Longs:
        """Returns those of these claims that do not hold for the requests that are now in the seats."""
        table = self._of_claims.take(claims, 1)
        pairs, tokens = table[:2], table[2] * batch.page_size
        holds = share(batch.shared_with, batch.shared_tokens, pairs, tokens)
        holds &= (batch.tokens.take(pairs) >= tokens).all(0)
        return claims.compress(~holds)


class Served:
    """Which requests of a batch a plan serves. It is asked before the batch changes.

    same: by seat, whether the request that the plan was made for still runs. others: the seats, ascending, in which the
    plan serves another request than it was made for, unless that has got too long or too short since it came; the
    kernel is given the plan's epoch there. worse: whether, since the plan was asked before, requests may have come to be
    served alone, or to share more than the plan assumes.
    """

    def __init__(self, requests: PlannedRequests, batch: LiveBatch, same: Bools, others: Longs, worse: bool) -> None:
        self._requests, self._batch = requests, batch
        self.same, self.others, self.worse = same, others, worse

    @cached_property
    def planned(self) -> Bools:
        """By seat, whether the plan serves the request. A step can begin without it: step kernels find out."""
        return self._requests.planned(self._batch, self.same, self.others)


def _table_of_claims(made: RequestSchedule) -> Longs:
    """Lists a plan's claims, `[3, claims]`: the seat, the owner's seat, and the number of pages of each."""
    table = np.empty((3, len(made.claims)), np.int64)
    table[0], table[1], table[2] = made.claiming(), made.claims[:, 0], made.claims[:, 2]
    return table
