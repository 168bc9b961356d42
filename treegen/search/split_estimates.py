"""Splits of walks into work items, and estimates of the results that these write and of the time that they take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from treegen.cost.launch_counts import FP32_BYTES, even_pieces
from treegen.ir.arrays import INT32_MAX, Floats
from treegen.ir.shape import Shape
from treegen.search.cohort_sums import Bins, Tally, fold
from treegen.search.path_cuts import Cut
from treegen.search.walk_layout import WalkLayout
from treegen.strategies.context_cuts import SPLIT_STEP, even_share
from treegen.target.cost_terms import ITEMS, MERGES, facts_of
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.tile_config import is_latent

F = TypeVar("F", float, Floats)

BLOCKS_PER_SM = (1, 2, 4, 8)
"""Thread blocks per SM that splits of a walk make. Each walk is also weighed without a split, and in even shares."""
BATCH_BLOCKS_PER_SM = (1, 2)
"""The same for running batches. On an H200 more of them made the choices for 463 measured batches no faster."""
EVEN_SHARES = "even"
"""The name of the split in even shares of all thread blocks that the GPU holds at a time."""
EVEN_ROW = 1
"""The row of this split in arrays [splits, walks]."""
CUT_TILES = 0.5  # tiles that a cut through the tokens of a cohort adds


def splits_of(
    bins: Bins, whole: Tally, layout: WalkLayout, shape: Shape, target: Target, blocks_per_sm: tuple[int, ...]
) -> Floats:
    """Returns the splits of each walk [splits, walks]: none, in even shares, and one for each number of blocks per SM.

    Where there are more cohorts than that, only the longest are split: into items whose time in a thread block that is
    alone on its SM is the time of the walk on full SMs, or a fraction of it.

    Latent keys, whose tiles take longer than the constants say, have even shares instead of thread blocks per SM. On an
    H200, 64 requests with 16:1 heads take 1.03 times as long with 2 thread blocks per SM, and 1.6 times with 1.
    """
    tiles, blocks = layout.tiles, np.array(blocks_per_sm)[:, None]
    wanted = np.maximum(np.floor(blocks * target.sms / tiles.lanes), 1.0)
    divided = wanted > whole.cohorts
    throughput_us = (whole.full + whole.packed) * tiles.lanes * tiles.full_us / target.sms
    # On average the last item of a cohort is half as long as the others.
    even = whole.tokens / np.maximum(wanted - whole.cohorts / 2, 0.5)
    splits = np.where(divided, even, tiles.tokens * throughput_us / (tiles.lone_us * blocks))
    splits = np.ceil(splits / SPLIT_STEP) * SPLIT_STEP
    excess = bins.sums(bins.cohorts * bins.parts(splits), len(layout.walks)) / wanted
    splits = np.where(divided & (excess > 1), np.ceil(splits * excess / SPLIT_STEP) * SPLIT_STEP, splits)
    even_shares = even_share(whole.tokens, shares_of(layout, target))
    splits = np.concatenate([even_shares[None], np.where(is_latent(shape), even_shares, splits)])
    splits = np.where(splits < whole.longest, splits, float(INT32_MAX))
    return np.concatenate([np.full((1, len(layout.walks)), float(INT32_MAX)), splits])


def shares_of(layout: WalkLayout, target: Target) -> Floats:
    """Returns the work items that the GPU holds at a time, for each walk."""
    shares: Floats = layout.tiles.held * target.sms / layout.tiles.lanes
    return shares


class SplitOutputs(NamedTuple):
    """The results that policies write, [splits, walks] each.

    Attributes:
        items: Work items.
        item_rows: Rows of all items.
        written: Rows of the items that write partial results.
        merged: Rows that the merge launch writes.
        longest: The most partial results of a row.
    """

    items: Floats
    item_rows: Floats
    written: Floats
    merged: Floats
    longest: Floats


def outputs_of(parts: Floats, bins: Bins, layout: WalkLayout, cuts: list[Cut], num_rows: int) -> SplitOutputs:
    """Returns the results of cohorts in `parts` [splits, bins] work items."""
    walks, lower = len(layout.walks), len(cuts)
    # The share of a chunk's rows that have results in the other chunk of its walk, too.
    share = np.zeros(walks + lower)
    share[walks:] = 1.0
    share[walks - lower : walks] = [float((cut.hi - cut.lo).sum()) / num_rows for cut in cuts]
    share = share.repeat(bins.counts)
    several = parts > 1
    # Rows with results in both chunks are counted in the lower one.
    merged = (1 - share) * several
    if lower:
        below = slice(bins.first.item(walks), None)
        merged[:, below] = parts[:, below] > 0
    columns = np.empty((4, *parts.shape))
    np.multiply(bins.cohorts, parts, out=columns[0])
    np.multiply(bins.rows, parts, out=columns[1])
    np.multiply(columns[1], np.where(several, 1.0, share), out=columns[2])
    np.multiply(bins.rows, merged, out=columns[3])
    items, item_rows, written, merged = bins.sums(columns, walks)
    seeing = bins.sums(bins.rows * (bins.tokens > 0), walks)
    merged[:, : walks - lower] += num_rows - seeing[: walks - lower]  # rows that see nothing
    longest = fold(np.maximum.reduceat(parts, bins.first, axis=1), walks, np.add)
    return SplitOutputs(items, item_rows, written, merged, np.where(written > 0, longest, 0.0))


class BatchTimes(NamedTuple):
    """The times of policies of running batches, but for the thread block that ends last with its items.

    Attributes:
        tile_us: `[walks]`; microseconds of a tile in that thread block.
        busy_us: `[splits, walks]`; microseconds for which all SMs, or the memory, are busy.
        rest_us: `[splits, walks]`; microseconds besides: of launches, and of merges.
        sharpness: The exponent of the soft maximum of that thread block's time and `busy_us`.
        item_tiles: Tiles that the thread block takes besides for each item.
    """

    tile_us: Floats
    busy_us: Floats
    rest_us: Floats
    sharpness: float
    item_tiles: float

    def times_us(self, tiles: Floats) -> Floats:
        """Returns the microseconds of all policies, if the thread block that ends last reads these tiles.

        tiles: `[splits, walks]`.
        """
        times_us: Floats = self.rest_us + self._joined(self.tile_us * tiles, self.busy_us)
        return times_us

    def time_us(self, place: tuple[int, int], tiles: float) -> float:
        """Returns the microseconds of the policy at a place, if the thread block that ends last reads these tiles."""
        chain_us = self.tile_us.item(place[1]) * tiles
        return float(self.rest_us.item(place) + self._joined(chain_us, self.busy_us.item(place)))

    def _joined(self, chain_us: F, busy_us: F) -> F:
        joined: F = (chain_us**self.sharpness + busy_us**self.sharpness) ** (1 / self.sharpness)
        return joined


def times_of(splits: Floats, outputs: SplitOutputs, whole: Tally, layout: WalkLayout, problem: Problem) -> Floats:
    """Returns microseconds of each walk with each of its splits, by the terms of the cost model: [splits, walks]."""
    facts = facts_of(problem.target)
    counts, merges = _counts_of(outputs, whole, layout, problem)
    longest_full, longest_packed = _longest_item(splits, whole, layout)
    counts["even_pieces"] = even_pieces(counts["pieces"], problem.target.sms)
    counts["longest_full"] = longest_full
    counts["longest_packed"] = longest_packed + _cut_tiles(layout) * (splits < whole.longest)
    items_us = ITEMS.values(SimpleNamespace(**counts, **facts))["items_us"]
    merge_us = MERGES.values(SimpleNamespace(**merges, **facts))["merge_us"] + facts["next_launch_us"]
    times_us: Floats = facts["launch_us"] + items_us + np.where(outputs.merged > 0, merge_us, 0.0)
    return times_us


def batch_times_of(outputs: SplitOutputs, whole: Tally, layout: WalkLayout, problem: Problem) -> BatchTimes:
    """Returns the times of policies of running batches, by the terms of the cost model and constants of their own."""
    facts, batches = facts_of(problem.target), problem.target.batch_constants
    counts, merges = _counts_of(outputs, whole, layout, problem)
    terms = ITEMS.values(SimpleNamespace(**counts, **facts))
    merge_us = batches.merge_factor * MERGES.values(SimpleNamespace(**merges, **facts))["merge_traffic"]
    sharpness, blocks_us = facts["sharpness"], batches.blocks_factor * terms["throughput"]
    return BatchTimes(
        layout.tiles.lone_us,
        (blocks_us**sharpness + terms["traffic"] ** sharpness) ** (1 / sharpness),
        facts["launch_us"] + np.where(outputs.merged > 0, merge_us + facts["next_launch_us"], batches.idle_merge_us),
        sharpness,
        batches.item_tiles,
    )


def least_tiles(splits: Floats, outputs: SplitOutputs, whole: Tally, layout: WalkLayout, problem: Problem) -> Floats:
    """Returns the tiles that the thread block that ends last reads at least, [splits, walks]: those of the longest
    item, or of all items if thread blocks share them evenly.
    """
    target = problem.target
    longest = np.minimum(splits, whole.longest) / layout.tiles.tokens + target.batch_constants.item_tiles
    every = whole.tokens / layout.tiles.tokens + target.batch_constants.item_tiles * outputs.items
    tiles: Floats = np.maximum(longest, every / shares_of(layout, target))
    return tiles


def tiles_of_last(parts: Floats, blocks: int) -> float:
    """Returns the tiles that the thread block that ends last reads, if each takes the longest part that is left.

    parts: `[items]`; the tiles of each item, with those that it takes besides.
    """
    rising = np.sort(parts)
    loads, left = rising[-blocks:], len(parts) - blocks
    while left > 0:
        behind = rising[max(0, left - blocks) : left]
        loads[: len(behind)] += behind[::-1]
        loads.sort()
        left -= blocks
    return float(loads[-1])


def _counts_of(
    outputs: SplitOutputs, whole: Tally, layout: WalkLayout, problem: Problem
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the counts of launches of items, without their longest ones, and of merges: [splits, walks] each."""
    tree, shape, _ = problem
    tiles = layout.tiles
    items, item_rows, written, merged, longest = outputs
    q_row = shape.num_qo_heads * shape.head_dim * shape.dtype_bytes
    final_row = shape.num_qo_heads * (shape.head_dim_v * shape.dtype_bytes + FP32_BYTES)
    memory = tree.unique_tokens * shape.kv_token_bytes + item_rows * q_row
    memory += written * shape.partial_bytes + (item_rows - written) * final_row
    pieces = (items * tiles.lanes).astype(np.int64)
    counts = {
        "pieces": pieces,
        "even_pieces": pieces,
        "full": whole.full * tiles.lanes,
        "packed": (whole.packed + _cut_tiles(layout) * (items - whole.cohorts)) * tiles.lanes,
        "longest_pieces": 1.0,
        "longest_full": 0.0,
        "longest_packed": 0.0,
        "longest_merges": 0.0,
        "tile_flops": tiles.flops,
        "tile_bytes": tiles.loaded,
        "tile_rows": tiles.rows,
        "memory_bytes": memory,
    }
    merges = {
        "read_bytes": written * float(shape.partial_bytes),
        "written_bytes": merged * float(final_row),
        "longest": longest,
    }
    return counts, merges


def _cut_tiles(layout: WalkLayout) -> Floats:
    """Returns the tiles that a cut through the tokens of a cohort adds, for each walk.

    Splits cut no tile where a cohort reads only one span: a row in a tree whose rows share nothing.
    """
    cut: Floats = np.where((np.array(layout.rows) > 1) | (len(layout.part) > len(layout.walks)), CUT_TILES, 0.0)
    return cut


def _longest_item(splits: Floats, whole: Tally, layout: WalkLayout) -> tuple[Floats, Floats]:
    """Returns the full and the packed tiles of the longest item: [splits, walks].

    It has the most packed tiles, which hold the ends of spans, one after another.
    """
    tokens = layout.tiles.tokens
    rest = (whole.tokens - whole.full * tokens) / np.maximum(whole.packed, 1.0)  # tokens of a packed tile
    packed = np.minimum(splits / np.maximum(rest, 1.0), whole.longest_packed)
    full = np.minimum((splits - packed * rest) / tokens, whole.longest_full)
    return full, packed
