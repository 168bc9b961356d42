"""Single loop: where all work items of a launch are short, turns their full tiles into packed runs.

    two loops    tiles       [ 64 ][ 64 ]    packed_runs [ 16 | 6 | 0 | 0 ]
    one loop     packed_runs [ 16 | 16 | 16 | 16 ][ 16 | 16 | 16 | 16 ][ 16 | 6 | 0 | 0 ]

The kernel then has no loop over full tiles. It has less code to fetch, so short items run faster. Results are the same.
Plans, accounts and estimates do not depend on this pass.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treegen.ir.arrays import frozen, offsets, ragged
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.schedule import Schedule
from treegen.ir.work_items import ITEM_FIELDS, RUN_FIELDS
from treegen.target.tile_config import MOST_UNROLLED

MOST_TILES = 7
"""The most tiles of an item for which one loop pays.

Measured on an H200 (fp16, head dim 128, FastTree's smallest trees, tiles of 64 rows, cold L2): 3 to 9 % less time up to
7 tiles, 4 % less to 7 % more time with 8 to 12 tiles, and 11 to 34 % more from 16 tiles on.
"""


def can_be_single_loop(config: KernelConfig) -> bool:
    """Says whether a kernel config has a kernel without full tiles."""
    return config.fused and not config.work_list and config.runs_per_tile <= MOST_UNROLLED


def in_single_loop(schedule: Schedule) -> Schedule:
    """Turns full tiles into packed runs, and clears `full`, in configs whose items have at most MOST_TILES tiles."""
    full, packed = schedule.column("tiles"), schedule.column("packed_tiles")
    configs, items, packed_runs = list(schedule.configs), None, schedule.packed_runs
    for c, config in enumerate(schedule.configs):
        of_config = slice(int(schedule.config_indptr[c]), int(schedule.config_indptr[c + 1]))
        tiles = full[of_config]
        if not can_be_single_loop(config) or (tiles + packed[of_config]).max(initial=0) > MOST_TILES:
            continue
        configs[c] = replace(config, has_full_tiles=False)
        if tiles.any():
            items = schedule.items.copy() if items is None else items
            packed_runs = _as_packed_runs(items[of_config], schedule, config, packed_runs)
    if items is None:
        return schedule.changed(configs=tuple(configs))
    return schedule.changed(configs=tuple(configs), items=frozen(items), packed_runs=frozen(packed_runs))


def _as_packed_runs(items: np.ndarray, schedule: Schedule, config: KernelConfig, packed_runs: np.ndarray) -> np.ndarray:
    """Appends all tiles of these items to the table of packed runs, and makes the items point there."""
    columns = {name: items[:, place] for place, name in enumerate(ITEM_FIELDS)}
    per_tile = config.runs_per_tile
    begin = len(packed_runs) + offsets((columns["tiles"] + columns["packed_tiles"]) * per_tile)
    table = np.empty((int(begin[-1]), packed_runs.shape[1]), np.int32)
    table[: len(packed_runs)] = packed_runs
    item, step = ragged(columns["tiles"] * per_tile)
    run = schedule.tiles[columns["tile0"][item] + step // per_tile]
    for column in (0, *range(len(RUN_FIELDS), run.shape[1])):  # the KV slot and, where runs have one, the position
        run[:, column] += step % per_tile * config.run_tokens
    run[:, 1] = config.run_tokens
    table[begin[item] + step] = run
    behind = begin[:-1] + columns["tiles"] * per_tile
    item, step = ragged(columns["packed_tiles"] * per_tile)
    table[behind[item] + step] = packed_runs[columns["run0"][item] + step]
    columns["run0"][:] = begin[:-1]
    columns["packed_tiles"][:] += columns["tiles"]
    columns["tiles"][:] = 0
    return table
