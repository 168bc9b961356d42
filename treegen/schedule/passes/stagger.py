"""Staggered walks: where work items walk long KV that they share and then long KV of their own, every other one begins
in the middle of its full tiles. While some items read what L2 holds, others then read memory, which else waits until
all of them have come to the end of what they share.

Results are those of another order of the same sums; plans, accounts and estimates know nothing of it.
"""

from __future__ import annotations

import numpy as np

from treegen.ir.arrays import frozen, ragged_ranges
from treegen.ir.schedule import Schedule
from treegen.target.problem import Problem
from treegen.target.tile_config import lanes_of

LEAST_TOKENS = 1280
"""Tokens in full tiles of the shortest item from which it pays. Measured on an H200 (fp16, head dim 128, cold L2): ten
plans with that many, shares as below and more thread blocks than SMs take 0.88 to 0.99 of the time. Shorter items take
up to 1.05 of it, those of split paths up to 1.21, and those that have an SM each up to 1.04.
"""
OWN_SHARE = (0.5, 0.95)
"""Distinct tokens of the tree over tokens that items load, least and most: with fewer, what is shared is most of the
time; with more, memory never waits.
"""


def staggered(schedule: Schedule, problem: Problem) -> Schedule:
    """The schedule with the full tiles of every other item in another order, or as it is where that does not pay: where
    some row has several items, or there are several tile classes.
    """
    if len(schedule.classes) != 1 or not schedule.classes[0].fused:
        return schedule
    tile, (tree, shape, target) = schedule.classes[0], problem
    least, counts = LEAST_TOKENS // tile.tokens, schedule.column("tiles").astype(np.int64)
    if len(counts) * lanes_of(tile, shape) <= target.sms or len(schedule.tiles) < least * len(counts):
        return schedule
    if counts.min() < least or schedule.column("slot0").max() >= 0:
        return schedule
    loaded = sum(int(table[:, 1].sum(dtype=np.int64)) for table in (schedule.tiles, schedule.blocks))
    own = tree.unique_tokens / loaded
    if not OWN_SHARE[0] <= own <= OWN_SHARE[1]:
        return schedule
    first, counts = schedule.column("tile0")[1::2].astype(np.int64), counts[1::2]
    place = ragged_ranges(first, counts)
    begin, count = first.repeat(counts), counts.repeat(counts)
    tiles = schedule.tiles.copy()
    tiles[place] = schedule.tiles[begin + (place - begin + count // 2) % count]
    return schedule.changed(tiles=frozen(tiles))
