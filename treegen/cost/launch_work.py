"""The work of a schedule's launches, piece by piece, in the order in which thread blocks take it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from treegen.cost.profiled import item_tokens
from treegen.ir.arrays import Longs
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.target.tile_config import lanes_of


class LaunchWork(NamedTuple):
    """The pieces of work of one launch.

    A piece is an item and a lane: a thread block, or an entry of its list where blocks work off lists. In a merge it is
    a merged row, whose heads may take several thread blocks.

    Attributes:
        name: The name of the launch: `work items, 64x64 tiles`, or `merge`.
        config: The kernel config; -1 for a merge.
        item: `[pieces]`; the work item, or the row's place in `merge_rows`.
        block: `[pieces]`; the thread block, ascending.
        group: `[pieces]`; the item's group, -1 in a merge.
        rows: `[pieces]`; query rows.
        tokens: `[pieces]`; KV tokens loaded, 0 in a merge.
        kv_bytes: `[pieces]`; bytes of these tokens, for one KV head.
    """

    name: str
    config: int
    item: Longs
    block: Longs
    group: Longs
    rows: Longs
    tokens: Longs
    kv_bytes: Longs


def launch_work(schedule: Schedule, shape: Shape) -> Iterator[LaunchWork]:
    """Yields the launches of a schedule in launch order; unfused configs and empty launches have none."""
    tokens = item_tokens(schedule)
    group, rows = (schedule.column(name).astype(np.int64) for name in ("group", "rows"))
    for configs, merges in schedule.rounds:
        for c in configs:
            config, (first, last) = schedule.configs[c], schedule.config_indptr[c : c + 2].tolist()
            if first == last or not config.fused:
                continue
            lanes = lanes_of(config, shape)
            if config.work_list:
                item = first + schedule.work.astype(np.int64) // lanes
                block = np.repeat(np.arange(len(schedule.work_indptr) - 1), np.diff(schedule.work_indptr))
            else:
                item = np.repeat(np.arange(first, last), lanes)
                block = np.arange(len(item))
            token_bytes = shape.kv_token_bytes // shape.num_kv_heads
            name = f"work items, {config.rows}x{config.tokens} tiles"
            yield LaunchWork(name, c, item, block, group[item], rows[item], tokens[item], tokens[item] * token_bytes)
        if merges.stop > merges.start:
            count = merges.stop - merges.start
            nothing, places = np.zeros(count, np.int64), np.arange(count)
            yield LaunchWork("merge", -1, places + merges.start, places, nothing - 1, nothing + 1, nothing, nothing)
