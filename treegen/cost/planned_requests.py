"""Which requests of a running batch a plan serves: those that it was made for, and others that took their seats."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from treegen.cost.token_rates import TokenRates
from treegen.ir.arrays import Bools, Longs, largest
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
        self._take(made)
        self._looked_at = np.full((3, len(made.epoch)), NO_EPOCH, np.int32)  # by seat: epoch, whom it shares with, what
        self._begun, self._fit = np.zeros(len(made.epoch), np.int64), np.zeros(len(made.epoch), bool)

    def _take(self, made: RequestSchedule) -> None:
        self.made, self.epochs = made, made.epoch
        self._known, self._of_claims = made.epoch != NO_EPOCH, _table_of_claims(made)

    def inherit(self, heirs: Longs, page_size: int) -> None:
        """Lets heirs take over what the plan reads from ended requests. See RequestSchedule.inherited."""
        self._take(self.made.inherited(heirs, page_size))

    def heirs(self, batch: LiveBatch, served: Served) -> Longs:
        """Finds heirs of ended requests whose pages others share; see RequestSchedule.inherited.

        The heir is, of the requests that still run, the one that shares most with the ended one. None is needed where
        all others, or all but one, share as much with a request that has come into the seat and is served there.
        """
        seats, owners, pages = self._of_claims
        run = served.same.take(seats)
        lost = np.greater(run, served.same.take(owners)).nonzero()[0]
        if not len(lost) or not len(lost := self._lost(batch, lost)):
            return _NO_HEIRS
        losses = np.bincount(owners.take(lost), minlength=len(served.same))
        losses[served.others] -= 1
        left = (run & (losses.take(owners) > 0)).nonzero()[0]
        order = left.take(((owners.take(left) << 32) + pages.take(left)).argsort(kind="stable"))
        ended = owners.take(order)
        most = order.compress(ended != np.append(ended[1:], -1))
        heirs: Longs = self._of_claims.take(most, 1)[[1, 0, 2]]
        return heirs

    def served(self, batch: LiveBatch) -> Served:
        """Tells which requests of a later batch the plan serves."""
        return Served(self, batch)

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

    def others(self, batch: LiveBatch, same: Bools) -> Longs:
        """Returns the seats in which the plan serves another request than it was made for, unless that has got too long
        or too short since it came. same: see above.
        """
        both = min(len(batch.row), len(self.epochs))
        there: Bools = batch.row[:both] >= 0
        there &= self._known[:both]
        seats = np.greater(there, same[:both]).nonzero()[0]
        if not len(seats):
            return seats
        now = batch.epochs_and_sharing.take(seats, 1)
        new = (now != self._looked_at.take(seats, 1)).any(0).nonzero()[0]
        if len(new) > _LOOKED_AT:
            return seats[:0]
        for seat, epoch, _, shared in zip(seats.take(new).tolist(), *now.take(new, 1).tolist(), strict=True):
            if epoch != self._looked_at.item(0, seat):
                self._begun[seat] = batch.tokens[seat]
            self._fit[seat] = self._fits(batch, seat, shared, same)
        self._looked_at[:, seats] = now
        seats = seats.compress(self._fit.take(seats))
        fits = np.zeros(len(same), bool)
        fits[seats] = True
        lost = np.less(same.take(self._of_claims[1]), fits.take(self._of_claims[0])).nonzero()[0]
        if len(lost):
            fits[self._failing(batch, lost)] = False
            seats = seats.compress(fits.take(seats))
        return seats

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
        begun: Longs = self._begun.take(seats)
        return begun

    def _fits(self, batch: LiveBatch, seat: int, shared: int, same: Bools) -> bool:
        """Says whether the plan has room for another request than planned, which is not faster alone and shares with
        requests that are still there what the plan assumes. shared: the tokens that it shares.
        """
        most, least, tokens = self.made.most, self.made.least, self._begun.item(seat)
        if not least.item(seat) <= tokens <= most.item(seat) or self._is_faster_alone(seat, tokens, shared):
            return False
        for claim in self.made.claim_numbers(seat):
            owner, tokens = self._of_claims.item(1, claim), self._of_claims.item(2, claim) * batch.page_size
            if same.item(owner) and not (
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

    same: by seat, whether the request that the plan was made for still runs. others: see PlannedRequests; the kernel is
    given the plan's epoch there.
    """

    def __init__(self, requests: PlannedRequests, batch: LiveBatch) -> None:
        self._requests, self._batch = requests, batch
        self.same = requests.same(batch)
        self.others = requests.others(batch, self.same)

    @cached_property
    def planned(self) -> Bools:
        """By seat, whether the plan serves the request. A step can begin without it: step kernels find out."""
        return self._requests.planned(self._batch, self.same, self.others)


def _table_of_claims(made: RequestSchedule) -> Longs:
    """Lists a plan's claims, `[3, claims]`: the seat, the owner's seat, and the number of pages of each."""
    table = np.empty((3, len(made.claims)), np.int64)
    seats, numbers = made.numbered_claims()
    table[0, numbers], table[1], table[2] = seats, made.claims[:, 0], made.claims[:, 2]
    return table
