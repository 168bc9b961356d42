"""The profiled cost model: launches timed by a target's measured grid of tasks (FlashForge, section 5.2)."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from treegen.cost import term_values
from treegen.ir.arrays import Longs, offsets
from treegen.ir.schedule import Schedule, TileClass
from treegen.ir.shape import Shape
from treegen.launches import ItemLaunches, tile_work
from treegen.strategies.makespan import Costs, Counts
from treegen.target.targets import Target
from treegen.target.tile_config import SMALL_ROWS, lanes_of, resident_blocks, tile_class

Floats = npt.NDArray[np.float64]
_GRID_TOKEN_BYTES = 2 * 128 * 2
"""Bytes of a token's keys and values per KV head in the shape that grids are measured with."""


def task_costs(shape: Shape, target: Target) -> Costs:
    """What one thread block takes for tasks of so many query head rows and KV tokens of one KV head, in microseconds.

    From the target's grid, which is measured in fp16 at head_dim 128: other shapes cost in proportion to the bytes of a
    token. The analytic model stands in where a target has none.
    """
    if target.grid is None:
        return partial(_analytic_task_us, shape=shape, target=target)
    scale, cost = shape.kv_token_bytes / shape.num_kv_heads / _GRID_TOKEN_BYTES, target.grid.cost
    return lambda rows, tokens: cost(rows, tokens) * scale


def task_rows(rows: Counts, tile: TileClass, shape: Shape) -> Longs:
    """Query head rows with which items of `rows` rows enter the grid.

    Few rows in a large tile cost what the fewest do that a large tile is chosen for.
    """
    least = 1 if tile.rows <= SMALL_ROWS else SMALL_ROWS + 1
    return np.clip(np.asarray(rows, np.int64) * shape.group, least, tile.rows)


def source_of_costs(target: Target) -> str:
    """Where `task_costs` come from, for explanations."""
    if target.grid is None:
        return f"analytic: {target.name} has no measured grid"
    return target.grid.source


def _analytic_task_us(rows: Counts, tokens: Counts, shape: Shape, target: Target) -> Floats:
    """A task's share of an SM that is full of tasks like it."""
    tile = tile_class(shape, target, -(-int(np.max(rows, initial=1)) // shape.group))
    flops, loaded = tile_work(tile, shape)
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    idle = ItemLaunches(*[none] * len(fields(ItemLaunches)))
    work = {"tile_flops": flops * one, "tile_bytes": loaded * one, "tile_rows": tile.rows * one}
    turn = replace(idle, turns=one, evened=one, **work)
    values = term_values(turn, target)
    start, each = float(values["throughput"][0]) * target.sms, float(values["full_tile"][0])
    whole: Floats = (start + np.ceil(tokens / tile.tokens) * each + 0.0 * rows) * resident_blocks(tile, shape, target)
    return whole


def item_tokens(schedule: Schedule) -> Longs:
    """KV tokens that every work item loads, per KV head."""
    tile0, full, block0, packed = (
        schedule.column(name).astype(np.int64) for name in ("tile0", "tiles", "block0", "block_tiles")
    )
    item_class = np.repeat(np.arange(len(schedule.classes)), np.diff(schedule.class_indptr))
    per_tile = np.array([tile.blocks_per_tile for tile in schedule.classes], np.int64)[item_class]
    tile_ends, block_ends = offsets(schedule.tiles[:, 1]), offsets(schedule.blocks[:, 1])
    tokens: Longs = tile_ends[tile0 + full] - tile_ends[tile0]
    tokens += block_ends[block0 + packed * per_tile] - block_ends[block0]
    return tokens


def launches_us(schedule: Schedule, items: ItemLaunches, shape: Shape, target: Target) -> Floats:
    """Microseconds of every launch of work items, in launch order.

    A launch takes its longest item, or the mean load of the blocks that the target holds when that is more, or, where
    items are dealt, the longest list; and no less than its traffic with memory, which tasks are measured without. What
    items merge before they write counts as traffic alone.
    """
    tokens, cost, times = item_tokens(schedule), task_costs(shape, target), []
    for c, tile in enumerate(schedule.classes):
        of_class = tokens[schedule.class_indptr[c] : schedule.class_indptr[c + 1]]
        if not len(of_class) or not tile.fused:
            continue
        lanes = lanes_of(tile, shape)
        rows = schedule.column("rows")[schedule.class_indptr[c] : schedule.class_indptr[c + 1]]
        costs = cost(task_rows(rows, tile, shape), of_class)
        if tile.dealt:
            ends = np.concatenate([[0.0], np.cumsum(costs[schedule.work // lanes])])
            times.append(float(np.diff(ends[schedule.work_indptr]).max()))
        else:
            times.append(
                max(
                    float(costs.max()), float(costs.sum()) * lanes / (resident_blocks(tile, shape, target) * target.sms)
                )
            )
    traffic = items.memory_bytes / (target.memory_bytes_per_us * target.constants.memory_fraction)
    slower: Floats = np.maximum(np.array(times), traffic)
    return slower
