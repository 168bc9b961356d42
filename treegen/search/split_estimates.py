"""Splits of walks into work items, and estimates of the results that these write and of the time that they take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

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
from treegen.target.targets import BatchConstants, Target
from treegen.target.tile_config import is_latent

BLOCKS_PER_SM = (1, 2, 4, 8)
"""Thread blocks per SM that splits of a walk make. Each walk is also weighed without a split, and in even shares."""
EVEN_SHARES = "even"
"""The name of the split in even shares of all thread blocks that the GPU holds at a time."""
EVEN_ROW = 1
"""The row of this split in arrays [splits, walks]."""
_CUT_TILES = 0.5  # tiles that a cut through the tokens of a cohort adds


def splits_of(bins: Bins, whole: Tally, layout: WalkLayout, shape: Shape, target: Target) -> Floats:
    """Returns the splits of each walk [splits, walks]: none, in even shares, and one for each number of BLOCKS_PER_SM.

    Where there are more cohorts than that, only the longest are split: into items whose time in a thread block that is
    alone on its SM is the time of the walk on full SMs, or a fraction of it.

    Latent keys, whose tiles take longer than the constants say, have even shares instead of thread blocks per SM. On an
    H200, 64 requests with 16:1 heads take 1.03 times as long with 2 thread blocks per SM, and 1.6 times with 1.
    """
    tiles, blocks = layout.tiles, np.array(BLOCKS_PER_SM)[:, None]
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


def times_of(
    splits: Floats,
    outputs: SplitOutputs,
    whole: Tally,
    layout: WalkLayout,
    problem: Problem,
    batches: BatchConstants | None = None,
) -> Floats:
    """Returns microseconds of each walk with each of its splits, by the terms of the cost model: [splits, walks].

    batches: the constants of kernels for running batches; None for kernels for one tree.
    """
    tree, shape, target = problem
    tiles, facts = layout.tiles, facts_of(target)
    slower, longer, idle_us = 1.0, 1.0, 0.0
    if batches is not None:
        slower, idle_us = batches.blocks_factor, batches.idle_merge_us
        longer = batches.chain_factor / slower
        memory_fraction = facts["memory_fraction"] * slower / batches.memory_factor
        facts = {**facts, "sharpness": batches.sharpness, "memory_fraction": memory_fraction}
    items, item_rows, written, merged, longest = outputs
    q_row = shape.num_qo_heads * shape.head_dim * shape.dtype_bytes
    final_row = shape.num_qo_heads * (shape.head_dim_v * shape.dtype_bytes + FP32_BYTES)
    memory = tree.unique_tokens * shape.kv_token_bytes + item_rows * q_row
    memory += written * shape.partial_bytes + (item_rows - written) * final_row
    pieces = (items * tiles.lanes).astype(np.int64)
    # Splits cut no tile where a cohort reads only one span: a row in a tree whose rows share nothing.
    cut_tiles = _CUT_TILES * ((np.array(layout.rows) > 1) | (len(layout.part) > len(layout.walks)))
    longest_full, longest_packed = _longest_item(splits, whole, layout)
    longest_packed = longest_packed + cut_tiles * (splits < whole.longest)
    counts = {
        "pieces": pieces,
        "even_pieces": even_pieces(pieces, target.sms) if batches is None else pieces,
        "full": whole.full * tiles.lanes,
        "packed": (whole.packed + cut_tiles * (items - whole.cohorts)) * tiles.lanes,
        "longest_pieces": longer,
        "longest_full": longest_full * longer,
        "longest_packed": longest_packed * longer,
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
    terms = ITEMS.values(SimpleNamespace(**counts, **facts))
    items_us = slower * terms["items_us"]
    if batches is not None:
        pieces_of_sm = pieces / target.sms
        even = (splits * shares_of(layout, target) >= whole.tokens) & (splits < INT32_MAX)
        follow = (pieces_of_sm > tiles.held) & ~even
        last_us = batches.last_part * slower * np.maximum(terms["throughput"], terms["traffic"]) / pieces_of_sm
        items_us += follow * last_us
    merge_us = MERGES.values(SimpleNamespace(**merges, **facts))["merge_us"] + facts["next_launch_us"]
    times_us: Floats = facts["launch_us"] + items_us + np.where(merged > 0, merge_us, idle_us)
    return times_us


def _longest_item(splits: Floats, whole: Tally, layout: WalkLayout) -> tuple[Floats, Floats]:
    """Returns the full and the packed tiles of the longest item: [splits, walks].

    It has the most packed tiles, which hold the ends of spans, one after another.
    """
    tokens = layout.tiles.tokens
    rest = (whole.tokens - whole.full * tokens) / np.maximum(whole.packed, 1.0)  # tokens of a packed tile
    packed = np.minimum(splits / np.maximum(rest, 1.0), whole.longest_packed)
    full = np.minimum((splits - packed * rest) / tokens, whole.longest_full)
    return full, packed
