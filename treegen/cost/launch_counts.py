"""What a schedule's launches do, counted from its tables: what the account adds up and the cost model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import INT32_MAX, Longs, offsets, ragged_ranges
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule, TileClass
from treegen.ir.shape import Shape
from treegen.target.problem import Problem
from treegen.target.tile_config import resident_blocks, tile_operations, tile_work

FP32_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class ItemLaunches:
    """Launches of work items, an entry for each tile class that has some, in launch order."""

    blocks: Longs  # thread blocks
    turns: Longs  # work items times lanes: more than blocks where blocks work off lists
    evened: Longs  # turns, if every SM had as many as the one with most of them (see evened_turns)
    full: Longs  # tiles of one run, over all blocks
    packed: Longs  # tiles packed from several runs, over all blocks
    longest_turns: Longs  # turns of the block with the most tiles
    longest_full: Longs  # full tiles of the block with the most tiles
    longest_packed: Longs  # packed tiles of that block
    longest_merges: Longs  # partials that items join to the row with the most before they write
    padded_flops: Longs  # floating-point operations of all tiles, padding included
    tile_flops: Longs  # operations that one tile takes as long as (see tile_work)
    tile_bytes: Longs  # bytes of keys and values in one tile
    tile_rows: Longs  # query head rows of a tile
    resident: Longs  # thread blocks that an SM is taken to hold at a time
    kv_loads: Longs  # tokens that blocks load, per KV head, whether or not L2 serves them
    mask_runs: Longs  # runs with a mask
    q_bytes: Longs  # bytes of queries loaded
    memory_bytes: Longs  # bytes to and from device memory: KV that groups read, once; queries; results; partials merged


@dataclass(frozen=True, slots=True, eq=False)
class MergeLaunches:
    """Launches of merges, an entry for each stage that merges rows."""

    rows: Longs  # merged rows
    read_bytes: Longs  # bytes of partials read
    written_bytes: Longs  # bytes of partials or results written
    longest: Longs  # partials of the row with the most


def item_launches(plan: Plan, schedule: Schedule, problem: Problem) -> ItemLaunches:
    """The launches of work items of a plan's schedule; classes that run unfused launch none."""
    tree, shape, target = problem
    tile_ends = offsets(schedule.tiles[:, 1])
    block_ends, block_runs = offsets(schedule.blocks[:, 1]), offsets(schedule.blocks[:, 1] > 0)
    group_tokens = plan.group_tokens
    table: list[tuple[int, ...]] = []
    for index, tile in enumerate(schedule.classes):
        of_class = slice(schedule.class_indptr[index], schedule.class_indptr[index + 1])
        items = schedule.items[of_class].astype(np.int64)
        if not len(items) or not tile.fused:
            continue
        row0, rows, tile0, full, block0, packed, slot0, group = items.T
        end = block0 + packed * tile.blocks_per_tile
        loads = tile_ends[tile0 + full] - tile_ends[tile0] + block_ends[end] - block_ends[block0]
        # A row whose heads need several tiles has that many thread blocks per KV head, and each loads the KV again.
        head_tiles = -(-shape.group // tile.rows)
        lanes = shape.num_kv_heads * head_tiles
        longest = _longest_block(schedule, tile, full, packed, lanes)
        read = min(int(group_tokens[np.unique(group)].sum()), tree.unique_tokens) * shape.kv_token_bytes
        heads = shape.num_qo_heads
        q_bytes = int(rows.sum()) * heads * shape.head_dim * shape.dtype_bytes
        partial = int(rows[slot0 >= 0].sum()) * shape.partial_bytes
        final = int(rows[slot0 < 0].sum()) * heads * (shape.head_dim_v * shape.dtype_bytes + FP32_BYTES)
        longest_merges, joined = _merged_by_items(schedule, tile, row0, rows)
        table.append(
            (
                len(schedule.work_indptr) - 1 if tile.dealt else len(items) * lanes,
                len(items) * lanes,
                int(evened_turns(len(items) * lanes, target.sms)),
                int(full.sum()) * lanes,
                int(packed.sum()) * lanes,
                *longest,
                longest_merges,
                int((full + packed).sum()) * lanes * tile_operations(tile, shape),
                *tile_work(tile, shape),
                tile.rows,
                resident_blocks(tile, shape, target),
                int(loads.sum()) * head_tiles,
                int((full + block_runs[end] - block_runs[block0]).sum()) if tile.mask != "none" else 0,
                q_bytes,
                read + q_bytes + partial + final + joined * shape.partial_bytes,
            )
        )
    columns = np.array(table, np.int64).reshape(-1, 18).T
    return ItemLaunches(*columns)


def evened_turns(turns: Longs | int, sms: int) -> Longs:
    """What the turns of a launch come to when SMs have different numbers of them, and the others wait for the one with
    most; fewer turns than SMs are as many as they are.
    """
    evened: Longs = np.where(np.greater_equal(turns, sms), -(-turns // sms) * sms, turns)
    return evened


def _longest_block(schedule: Schedule, tile: TileClass, full: Longs, packed: Longs, lanes: int) -> tuple[int, int, int]:
    """Turns, full and packed tiles of the thread block with the most tiles, and of those the most packed ones."""
    if not tile.dealt:
        longest = int(((full + packed) * INT32_MAX + packed).argmax())
        return 1, int(full[longest]), int(packed[longest])
    item = schedule.work.astype(np.int64) // lanes
    turns, fulls, packeds = (
        np.diff(offsets(values)[schedule.work_indptr]) for values in (np.ones(len(item)), full[item], packed[item])
    )
    longest = int((fulls + packeds).argmax())
    return int(turns[longest]), int(fulls[longest]), int(packeds[longest])


def _merged_by_items(schedule: Schedule, tile: TileClass, row0: Longs, rows: Longs) -> tuple[int, int]:
    """Partials that items of a class join to the row with the most, and to all their rows."""
    if not tile.merging:
        return 0, 0
    counts = np.diff(schedule.epilogue_indptr)[ragged_ranges(row0, rows)]
    return int(counts.max()), int(counts.sum())


def merge_launches(schedule: Schedule, shape: Shape) -> MergeLaunches:
    """The launches of merges of a schedule."""
    heads = shape.num_qo_heads
    partial = shape.partial_bytes
    final = heads * (shape.head_dim_v * shape.dtype_bytes + FP32_BYTES)
    table = []
    for _, merges in schedule.stages:
        rows, bounds = schedule.merge_rows[merges], schedule.merge_indptr[merges.start : merges.stop + 1]
        if len(rows):
            kept = int((rows < 0).sum())
            read = int(bounds[-1] - bounds[0]) * partial
            table.append((len(rows), read, kept * partial + (len(rows) - kept) * final, int(np.diff(bounds).max())))
    columns: npt.NDArray[np.int64] = np.array(table, np.int64).reshape(-1, 4).T
    return MergeLaunches(*columns)
