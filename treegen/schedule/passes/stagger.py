"""Stagger: lets odd work items start halfway through their full tiles.

    item 0    [ shared 0 | shared 1 | own 0 | own 1 ]
    item 1    [ own 0 | own 1 | shared 0 | shared 1 ]

Where items read long KV that they share and then long KV of their own, some items then read their own KV from memory
while others read shared KV from L2. Otherwise memory would idle until all of them have read what they share.

Only the order of sums changes. Plans, accounts and estimates do not depend on this pass.
"""

from __future__ import annotations

import numpy as np

from treegen.ir.arrays import frozen, ragged_ranges
from treegen.ir.schedule import Schedule
from treegen.target.problem import Problem
from treegen.target.tile_config import lanes_of

LEAST_TOKENS = 1280
"""The least tokens in full tiles of the shortest item for which staggering pays.

Measured on an H200 (fp16, head dim 128, cold L2): ten plans with at least these tokens, with shares as below and with
more thread blocks than SMs take 0.88 to 0.99 of the time. Plans of shorter items take up to 1.05 of it, those of split
paths up to 1.21, and those with an SM for each thread block up to 1.04.
"""
OWN_SHARE = (0.5, 0.95)
"""The least and the largest ratio of distinct tokens of the tree to tokens that items load.

Below it, items read shared KV most of the time. Above it, memory never waits.
"""


def staggered(schedule: Schedule, problem: Problem) -> Schedule:
    """Rotates the full tiles of odd items by half their number, where that pays.

    A schedule with several kernel configs, or with a row in several items, is returned as it is.
    """
    if len(schedule.configs) != 1 or not schedule.configs[0].fused:
        return schedule
    config, (tree, shape, target) = schedule.configs[0], problem
    least, counts = LEAST_TOKENS // config.tokens, schedule.column("tiles").astype(np.int64)
    if len(counts) * lanes_of(config, shape) <= target.sms or len(schedule.tiles) < least * len(counts):
        return schedule
    if counts.min() < least or schedule.column("partial0").max() >= 0:
        return schedule
    loaded = sum(int(table[:, 1].sum(dtype=np.int64)) for table in (schedule.tiles, schedule.packed_runs))
    own = tree.unique_tokens / loaded
    if not OWN_SHARE[0] <= own <= OWN_SHARE[1]:
        return schedule
    first, counts = schedule.column("tile0")[1::2].astype(np.int64), counts[1::2]
    place = ragged_ranges(first, counts)
    begin, count = first.repeat(counts), counts.repeat(counts)
    tiles = schedule.tiles.copy()
    tiles[place] = schedule.tiles[begin + (place - begin + count // 2) % count]
    return schedule.changed(tiles=frozen(tiles))
