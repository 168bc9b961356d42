"""What a step costs more while requests are walked alone, as the plan does not know them yet."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace

import numpy as np

from treegen.ir.arrays import Bools
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import RequestRoom, RequestSchedule
from treegen.ir.schedule import TileClass
from treegen.ir.shape import Shape
from treegen.target.cost_terms import ITEMS, facts_of
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.tile_config import tile_work


def late_us(batch: LiveBatch, made: RequestSchedule, room: RequestRoom, tile: TileClass, planned: Problem) -> float:
    """Microseconds that a layer takes longer as long as the plan `made` of `planned` serves `batch`.

    Requests that are walked alone read again what they share with others. And the longest of them may take longer than
    all the rest of the layer, for as many of them as there are.
    """
    alone = walked_alone(batch, made)
    tokens = batch.tokens.compress(alone)
    if not len(tokens):
        return 0.0
    _, shape, target = planned
    bytes_per_us = facts_of(target)["memory_bytes_per_us"]
    again = int(batch.shared_tokens.compress(alone).sum()) * shape.kv_token_bytes / bytes_per_us
    layer = planned.tree.unique_tokens * shape.kv_token_bytes / bytes_per_us
    share = len(tokens) / room.lone_items  # of a request for each lone item
    longest = int(tokens.max()) * max(np.ceil(share) if share > 0.5 else share, 1 / room.lone_parts)
    return again + max(float(longest) * _lone_token_us(tile, shape, target) - layer, 0.0)


def walked_alone(batch: LiveBatch, made: RequestSchedule) -> Bools:
    """The seats whose requests the plan does not know, or takes to have pages of one that it does not know any more."""
    runs: Bools = batch.row >= 0
    known = np.zeros(max(len(runs), len(made.epoch)), bool)
    both = min(len(runs), len(made.epoch))
    np.equal(batch.epoch[:both], made.epoch[:both], out=known[:both])
    known[: len(runs)] &= runs
    if len(made.claims):
        gone = ~known.take(made.claims[:, 0])
        seat = np.arange(len(made.epoch)).repeat(np.diff(made.claim_indptr))
        known[seat.compress(gone)] = False
    return runs & ~known[: len(runs)]


@lru_cache(64)
def _lone_token_us(tile: TileClass, shape: Shape, target: Target) -> float:
    """Microseconds that a thread block alone on its SM takes for a token."""
    flops, _ = tile_work(tile, shape)
    return float(ITEMS.terms["lone_tile"](SimpleNamespace(tile_flops=flops, **facts_of(target)))) / tile.tokens
