"""Counts of a schedule's launches, from its tables: the account adds them up, and the cost model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Generic, TypeVar

import numpy as np

from treegen.ir.arrays import INT32_MAX, Longs, offsets, ragged_ranges
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.target.problem import Problem
from treegen.target.tile_config import lanes_of, resident_blocks, tile_operations, tile_work

FP32_BYTES = 4
Count = TypeVar("Count", int, Longs)
"""A number for one launch, or an array with an entry for each of several launches."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemCounts(Generic[Count]):
    """Counts of one launch of work items, or of several."""

    blocks: Count  # thread blocks
    pieces: Count  # work items times lanes: more than thread blocks where these work off lists
    even_pieces: Count  # pieces, rounded up to a multiple of the SMs (see even_pieces)
    full: Count  # full tiles, over all thread blocks
    packed: Count  # tiles packed from several runs, over all thread blocks
    longest_pieces: Count  # pieces of the thread block with the most tiles
    longest_full: Count  # full tiles of the thread block with the most tiles
    longest_packed: Count  # packed tiles of that thread block
    longest_merges: Count  # the most partials of a row that items join before they write
    padded_flops: Count  # floating-point operations of all tiles, padding included
    tile_flops: Count  # operations that take the time of one tile (see tile_work)
    tile_bytes: Count  # bytes of keys and values in one tile
    tile_rows: Count  # query head rows of a tile
    resident: Count  # thread blocks that an SM is assumed to hold at a time
    kv_loads: Count  # tokens that thread blocks load, per KV head, whether or not L2 serves them
    mask_runs: Count  # runs with a mask
    q_bytes: Count  # bytes of queries loaded
    memory_bytes: Count  # bytes to and from device memory: KV that groups read, once; queries; results; partials merged


@dataclass(frozen=True, slots=True, eq=False)
class MergeCounts(Generic[Count]):
    """Counts of one launch of merges, or of several."""

    rows: Count  # merged rows
    read_bytes: Count  # bytes of partials read
    written_bytes: Count  # bytes of partials or results written
    longest: Count  # the most partials of a row


class ItemLaunches(ItemCounts[Longs]):
    """Launches of work items, with an entry for each kernel config that has items, in launch order."""

    __slots__ = ()


class MergeLaunches(MergeCounts[Longs]):
    """Launches of merges, with an entry for each round that merges rows."""

    __slots__ = ()


_ITEM_COUNTS = tuple(field.name for field in fields(ItemCounts))
_MERGE_COUNTS = tuple(field.name for field in fields(MergeCounts))


