"""The profiled cost model: launches timed by a target's measured grid of tasks (FlashForge, section 5.2)."""

from __future__ import annotations

import numpy as np

from treegen.cost.launch_counts import ItemLaunches
from treegen.ir.arrays import Floats, Longs, offsets
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.target.targets import Target
from treegen.target.task_costs import task_costs, task_rows
from treegen.target.tile_config import lanes_of, resident_blocks


def item_tokens(schedule: Schedule) -> Longs:
    """Returns the KV tokens that each work item loads, per KV head."""
    tile0, full, run0, packed = (
        schedule.column(name).astype(np.int64) for name in ("tile0", "tiles", "run0", "packed_tiles")
    )
    item_config = np.repeat(np.arange(len(schedule.configs)), np.diff(schedule.config_indptr))
    per_tile = np.array([config.runs_per_tile for config in schedule.configs], np.int64)[item_config]
    tile_ends, run_ends = offsets(schedule.tiles[:, 1]), offsets(schedule.packed_runs[:, 1])
    tokens: Longs = tile_ends[tile0 + full] - tile_ends[tile0]
    tokens += run_ends[run0 + packed * per_tile] - run_ends[run0]
    return tokens


def launches_us(schedule: Schedule, items: ItemLaunches, shape: Shape, target: Target) -> Floats:
    """Returns the microseconds of each launch of work items, in launch order.

    A launch takes the time of its longest item, or the mean load of the thread blocks that the target holds if that is
    more. Where items are dealt, it takes the time of the longest list. It takes no less than its traffic with memory,
    which is not part of the measured tasks. Partials that items join before they write count as traffic alone.
    """
    tokens, cost, times = item_tokens(schedule), task_costs(shape, target), []
    for c, config in enumerate(schedule.configs):
        of_config = tokens[schedule.config_indptr[c] : schedule.config_indptr[c + 1]]
        if not len(of_config) or not config.fused:
            continue
        lanes = lanes_of(config, shape)
        rows = schedule.column("rows")[schedule.config_indptr[c] : schedule.config_indptr[c + 1]]
        costs = cost(task_rows(rows, config, shape), of_config)
        if config.work_list:
            ends = np.concatenate([[0.0], np.cumsum(costs[schedule.work // lanes])])
            times.append(float(np.diff(ends[schedule.work_indptr]).max()))
        else:
            times.append(
                max(
                    float(costs.max()),
                    float(costs.sum()) * lanes / (resident_blocks(config, shape, target) * target.sms),
                )
            )
    traffic = items.memory_bytes / (target.memory_bytes_per_us * target.constants.memory_fraction)
    slower: Floats = np.maximum(np.array(times), traffic)
    return slower
