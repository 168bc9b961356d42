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


def late_cost(
    batch: LiveBatch, made: RequestSchedule, room: RequestRoom, tile: KernelConfig, planned: Problem
) -> LateCost:
    """Estimates the cost for a layer while the plan `made` of `planned` still serves `batch`.

    Requests that are served alone read again the tokens that they share with others, and each of their query rows reads
    all of its tokens by itself. The longest of them may also take longer than the rest of the layer; that depends on
    how many there are for each lone item.

    Args:
        batch: The requests at present.
        made: The plan's schedule.
        room: The sizes of the kernel's tables.
        tile: The kernel config of all launches.
        planned: The tree, shape and target of the plan.
    """
    _, shape, target = planned
    bytes_per_us = facts_of(target)["memory_bytes_per_us"]
    layer_us = planned.tree.unique_tokens * shape.kv_token_bytes / bytes_per_us
    alone = walked_alone(batch, made)
    tokens = batch.tokens.compress(alone)
    if not len(tokens):
        return LateCost(0.0, layer_us)
    rows = batch.rows.compress(alone).astype(np.int64)
    again = int(batch.shared_tokens.compress(alone).sum()) + int(((rows - 1) * tokens).sum())
    again_us = again * shape.kv_token_bytes / bytes_per_us
    share = int(rows.sum()) / room.lone_items  # of a query row for each lone item
    longest = int(tokens.max()) * max(math.ceil(share) if share > 0.5 else share, 1 / room.lone_parts)
    longest_us = longest * _lone_token_us(tile, shape, target)
    return LateCost(again_us + max(longest_us - layer_us, 0.0), layer_us)


def walked_alone(batch: LiveBatch, made: RequestSchedule) -> Bools:
    """Tells for each seat whether its request is served alone.

    That is so if the plan does not know the request, or with another number of query rows, or assumes that it has pages
    of a request that is gone.
    """
    runs: Bools = batch.row >= 0
    known = np.zeros(max(len(runs), len(made.epoch)), bool)
    both = min(len(runs), len(made.epoch))
    np.equal(batch.epoch[:both], made.epoch[:both], out=known[:both])
    known[: len(runs)] &= runs
    if len(made.claims):
        gone = offsets(~known.take(made.claims[:, 0]))
        owner, _, _, further, end = made.seats[4:]
        claiming = (owner >= 0).nonzero()[0]
        has_gone = gone.take(end.take(claiming)) > gone.take(further.take(claiming) - 1)
        known[claiming.compress(has_gone)] = False
    if made.queries is not None or np.count_nonzero(batch.rows > 1):
        planned = np.ones(len(known), np.int32)
        if made.queries is not None:
            planned[: len(made.queries.rows)] = made.queries.rows
        known[: len(runs)] &= batch.rows == planned[: len(runs)]
    return runs & ~known[: len(runs)]


@lru_cache(64)
def _lone_token_us(tile: KernelConfig, shape: Shape, target: Target) -> float:
    """Returns the microseconds per token of a thread block that is alone on its SM."""
    flops, _ = tile_work(tile, shape)
    return float(ITEMS.terms["lone_tile"](SimpleNamespace(tile_flops=flops, **facts_of(target)))) / tile.tokens
