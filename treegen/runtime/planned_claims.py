"""The claims of a plan: which pages its requests read in the rows of others, and who replaces others that have ended.

    plan            seats 0, 1 and 2 share 10 pages, 1 and 2 share 12        claims: 1 on 0, 2 on 0, 2 on 1
    seat 0 ends     its heir is seat 1                                       claims: 1 on 1, 2 on 1, 2 on 1

Claims are about first pages. `RequestSchedule.claims` has those of a plan; kernels compare the pages in each step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Longs, largest
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import RequestSchedule
from treegen.ir.seat_sharing import begin_alike, share


class Heir(NamedTuple):
    """The seat of the heir of an ended request, and the number of first pages that both have in common."""

    seat: int
    pages: int


class PlannedClaims:
    """The claims of a plan, while requests come and go.

    table: `[3, claims]`; the seat, the seat of the owner and the number of first pages of each, in the order of seats.
    is_owner: by seat, whether others have claims on it. heirs: those of ended requests.

    Args:
        made: The plan's schedule.
    """

    def __init__(self, made: RequestSchedule) -> None:
        self._made = made
        self.table = np.empty((3, len(made.claims)), np.int64)
        self.table[0], self.table[1], self.table[2] = made.claiming(), made.claims[:, 0], made.claims[:, 2]
        self.is_owner = np.zeros(len(made.epoch), np.bool_)
        self.is_owner[self.table[1]] = True
        self.heirs: dict[int, Heir] = {}

    def on(self, owner: int) -> Longs:
        """Returns the claims on pages of the request in this seat."""
        claims: Longs = (self.table[1] == owner).nonzero()[0]
        return claims

    def relying_on(self, owner: int) -> set[int]:
        """Returns the seats of requests that the plan serves only if they share pages with the one in this seat."""
        heirs = [seat for seat, heir in self.heirs.items() if heir.seat == owner]
        return {*self.table[0].take(self.on(owner)).tolist(), *heirs}

    def most_tokens(self, batch: LiveBatch, seat: int) -> int:
        """Returns the tokens that a request in this seat has to share with others."""
        claims = self._made.claim_numbers(seat)
        return self.table.item(2, claims[-1]) * batch.page_size if claims else 0

    def hold(self, batch: LiveBatch, seat: int) -> bool:
        """Says whether a request that has come into this seat shares what the plan assumes of it.

        It has to have the pages that the heir of the one before it has taken over, too. A claim on more pages of an
        ended request than its heir has does not hold: the first of them are read from the heir.
        """
        for claim in self._made.claim_numbers(seat):
            owner = self.table.item(1, claim)
            if owner in self.heirs or not _are_alike(batch, seat, owner, self.table.item(2, claim)):
                return False
        heir = self.heirs.get(seat)
        return heir is None or _are_alike(batch, seat, *heir)

    def lost(self, batch: LiveBatch, claims: Longs) -> Longs:
        """Returns those of these claims that do not hold for the requests that are now in the seats."""
        table = self.table.take(claims, 1)
        pairs, tokens = table[:2], table[2] * batch.page_size
        holds = share(batch.shared_with, batch.shared_tokens, pairs, tokens)
        holds &= (batch.tokens.take(pairs) >= tokens).all(0)
        return claims.compress(~holds)

    def of_running(self, owner: int, same: Bools) -> Longs:
        """Returns the claims on a seat of those requests that still run. same: by seat, whether they do."""
        claims = self.on(owner)
        return claims.compress(same.take(self.table[0].take(claims)))

    def pass_on(self, ended: int, claims: Longs) -> None:
        """Makes that request the heir of an ended one that shares most with it.

        Of what the ended request had taken over from others before, the heir takes over what it has in common.

        Args:
            ended: The seat of the ended request.
            claims: The claims on it of requests that run, at least one.
        """
        most = self.table[2].take(claims)
        claim = claims.compress(most == largest(most)).item(-1)
        heir, pages = self.table.item(0, claim), self.table.item(2, claim)
        on_ended = self.on(ended)
        self.table[1, on_ended.compress(self.table[2].take(on_ended) <= pages)] = heir
        for earlier, before in self.heirs.items():
            if before.seat == ended:
                self.heirs[earlier] = Heir(heir, min(before.pages, pages))
        self.heirs[ended] = Heir(heir, pages)
        self.is_owner[heir] = True


def _are_alike(batch: LiveBatch, seat: int, other: int, pages: int) -> bool:
    """Says whether two requests begin with the same first pages, at least one, as far as is known."""
    tokens = pages * batch.page_size
    long_enough = min(batch.tokens.item(seat), batch.tokens.item(other)) >= tokens
    return long_enough and begin_alike(batch.shared_with, batch.shared_tokens, seat, other, tokens)
