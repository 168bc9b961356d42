"""What a plan costs some steps after it was made, counted in NumPy: requests that are alone, and that have grown."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from treegen.cost.token_rates import TokenRates
from treegen.ir.arrays import Ints, Longs, largest
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import RequestSchedule
from treegen.runtime.planned_requests import PlannedRequests, Served

GROWN = 128
"""Tokens that a request gains before `refresh` makes a new plan.

On an H200, 64 requests of 4,096 tokens take 1.04 times as long with a plan made 128 tokens earlier as with a new one.
"""
LEAST_GROWN = 16
"""Tokens that requests gain at least before they are long for a plan that was made when they had few of their own."""
LEAST_SHORT = 16
"""`refresh` plans anew where a request lacks this many tokens of what the plan asks for; one that lacks fewer soon has
them.
"""


class LateFacts(NamedTuple):
    """Tokens of requests for which a plan is late.

    again: those that are read in addition. longer: the most by which one is longer than the request whose place it has,
    or, with several query rows, than it was itself.
    queries: query rows that are alone. alone_tokens: the tokens that these read. longest: the most of one request.
    """

    again: int
    longer: int
    queries: int
    alone_tokens: int
    longest: int


class AloneTime(NamedTuple):
    """What the time of requests that are served alone depends on.

    layer_us: microseconds that a layer takes without them. items: lone items. parts: the most that share a request.
    token_us: microseconds of a token in a lone item.
    """

    layer_us: float
    items: int
    parts: int
    token_us: float

    def longest_us(self, tokens: int, queries: int) -> float:
        """Returns how much longer than the rest of a layer the longest request takes.

        tokens: those that it reads. queries: all query rows that are alone.
        """
        share = queries / self.items  # of a query row for each lone item
        part = math.ceil(share) if share > 0.5 else max(share, 1 / self.parts)
        return max(tokens * part * self.token_us - self.layer_us, 0.0)


class RequestGrowth(NamedTuple):
    """How requests have grown since their plan.

    A request with several query rows gains that number of tokens in a step, so only room counts for it.

    misfits: those that lack LEAST_SHORT tokens of what the plan asks for, or have more than it has room for. One with
    several rows is a misfit a step before, if the next plan would hold it. most: the most tokens that a request with
    one row has gained. many: the requests with one row that have gained LEAST_GROWN tokens, and a quarter of their own.
    """

    misfits: int
    most: int
    many: int

    @classmethod
    def of(cls, grown: Ints | Longs, tokens: Ints, shared: Ints, misfits: int = 0) -> RequestGrowth:
        """Counts requests.

        Args:
            grown: Tokens that each request has gained since the plan.
            tokens: Tokens of each at the plan.
            shared: Those of them that it shares with others.
            misfits: See RequestGrowth.
        """
        most = largest(grown) if len(grown) else 0
        if not LEAST_GROWN <= most < GROWN:
            return cls(misfits, most, 0)
        return cls(misfits, most, int(np.count_nonzero(grown >= np.maximum(LEAST_GROWN, (tokens - shared) // 4))))

    def outgrows(self, requests: int) -> bool:
        """Says whether a plan for this many requests is out of date.

        One has grown by GROWN tokens, or an eighth of them by a quarter of what was their own: a plan for short tails
        of requests gathers more of them in a work item than it should when they are long.
        """
        return self.misfits > 0 or self.most >= GROWN or (self.most >= LEAST_GROWN and 8 * self.many >= requests)


class PlannedTokens(NamedTuple):
    """By seat, the tokens of requests at their plan, and those that they shared, as owners or with them."""

    tokens: Ints
    shared: Ints

    @classmethod
    def of(cls, then: LiveBatch) -> PlannedTokens:
        """Returns them. then: the batch as the plan was made for."""
        shared, sharing = then.shared_tokens.copy(), (then.shared_with >= 0).nonzero()[0]
        np.maximum.at(shared, then.shared_with.take(sharing), then.shared_tokens.take(sharing))
        return cls(then.tokens, shared)


class LateRequests(PlannedRequests):
    """PlannedRequests that also say what it costs that a plan was made some steps ago.

    Args:
        made: The plan's schedule.
        then: The batch as the plan was made for.
        rates: The time that tokens take.
        alone: The time of requests that are served alone.
    """

    def __init__(self, made: RequestSchedule, then: LiveBatch, rates: TokenRates, alone: AloneTime) -> None:
        super().__init__(made, then.tokens, rates)
        self._late_rates = rates  # `_rates` may be None
        self._alone, self._then = alone, PlannedTokens.of(then)

    def most_late_us(self, batch: LiveBatch, served: Served) -> float:
        """Returns an upper bound of what a late plan adds to a layer, for requests with one query row each.

        It takes a fraction of the time of `late_facts`.
        """
        both, then, rates = min(len(batch.row), len(self._then.shared)), self._then, self._late_rates
        known = served.same.copy()
        known[served.others] = True
        fits = self.fits(batch)
        known[: len(fits)] &= fits
        alone, most = len(batch) - int(np.count_nonzero(known)) + self.lost_claims(served.same), largest(batch.tokens)
        unused = np.maximum(batch.shared_tokens[:both] - then.shared[:both], 0)
        longer = 0
        if len(served.others):
            before, _ = rates.read(then.tokens.take(served.others), served.others)
            longer = max(largest(batch.tokens.take(served.others) - before), 0)
        again = alone * most + int(np.add.reduce(unused, dtype=np.int64))
        late_us = again * rates.token_us + longer * rates.lone_token_us
        return late_us + (self._alone.longest_us(most, alone) if alone else 0.0)

    def late_facts(self, batch: LiveBatch, served: Served) -> LateFacts:
        """Counts what a late plan costs.

        Requests that are served alone read again the tokens that they share with others, and each of their query rows
        reads all of its tokens by itself. Requests that the plan serves read by themselves what they share since it was
        made, and one that is served in the place of a shorter one makes one item longer.
        """
        planned, then, longer = served.planned, self._then, 0
        both = min(len(planned), len(then.shared))
        read, shared = self._late_rates.read(batch.tokens, batch.shared_tokens)
        _, used = self._late_rates.read(batch.tokens[:both], then.shared[:both])
        again = int(np.maximum((shared[:both] - used) * planned[:both], 0).sum(dtype=np.int64))
        if len(served.others):
            before, _ = self._late_rates.read(then.tokens.take(served.others), then.shared.take(served.others))
            longer = max(largest(read.take(served.others) - before), 0)
        several = (planned & (batch.rows > 1)).nonzero()[0]
        if len(several):
            before, _ = self._late_rates.read(then.tokens.take(several), then.shared.take(several))
            longer = max(longer, largest(read.take(several) - before))
        alone = ((batch.row >= 0) & ~planned).nonzero()[0]
        if not len(alone):
            return LateFacts(again, longer, 0, 0, 0)
        tokens, rows = read.take(alone), batch.rows.take(alone).astype(np.int64)
        again += int(shared.take(alone).sum(dtype=np.int64)) + int(np.dot(rows - 1, tokens))
        return LateFacts(again, longer, int(rows.sum()), int(np.dot(rows, tokens)), largest(tokens))

    def growth(self, batch: LiveBatch, served: Served) -> RequestGrowth:
        """Counts how requests have grown since the plan. The batch still has the same number of seats."""
        then, made, others = self._then.tokens, self.made, served.others
        planned = self.planned(batch, served, ignores_lengths=True)
        known = len(made.least)
        tokens, rows, before = (each[:known].astype(np.int64) for each in (batch.tokens, batch.rows, then))
        coming = rows * ((rows > 1) & (rows <= made.most - before))  # that another plan has room for
        misfits = ((tokens + LEAST_SHORT <= made.least) | (tokens + coming > made.most)) & planned[:known]
        counts = planned & (batch.rows == 1)
        grown = (batch.tokens - then) * counts
        if len(others):
            begun = np.maximum(self.begun(others), then.take(others))
            grown[others] = (batch.tokens.take(others) - begun) * counts.take(others)
        return RequestGrowth.of(grown, then, batch.shared_tokens, int(np.count_nonzero(misfits)))
