"""Single loop: where all work items of a launch are short, turns their full tiles into packed runs.

    two loops    tiles [ 64 ][ 64 ]      blocks [ 16 | 6 | 0 | 0 ]
    one loop     blocks [ 16 | 16 | 16 | 16 ][ 16 | 16 | 16 | 16 ][ 16 | 6 | 0 | 0 ]

The kernel then has no loop over full tiles. It has less code to fetch, so short items run faster. Results are the same.
Plans, accounts and estimates do not depend on this pass.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treegen.ir.arrays import frozen, offsets, ragged
from treegen.ir.schedule import ITEM_FIELDS, RUN_FIELDS, Schedule, TileClass
from treegen.target.tile_config import MOST_UNROLLED

MOST_TILES = 7
"""The most tiles of an item for which one loop pays.

Measured on an H200 (fp16, head dim 128, FastTree's smallest trees, tiles of 64 rows, cold L2): 3 to 9 % less time up to
7 tiles, 4 % less to 7 % more time with 8 to 12 tiles, and 11 to 34 % more from 16 tiles on.
"""


def can_be_one_loop(tile: TileClass) -> bool:
    """Says whether a tile class has a kernel without full tiles."""
    return tile.fused and not tile.dealt and tile.blocks_per_tile <= MOST_UNROLLED


def in_one_loop(schedule: Schedule) -> Schedule:
    """Turns full tiles into packed runs, and clears `full`, in classes whose items have at most MOST_TILES tiles."""
    full, packed = schedule.column("tiles"), schedule.column("block_tiles")
    classes, items, blocks = list(schedule.classes), None, schedule.blocks
    for c, tile in enumerate(schedule.classes):
        of_class = slice(int(schedule.class_indptr[c]), int(schedule.class_indptr[c + 1]))
        tiles = full[of_class]
        if not can_be_one_loop(tile) or (tiles + packed[of_class]).max(initial=0) > MOST_TILES:
            continue
        classes[c] = replace(tile, full=False)
        if tiles.any():
            items = schedule.items.copy() if items is None else items
            blocks = _as_blocks(items[of_class], schedule, tile, blocks)
    if items is None:
        return schedule.changed(classes=tuple(classes))
    return schedule.changed(classes=tuple(classes), items=frozen(items), blocks=frozen(blocks))


def _as_blocks(items: np.ndarray, schedule: Schedule, tile: TileClass, blocks: np.ndarray) -> np.ndarray:
    """Appends all tiles of these items to the table of packed runs, and makes the items point there."""
    columns = {name: items[:, place] for place, name in enumerate(ITEM_FIELDS)}
    per_tile = tile.blocks_per_tile
    begin = len(blocks) + offsets((columns["tiles"] + columns["block_tiles"]) * per_tile)
    table = np.empty((int(begin[-1]), blocks.shape[1]), np.int32)
    table[: len(blocks)] = blocks
    item, step = ragged(columns["tiles"] * per_tile)
    run = schedule.tiles[columns["tile0"][item] + step // per_tile]
    for column in (0, *range(len(RUN_FIELDS), run.shape[1])):  # the KV slot and, where runs have one, the position
        run[:, column] += step % per_tile * tile.block
    run[:, 1] = tile.block
    table[begin[item] + step] = run
    behind = begin[:-1] + columns["tiles"] * per_tile
    item, step = ragged(columns["block_tiles"] * per_tile)
    table[behind[item] + step] = blocks[columns["block0"][item] + step]
    columns["block0"][:] = begin[:-1]
    columns["block_tiles"][:] += columns["tiles"]
    columns["tiles"][:] = 0
    return table
