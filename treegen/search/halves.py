"""Whole paths in halves that one launch merges (treegen.schedule.passes.fuse_merge).

They are estimated beside the policies of treegen.search.weigh, and made to be measured.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from treegen.cost.analytic import WAITING
from treegen.cost.launch_counts import FP32_BYTES, even_pieces
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.schedule.lower import lower
from treegen.schedule.pack_runs import MOST_SPREAD
from treegen.schedule.passes.fuse_merge import with_fused_merge
from treegen.search.weigh import Weights
from treegen.strategies.cohort import Cohort
from treegen.strategies.strategy import Strategy
from treegen.target.cost_terms import ITEMS, facts_of
from treegen.target.problem import Problem
from treegen.target.tile_config import SMALL_ROWS, kernel_config, resident_blocks, rows_per_tile

_PARTS = (3 / 4, 1 / 2)
"""The most tokens of half a path, over the tokens of the longest path.

The first value leaves room for paths that grow, the second for shorter ones.
"""
_HEIGHTS = (64, 32)  # query head rows of whole paths that are halved
_WIDEST_MEASURED = 128  # the most dims of values for which kernels that wait were measured; wider ones spill


class PlannedStrategy(NamedTuple):
    """A strategy with its plan and schedule."""

    strategy: Strategy
    plan: Plan
    schedule: Schedule

    @classmethod
    def of(cls, strategy: Strategy, problem: Problem) -> PlannedStrategy:
        """Plans and lowers a tree."""
        plan = strategy.plan(problem)
        return cls(strategy, plan, lower(plan, problem))

    @property
    def takes_one_launch(self) -> bool:
        """Whether final items wait for partial ones in their launch."""
        return with_fused_merge(self.schedule).has_fused_merge


def large_cohorts(shape: Shape) -> list[Cohort]:
    """Returns cohorts of whole paths for every height with a large tile, with a power of two of rows."""
    rows = [1 << rows_per_tile(height, shape.group).bit_length() - 1 for height in _HEIGHTS]
    return [Cohort(of_each * shape.group) for of_each in dict.fromkeys(rows)]


def halved(whole: Cohort, problem: Problem) -> PlannedStrategy | None:
    """Returns these paths by the first split into halves that one launch merges; None if there is none."""
    schedule = PlannedStrategy.of(whole, problem).schedule
    tiles = (schedule.column("tiles") + schedule.column("packed_tiles")).max(initial=1)
    splits = (length * schedule.configs[0].tokens for length in _lengths(int(tiles)))
    found = (PlannedStrategy.of(replace(whole, split=split, merge="final"), problem) for split in splits)
    return next((each for each in found if each.takes_one_launch), None)


def best_halves(weights: Weights, problem: Problem, less_us: float) -> tuple[Cohort, float] | None:
    """Returns the fastest whole paths in halves that one launch merges, with estimated microseconds.

    It is None if none takes less than `less_us`. Nothing is planned: one launch is assumed to merge cohorts if the
    longest has less than twice the tiles of the shortest.
    """
    shape, target = problem.shape, problem.target
    if shape.head_dim_v > _WIDEST_MEASURED:
        return None
    found, launch_us = None, target.constants.launch_us
    resident = resident_blocks(kernel_config(shape, target, SMALL_ROWS + 1), shape, target)
    tiles = weights.layout.tiles
    for index, walk in enumerate(weights.walks):
        blocks = weights.whole.cohorts[index] * tiles.lanes[index]
        if tiles.rows[index] <= SMALL_ROWS or walk.tile or walk.split_shared_rows or blocks > target.sms * resident:
            continue
        # Twice the thread blocks, each with half of the work, take at least half of the time.
        if launch_us + WAITING * (weights.times_us[0, index] - launch_us) / 2 >= less_us:
            continue
        split = _split(weights, index)
        time_us = _time_us(weights, index, problem) if split else less_us
        if time_us < less_us:
            found, less_us = (replace(walk, split=split, merge="final"), time_us), time_us
    return found


def _lengths(tiles: int) -> list[int]:
    """Returns lengths to try for half a path, where the longest path has this many tiles."""
    return [math.ceil(tiles * part) for part in _PARTS]


def _split(weights: Weights, index: int) -> int | None:
    """Returns the split that cuts every cohort of a walk in two, or None.

    It is None where there is no such split, and where one of the halves would be packed token by token. The ends of
    paths, where many short runs are packed, are in the second halves.
    """
    cohorts = weights.cohorts
    first, count = cohorts.first.item(index), cohorts.counts.item(index)
    full, by_run, by_token = cohorts.columns[2:5, first : first + count]
    tiles = full + by_run
    most, least = int(tiles.max()), int(tiles.min())
    length = next((length for length in _lengths(most) if length < least), None)
    if length is None:
        return None
    second = np.ceil(tiles / 2)
    packed = np.minimum(by_run, second)
    by_slot = second - packed + np.ceil(by_token * packed / np.maximum(by_run, 1))
    if second.sum() > MOST_SPREAD * by_slot.sum():
        return None
    return length * int(weights.layout.tiles.tokens[index])


def _time_us(weights: Weights, index: int, problem: Problem) -> float:
    """Returns microseconds of a walk in halves, by the terms of the cost model."""
    tree, shape, target = problem
    tiles, whole = weights.layout.tiles, weights.whole
    lanes, heads = tiles.lanes[index], shape.num_qo_heads
    pieces = np.int64(2 * whole.cohorts[index] * lanes)
    q_row, final_row = heads * shape.head_dim * shape.dtype_bytes, shape.head_dim_v * shape.dtype_bytes + FP32_BYTES
    rows, longest = tree.num_rows, np.ceil((whole.longest_full[index] + whole.longest_packed[index]) / 2)
    counts = {
        "pieces": pieces,
        "even_pieces": even_pieces(pieces, target.sms),
        "full": whole.full[index] * lanes,
        "packed": whole.packed[index] * lanes,
        "longest_pieces": 1.0,
        "longest_full": longest - whole.longest_packed[index] / 2,
        "longest_packed": whole.longest_packed[index] / 2,
        "longest_merges": 1.0,
        "tile_flops": tiles.flops[index],
        "tile_bytes": tiles.loaded[index],
        "tile_rows": tiles.rows[index],
        "memory_bytes": tree.unique_tokens * shape.kv_token_bytes
        + rows * (2 * q_row + 2 * shape.partial_bytes + heads * final_row),
    }
    items_us = ITEMS.values(SimpleNamespace(**counts, **facts_of(target)))["items_us"]
    return float(target.constants.launch_us + WAITING * items_us)