def item_launches(plan: Plan, schedule: Schedule, problem: Problem) -> ItemLaunches:
    """Counts the launches of work items of a plan's schedule; unfused configs have none."""
    tree, shape, target = problem
    tile_ends = offsets(schedule.tiles[:, 1])
    run_ends, run_counts = offsets(schedule.packed_runs[:, 1]), offsets(schedule.packed_runs[:, 1] > 0)
    group_tokens = plan.group_tokens
    launches: list[ItemCounts[int]] = []
    for index, config in enumerate(schedule.configs):
        of_config = slice(schedule.config_indptr[index], schedule.config_indptr[index + 1])
        items = schedule.items[of_config].astype(np.int64)
        if not len(items) or not config.fused:
            continue
        row0, rows, tile0, full, run0, packed, partial0, group = items.T
        end = run0 + packed * config.runs_per_tile
        loads = tile_ends[tile0 + full] - tile_ends[tile0] + run_ends[end] - run_ends[run0]
        # A row whose heads need several tiles has a thread block for each of them, per KV head; each loads the KV.
        lanes = lanes_of(config, shape)
        longest_pieces, longest_full, longest_packed = _longest_block(schedule, config, full, packed, lanes)
        read = min(int(group_tokens[np.unique(group)].sum()), tree.unique_tokens) * shape.kv_token_bytes
        heads = shape.num_qo_heads
        q_bytes = int(rows.sum()) * heads * shape.head_dim * shape.dtype_bytes
        partial = int(rows[partial0 >= 0].sum()) * shape.partial_bytes
        final = int(rows[partial0 < 0].sum()) * heads * (shape.head_dim_v * shape.dtype_bytes + FP32_BYTES)
        longest_merges, joined = _merged_by_items(schedule, config, row0, rows)
        pieces, tiles = len(items) * lanes, int((full + packed).sum()) * lanes
        tile_flops, tile_bytes = tile_work(config, shape)
        launches.append(
            ItemCounts(
                blocks=len(schedule.work_indptr) - 1 if config.work_list else pieces,
                pieces=pieces,
                even_pieces=int(even_pieces(pieces, target.sms)),
                full=int(full.sum()) * lanes,
                packed=int(packed.sum()) * lanes,
                longest_pieces=longest_pieces,
                longest_full=longest_full,
                longest_packed=longest_packed,
                longest_merges=longest_merges,
                padded_flops=tiles * tile_operations(config, shape),
                tile_flops=tile_flops,
                tile_bytes=tile_bytes,
                tile_rows=config.rows,
                resident=resident_blocks(config, shape, target),
                kv_loads=int(loads.sum()) * (lanes // shape.num_kv_heads),
                mask_runs=int((full + run_counts[end] - run_counts[run0]).sum()) if config.mask != "none" else 0,
                q_bytes=q_bytes,
                memory_bytes=read + q_bytes + partial + final + joined * shape.partial_bytes,
            )
        )
    return ItemLaunches(*_columns(launches, _ITEM_COUNTS))


def even_pieces(pieces: Longs | int, sms: int) -> Longs:
    """Rounds the pieces of a launch up to a multiple of the SMs, because all SMs wait for the busiest one.

    Leaves counts below the number of SMs unchanged.
    """
    even: Longs = np.where(np.greater_equal(pieces, sms), -(-pieces // sms) * sms, pieces)
    return even


def _longest_block(
    schedule: Schedule, config: KernelConfig, full: Longs, packed: Longs, lanes: int
) -> tuple[int, int, int]:
    """Returns pieces, full and packed tiles of the thread block with the most tiles.

    Of several such thread blocks it is the one with the most packed tiles.
    """
    if not config.work_list:
        longest = int(((full + packed) * INT32_MAX + packed).argmax())
        return 1, int(full[longest]), int(packed[longest])
    item = schedule.work.astype(np.int64) // lanes
    pieces, fulls, packeds = (
        np.diff(offsets(values)[schedule.work_indptr]) for values in (np.ones(len(item)), full[item], packed[item])
    )
    longest = int((fulls + packeds).argmax())
    return int(pieces[longest]), int(fulls[longest]), int(packeds[longest])


def _merged_by_items(schedule: Schedule, config: KernelConfig, row0: Longs, rows: Longs) -> tuple[int, int]:
    """Returns the partials that items of a config join: the most of a row, and those of all their rows."""
    if not config.epilogue_merge:
        return 0, 0
    counts = np.diff(schedule.epilogue_indptr)[ragged_ranges(row0, rows)]
    return int(counts.max()), int(counts.sum())


def merge_launches(schedule: Schedule, shape: Shape) -> MergeLaunches:
    """Counts the launches of merges of a schedule."""
    heads = shape.num_qo_heads
    partial = shape.partial_bytes
    final = heads * (shape.head_dim_v * shape.dtype_bytes + FP32_BYTES)
    launches: list[MergeCounts[int]] = []
    for _, merges in schedule.rounds:
        rows, bounds = schedule.merge_rows[merges], schedule.merge_indptr[merges.start : merges.stop + 1]
        if len(rows):
            kept = int((rows < 0).sum())
            launches.append(
                MergeCounts(
                    rows=len(rows),
                    read_bytes=int(bounds[-1] - bounds[0]) * partial,
                    written_bytes=kept * partial + (len(rows) - kept) * final,
                    longest=int(np.diff(bounds).max()),
                )
            )
    return MergeLaunches(*_columns(launches, _MERGE_COUNTS))


def _columns(launches: Sequence[object], names: tuple[str, ...]) -> Longs:
    """Gathers the counts with these names: a row for each name, with an entry for each launch."""
    counts = attrgetter(*names)
    table: Longs = np.array([counts(launch) for launch in launches], np.int64).reshape(-1, len(names)).T
    return table
