"""Staggered walks: where work items walk long KV that they share and then long KV of their own, every other one begins
in the middle of its full tiles. While some items read what L2 holds, others then read memory, which else waits until
all of them have come to the end of what they share.

Results are those of another order of the same sums; plans, accounts and estimates know nothing of it.
"""

from __future__ import annotations

from treegen.ir.arrays import Longs, frozen, ragged_ranges
from treegen.ir.tree import Tree
from treegen.schedule.pack_runs import Tables
from treegen.target.targets import Target

LEAST_TOKENS = 1280
"""Tokens in full tiles of the shortest item from which it pays. Measured on an H200 (fp16, head dim 128, cold L2): ten
plans with that many, shares as below and more thread blocks than SMs take 0.88 to 0.99 of the time. Shorter items take
up to 1.05 of it, those of split paths up to 1.21, and those that have an SM each up to 1.04.
"""
OWN_SHARE = (0.5, 0.95)
"""Distinct tokens of the tree over tokens that items load, least and most: with fewer, what is shared is most of the
time; with more, memory never waits.
"""


def staggered(tables: Tables, tile_tokens: int, work: Longs, tree: Tree, blocks: int, target: Target) -> Tables:
    """The tables with the full tiles of every other item in another order, or as they are where that does not pay.

    tile_tokens: of a full tile; work: tokens of every item, whole paths; blocks: thread blocks of their launch.
    """
    least, (tile0, counts, _, _) = LEAST_TOKENS // tile_tokens, tables.walk
    if blocks <= target.sms or len(tables.tiles) < least * len(counts) or counts.min() < least:
        return tables
    own = tree.unique_tokens / int(work.sum())
    if not OWN_SHARE[0] <= own <= OWN_SHARE[1]:
        return tables
    first, counts = tile0[1::2], counts[1::2]
    place = ragged_ranges(first, counts)
    begin, count = first.repeat(counts), counts.repeat(counts)
    tiles = tables.tiles.copy()
    tiles[place] = tables.tiles[begin + (place - begin + count // 2) % count]
    return tables._replace(tiles=frozen(tiles))
