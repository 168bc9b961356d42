"""The cost that a late plan adds to a step: requests that it does not know are served alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from treegen.cost.token_rates import TokenRates
from treegen.ir.arrays import Ints, Longs, largest
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import RequestSchedule
from treegen.ir.request_tables import RequestRoom
from treegen.ir.tree import Tree
from treegen.runtime.compiled_requests import requests_of
from treegen.runtime.planned_requests import Served


class LateCost(NamedTuple):
    """Microseconds per layer. late_us: those that a late plan adds. layer_us: those that the layer takes at least.

    alone_tokens: tokens that requests read alone, by all of their query rows.
    """

    late_us: float
    layer_us: float
    alone_tokens: int


class LatePlan:
    """A plan that still serves a batch some steps after it was made.

    requests: those that it serves. least: by seat, the tokens that a request has to have for it.

    Args:
        made: The plan's schedule.
        tree: The plan's tree, by request.
        shared: By seat, the tokens that requests were known to share at the plan, as owners or with them, whether the
            plan uses that or not.
        room: The sizes of the kernel's tables.
        rates: The time that tokens take.
    """

    def __init__(self, made: RequestSchedule, tree: Tree, shared: Ints, room: RequestRoom, rates: TokenRates) -> None:
        self._layer_us, self.least = tree.unique_tokens * rates.token_us, made.least
        self._tokens, self._shared = np.zeros(len(made.epoch), np.int64), shared
        if tree.requests is not None:
            self._tokens[tree.requests.seat] = tree.requests.length
        self.requests, self._room, self._rates = requests_of(made, self._tokens, rates), room, rates

    def most_late_us(self, batch: LiveBatch, served: Served) -> float:
        """Returns microseconds that `cost` does not exceed, in a fraction of its time; infinity where that is unknown.

        See PlannedRequests.late_tokens.
        """
        if self.requests.with_queries or largest(batch.rows) > 1:
            return math.inf
        rates = self._rates
        alone, most, unused, longer = self.requests.late_tokens(batch, served, self._shared)
        late_us = (alone * most + unused) * rates.token_us + longer * rates.lone_token_us
        return late_us + (self._longest_alone_us(most, alone) if alone else 0.0)

    def cost(self, batch: LiveBatch, served: Served | None = None) -> LateCost:
        """Estimates the cost for a layer while the plan serves `batch`.

        Requests that are served alone read again the tokens that they share with others, and each of their query rows
        reads all of its tokens by itself. The longest of them may also take longer than the rest of the layer; that
        depends on how many there are for each lone item. Requests that the plan serves read by themselves what they
        share since it was made, and one that is served in the place of a shorter one makes one item longer.
        """
        served = served or self.requests.served(batch)
        rates, planned = self._rates, served.planned
        both = min(len(planned), len(self._shared))
        read, shared = rates.read(batch.tokens, batch.shared_tokens)
        _, used = rates.read(batch.tokens[:both], self._shared[:both])
        again = int(np.maximum((shared[:both] - used) * planned[:both], 0).sum())
        longer_us = self._longer_us(read, served.others)
        alone = ((batch.row >= 0) & ~planned).nonzero()[0]
        if not len(alone):
            return LateCost(again * rates.token_us + longer_us, self._layer_us, 0)
        tokens, rows = read.take(alone), batch.rows.take(alone)
        again += int(np.add.reduce(shared.take(alone), dtype=np.int64))
        queries, alone_tokens = len(rows), int(np.add.reduce(tokens, dtype=np.int64))
        if largest(rows) > 1:
            more = int(np.dot(rows - np.int64(1), tokens))
            again, alone_tokens = again + more, alone_tokens + more
            queries = int(np.add.reduce(rows, dtype=np.int64))
        late_us = again * rates.token_us + longer_us + self._longest_alone_us(largest(tokens), queries)
        return LateCost(late_us, self._layer_us, alone_tokens)

    def _longer_us(self, read: Ints | Longs, others: Longs) -> float:
        """Returns how much longer an item gets by the longest request in the place of a shorter one.

        read: by seat, the tokens that requests read.
        """
        if not len(others):
            return 0.0
        then, _ = self._rates.read(self._tokens.take(others), self._shared.take(others))
        return max(largest(read.take(others) - then), 0) * self._rates.lone_token_us

    def _longest_alone_us(self, tokens: int, queries: int) -> float:
        """Returns how much longer than the rest of a layer the longest request takes alone.

        tokens: those that it reads. queries: all query rows that are alone.
        """
        share = queries / self._room.lone_items  # of a query row for each lone item
        part = math.ceil(share) if share > 0.5 else max(share, 1 / self._room.lone_parts)
        return max(tokens * part * self._rates.lone_token_us - self._layer_us, 0.0)
