"""The cost that a late plan adds to a step: requests that it does not know are served alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Longs, largest, offsets
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import RequestSchedule
from treegen.ir.request_tables import RequestRoom
from treegen.ir.shape import Shape
from treegen.target.cost_terms import ITEMS, facts_of
from treegen.target.targets import Target
from treegen.target.tile_config import tile_work


class LateCost(NamedTuple):
    """Microseconds per layer. late_us: those that a late plan adds. layer_us: those that the layer takes at least."""

    late_us: float
    layer_us: float


class TokenRates(NamedTuple):
    """Microseconds per token of a kernel for running batches.

    token_us: to read its keys and values, where all SMs read. lone_token_us: of a thread block that is alone on its SM.
    """

    token_us: float
    lone_token_us: float

    @classmethod
    def of(cls, tile: KernelConfig, shape: Shape, target: Target) -> TokenRates:
        """Returns the rates of launches in one kernel config."""
        facts, (flops, _) = facts_of(target), tile_work(tile, shape)
        lone_tile_us = float(ITEMS.terms["lone_tile"](SimpleNamespace(tile_flops=flops, **facts)))
        return cls(shape.kv_token_bytes / facts["memory_bytes_per_us"], lone_tile_us / tile.tokens)


class PlannedRequests:
    """The requests that a plan serves together.

    Args:
        made: The plan's schedule.
    """

    def __init__(self, made: RequestSchedule) -> None:
        self._made, self._epoch, self._claimed = made, made.epoch, made.claims[:, 0]

    def walked_alone(self, batch: LiveBatch) -> Bools:
        """Tells for each seat of a later batch whether its request is served alone.

        That is so if the plan does not know the request, or with another number of query rows, or assumes that it has
        pages of a request that is gone.
        """
        runs: Bools = batch.row >= 0
        known = np.zeros(max(len(runs), len(self._epoch)), bool)
        both = min(len(runs), len(self._epoch))
        np.equal(batch.epoch[:both], self._epoch[:both], out=known[:both])
        known[: len(runs)] &= runs
        gone = ~known.take(self._claimed)
        if np.count_nonzero(gone):
            known[self._claiming_one_of(gone)] = False
        queries = self._made.queries
        if queries is not None or largest(batch.rows) > 1:
            planned = np.ones(len(known), np.int32)
            if queries is not None:
                planned[: len(queries.rows)] = queries.rows
            known[: len(runs)] &= batch.rows == planned[: len(runs)]
        return runs & ~known[: len(runs)]

    def _claiming_one_of(self, claims: Bools) -> Longs:
        """Returns the seats that have one of these claims."""
        owner, _, _, further, end = self._made.seats[4:]
        claiming = (owner >= 0).nonzero()[0]
        of_seats = offsets(claims)
        has: Bools = of_seats.take(end.take(claiming)) > of_seats.take(further.take(claiming) - 1)
        seats: Longs = claiming[has]
        return seats


class LatePlan:
    """A plan that still serves a batch some steps after it was made.

    Args:
        made: The plan's schedule.
        tokens: The tokens of the plan's tree, each counted once.
        room: The sizes of the kernel's tables.
        rates: The time that tokens take.
    """

    def __init__(self, made: RequestSchedule, tokens: int, room: RequestRoom, rates: TokenRates) -> None:
        self._requests, self._room, self._rates = PlannedRequests(made), room, rates
        self._layer_us = tokens * rates.token_us

    def cost(self, batch: LiveBatch) -> LateCost:
        """Estimates the cost for a layer while the plan serves `batch`.

        Requests that are served alone read again the tokens that they share with others, and each of their query rows
        reads all of its tokens by itself. The longest of them may also take longer than the rest of the layer; that
        depends on how many there are for each lone item.
        """
        alone = self._requests.walked_alone(batch).nonzero()[0]
        if not len(alone):
            return LateCost(0.0, self._layer_us)
        tokens, rows = batch.tokens.take(alone), batch.rows.take(alone)
        again, queries = int(np.add.reduce(batch.shared_tokens.take(alone), dtype=np.int64)), len(rows)
        if largest(rows) > 1:
            again += int(np.dot(rows - np.int64(1), tokens))
            queries = int(np.add.reduce(rows, dtype=np.int64))
        share = queries / self._room.lone_items  # of a query row for each lone item
        part = math.ceil(share) if share > 0.5 else max(share, 1 / self._room.lone_parts)
        longest_us = largest(tokens) * part * self._rates.lone_token_us
        return LateCost(again * self._rates.token_us + max(longest_us - self._layer_us, 0.0), self._layer_us)
