"""Room for growth: a schedule whose packed blocks go on where rows will grow, so that a token more is a length more.

Every row that is alone at a leaf, and sees all of it, gets entries behind the last ones of its work item: they have the
row's mask and the slots to come, and the length 0, which kernels mask. The block that the leaf ends in is filled first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treegen.ir.arrays import Longs, frozen, offsets, ragged
from treegen.ir.schedule import ITEM_FIELDS, RUN_FIELDS, Schedule
from treegen.ir.tree import Tree
from treegen.ir.tree.edits import next_slots, own_leaves
from treegen.ir.tree.kv import TakenSlots

RESERVE = 16
"""Tokens that every row can grow by, at least, before the next plan. Counted on five trees of 64 to 256 rows over 16
steps: 16 tokens make 0 to 17 % more tiles where every leaf has items of its own (deft-node), and 2 to 33 % where items
read the leaves of many rows (cohort), most with leaves of a few tokens; 32 tokens make twice as many. No KV is loaded
for them.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """A schedule with room, and where that is for the growing rows, in ascending order.

    taken: the slots of the tree's tokens. slot: behind the row's last one; free: slots from there on that hold no
    token. item: the work item of `schedule` that reads the row's last token; entry [k, rows]: numbers of the item's
    entries that the row fills one after another, each with `block` tokens; entries: how many of them each row has;
    filled: tokens in the first of them.
    """

    schedule: Schedule
    taken: TakenSlots
    rows: Longs
    slot: Longs
    free: Longs
    item: Longs
    entry: Longs
    entries: Longs
    block: Longs
    filled: Longs


def with_room(schedule: Schedule, tree: Tree) -> Room | None:
    """The schedule of a tree with room for growth; None where no row can grow so, or some class runs unfused.

    A row whose last slot several nodes have, or several of its item's entries, gets no room.
    """
    rows = np.flatnonzero(own_leaves(tree, np.arange(tree.num_rows)) & (tree.tokens[tree.row_node] > 0))
    if not len(rows) or not all(tile.fused for tile in schedule.classes):
        return None
    of_class = np.repeat(np.arange(len(schedule.classes)), np.diff(schedule.class_indptr))
    block = np.array([tile.block for tile in schedule.classes])[of_class]
    per_tile = np.array([tile.blocks_per_tile for tile in schedule.classes])[of_class]
    bits = np.array([tile.mask == "bits" for tile in schedule.classes])[of_class]
    columns = {name: schedule.column(name).astype(np.int64) for name in ("tile0", "tiles", "block0", "block_tiles")}

    # Every entry that an item reads: those of full tiles, and behind them those of blocks.
    tile_item, tile_step = ragged(columns["tiles"])
    block_item, block_step = ragged(columns["block_tiles"] * per_tile)
    own_blocks = schedule.blocks[columns["block0"][block_item] + block_step]
    runs = np.concatenate([schedule.tiles[columns["tile0"][tile_item] + tile_step], own_blocks])
    item, step = np.append(tile_item, block_item), np.append(tile_step, block_step)
    begin, length, lo, hi = (runs[:, column].astype(np.int64) for column in range(len(RUN_FIELDS)))
    seen = (length > 0) & np.where(bits[item], (lo | hi) != 0, hi > lo)

    # A row's last entry is the only one that somebody sees and that ends with the row's last slot.
    slot = next_slots(tree, rows)
    by_slot = np.argsort(slot, kind="stable")
    place = np.minimum(np.searchsorted(slot[by_slot], begin + length), len(rows) - 1)
    ends = np.flatnonzero(seen & (slot[by_slot][place] == begin + length))
    alone = np.bincount(place[ends], minlength=len(rows)) == 1
    last = np.zeros(len(rows), np.int64)
    last[by_slot[place[ends]]] = ends
    growing = np.zeros(len(rows), bool)
    growing[by_slot] = alone
    if not growing.any():
        return None
    rows, slot, last = rows[growing], slot[growing], last[growing]

    item_of_row = item[last]
    size = block[item_of_row]
    partial = (last >= len(tile_item)) & (length[last] < size)
    filled = np.where(partial, length[last], 0)
    more = np.maximum(-(-(RESERVE - np.where(partial, size - filled, 0)) // size), 0)
    used = np.zeros(len(block), np.int64)  # an item's entries up to the last one that is no padding
    np.maximum.at(used, block_item, np.where(own_blocks[:, 1] > 0, block_step + 1, 0))
    of_items = np.bincount(item_of_row, more, len(block)).astype(np.int64)
    by_item = np.argsort(item_of_row, kind="stable")
    tail = np.empty(len(rows), np.int64)
    begins = offsets(more[by_item])[:-1]
    tail[by_item] = begins - (offsets(of_items)[:-1] - used)[item_of_row[by_item]]

    block_tiles = np.maximum(columns["block_tiles"], -(-(used + of_items) // per_tile))
    block0 = offsets(block_tiles * per_tile)
    table = np.zeros((int(block0[-1]), len(RUN_FIELDS)), np.int32)
    table[block0[block_item] + block_step] = own_blocks
    entries = partial + more
    k = np.arange(int(entries.max()))[:, None]
    entry = np.where(partial & (k == 0), step[last], tail + k - partial)
    number, row = np.nonzero((k < entries) & ((k > 0) | ~partial))
    new = block0[item_of_row[row]] + entry[number, row]
    table[new, 0] = (slot - filled)[row] + number * size[row]
    table[new, 2:] = runs[last[row], 2:]
    items = schedule.items.copy()
    items[:, ITEM_FIELDS.index("block0")] = block0[:-1]
    items[:, ITEM_FIELDS.index("block_tiles")] = block_tiles
    made = schedule.changed(items=frozen(items), blocks=frozen(table))
    taken = TakenSlots.of(tree.kv)
    return Room(made, taken, rows, slot, taken.free_behind(slot), item_of_row, entry, entries, size, filled)
