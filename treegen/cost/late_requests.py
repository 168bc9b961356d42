"""The cost that a late plan adds to a step: requests that it does not know are served alone."""

from __future__ import annotations

import math
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, offsets
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import RequestSchedule
from treegen.ir.request_tables import RequestRoom
from treegen.ir.shape import Shape
from treegen.target.cost_terms import ITEMS, facts_of
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.tile_config import tile_work


class LateCost(NamedTuple):
    """Microseconds per layer. late_us: those that a late plan adds. layer_us: those that the layer takes at least."""

    late_us: float
    layer_us: float


class PlannedRequests:
    """The requests that a plan serves together.

    Args:
        made: The plan's schedule.
    """

    def __init__(self, made: RequestSchedule) -> None:
        self._epoch, self._claimed = made.epoch, made.claims[:, 0]
        self._rows = None if made.queries is None else made.queries.rows
        owner, _, _, first, end = made.seats[4:]
        self._claiming = (owner >= 0).nonzero()[0]
        self._claims = np.stack([end.take(self._claiming), first.take(self._claiming) - 1])

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
        if len(self._claimed):
            upto_end, upto_first = offsets(~known.take(self._claimed)).take(self._claims)
            known[self._claiming.compress(upto_end > upto_first)] = False
        if self._rows is not None or np.count_nonzero(batch.rows > 1):
            planned = np.ones(len(known), np.int32)
            if self._rows is not None:
                planned[: len(self._rows)] = self._rows
            known[: len(runs)] &= batch.rows == planned[: len(runs)]
        return runs & ~known[: len(runs)]


class LatePlan:
    """A plan that still serves a batch some steps after it was made.

    Args:
        made: The plan's schedule.
        room: The sizes of the kernel's tables.
        tile: The kernel config of all launches.
        planned: The tree, shape and target of the plan.
    """

    def __init__(self, made: RequestSchedule, room: RequestRoom, tile: KernelConfig, planned: Problem) -> None:
        tree, shape, target = planned
        self._requests, self._room = PlannedRequests(made), room
        self._token_us = shape.kv_token_bytes / facts_of(target)["memory_bytes_per_us"]
        self._lone_token_us = _lone_token_us(tile, shape, target)
        self._layer_us = tree.unique_tokens * self._token_us

    def cost(self, batch: LiveBatch) -> LateCost:
        """Estimates the cost for a layer while the plan serves `batch`.

        Requests that are served alone read again the tokens that they share with others, and each of their query rows
        reads all of its tokens by itself. The longest of them may also take longer than the rest of the layer; that
        depends on how many there are for each lone item.
        """
        alone = self._requests.walked_alone(batch)
        tokens = batch.tokens.compress(alone)
        if not len(tokens):
            return LateCost(0.0, self._layer_us)
        rows = batch.rows.compress(alone).astype(np.int64)
        again = int(batch.shared_tokens.compress(alone).sum()) + int(np.dot(rows - 1, tokens))
        share = int(rows.sum()) / self._room.lone_items  # of a query row for each lone item
        part = math.ceil(share) if share > 0.5 else max(share, 1 / self._room.lone_parts)
        longest_us = int(tokens.max()) * part * self._lone_token_us
        return LateCost(again * self._token_us + max(longest_us - self._layer_us, 0.0), self._layer_us)


@lru_cache(64)
def _lone_token_us(tile: KernelConfig, shape: Shape, target: Target) -> float:
    """Returns the microseconds per token of a thread block that is alone on its SM."""
    flops, _ = tile_work(tile, shape)
    return float(ITEMS.terms["lone_tile"](SimpleNamespace(tile_flops=flops, **facts_of(target)))) / tile.tokens
