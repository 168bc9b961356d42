"""Splits of walks into work items, and estimates of the results that these write and of the time that they take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from treegen.cost.launch_counts import FP32_BYTES, evened_turns
from treegen.ir.arrays import INT32_MAX
from treegen.search.cohort_sums import Bins, Tally, fold
from treegen.search.path_cuts import Cut
from treegen.search.walk_layout import Floats, WalkLayout
from treegen.target.cost_terms import ITEMS, MERGES, facts_of
from treegen.target.problem import Problem
from treegen.target.targets import Target

WAVES = (0.5, 1, 2, 4, 8)
"""Thread blocks per SM that the splits of a walk make. Each walk is also weighed without a split."""
_CUT_TILES = 0.5  # tiles that a cut through the tokens of a cohort adds
SPLIT_STEP = 64
"""Splits are multiples of this number of tokens."""
_AT_A_TIME = 2  # thread blocks that an SM holds


class BatchTerms(NamedTuple):
    """How launches for running batches differ from those for one tree.

    blocks, memory, chain: the factors of the times of all thread blocks, of memory, and of the longest thread block.
    idle_merge_us: microseconds of the launch that merges, where a plan merges nothing: it is launched for any plan.
    last: SMs that take more thread blocks than fit at a time do not run out of them at the same time; this part of a
    thread block's time is added. sharpness: the exponent of the soft maximum.

    The unevenness of one tree's launches is left out. It makes all SMs wait for the one with most thread blocks; here
    blocks differ in length, and an SM gets the next one as soon as one ends.
    """

    blocks: float
    memory: float
    chain: float
    last: float
    sharpness: float
    idle_merge_us: float


BATCH_TERMS = BatchTerms(blocks=1.15, memory=1.14, chain=1.17, last=0.06, sharpness=4.4, idle_merge_us=1.2)
"""Fitted on an H200 by benchmarks/fit_batches.py, but for the idle merge, which takes 0.7 to 1.3 us on an H100."""


def splits_of(bins: Bins, whole: Tally, layout: WalkLayout, target: Target) -> Floats:
    """Returns the splits of each walk [splits, walks]: none, and for each of WAVES one for this many thread blocks.

    Where there are more cohorts than that, only the longest are split: into items whose time in a thread block that is
    alone on its SM is the time of the walk on full SMs, or a fraction of it.
    """
    tiles, waves = layout.tiles, np.array(WAVES)[:, None]
    wanted = np.maximum(np.floor(waves * target.sms / tiles.lanes), 1.0)
    divided = wanted > whole.cohorts
    throughput_us = (whole.full + whole.packed) * tiles.lanes * tiles.full_us / target.sms
    # On average the last item of a cohort is half as long as the others.
    even = whole.tokens / np.maximum(wanted - whole.cohorts / 2, 0.5)
    splits = np.where(divided, even, tiles.tokens * throughput_us / (tiles.lone_us * waves))
    splits = np.ceil(splits / SPLIT_STEP) * SPLIT_STEP
    excess = bins.sums(bins.cohorts * bins.parts(splits), len(layout.walks)) / wanted
    splits = np.where(divided & (excess > 1), np.ceil(splits * excess / SPLIT_STEP) * SPLIT_STEP, splits)
    splits = np.where(splits < whole.longest, splits, float(INT32_MAX))
    return np.concatenate([np.full((1, len(layout.walks)), float(INT32_MAX)), splits])


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
    batches: BatchTerms | None = None,
) -> Floats:
    """Returns microseconds of each walk with each of its splits, by the terms of the cost model: [splits, walks].

    batches: the terms of kernels for running batches; None for kernels for one tree.
    """
    tree, shape, target = problem
    tiles, facts = layout.tiles, facts_of(target)
    slower, longer, idle_us = 1.0, 1.0, 0.0
    if batches is not None:
        slower, longer, idle_us = batches.blocks, batches.chain / batches.blocks, batches.idle_merge_us
        memory_fraction = facts["memory_fraction"] * batches.blocks / batches.memory
        facts = {**facts, "sharpness": batches.sharpness, "memory_fraction": memory_fraction}
    items, item_rows, written, merged, longest = outputs
    q_row = shape.num_qo_heads * shape.head_dim * shape.dtype_bytes
    final_row = shape.num_qo_heads * (shape.head_dim_v * shape.dtype_bytes + FP32_BYTES)
    memory = tree.unique_tokens * shape.kv_token_bytes + item_rows * q_row
    memory += written * shape.partial_bytes + (item_rows - written) * final_row
    turns = (items * tiles.lanes).astype(np.int64)
    # Splits cut no tile where a cohort reads only one span: a row in a tree whose rows share nothing.
    cut_tiles = _CUT_TILES * ((np.array(layout.rows) > 1) | (len(layout.part) > len(layout.walks)))
    # The longest item has the most packed tiles, which hold the ends of spans, one after another.
    rest = (whole.tokens - whole.full * tiles.tokens) / np.maximum(whole.packed, 1.0)  # tokens of a packed tile
    longest_packed = np.minimum(splits / np.maximum(rest, 1.0), whole.longest_packed)
    longest_full = np.minimum((splits - longest_packed * rest) / tiles.tokens, whole.longest_full)
    longest_packed += cut_tiles * (splits < whole.longest)
    counts = {
        "turns": turns,
        "evened": evened_turns(turns, target.sms) if batches is None else turns,
        "full": whole.full * tiles.lanes,
        "packed": (whole.packed + cut_tiles * (items - whole.cohorts)) * tiles.lanes,
        "longest_turns": longer,
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
        turns_of_sm = turns / target.sms
        follow = turns_of_sm > _AT_A_TIME
        items_us += follow * batches.last * slower * np.maximum(terms["throughput"], terms["traffic"]) / turns_of_sm
    merge_us = MERGES.values(SimpleNamespace(**merges, **facts))["merge_us"] + facts["next_launch_us"]
    times_us: Floats = facts["launch_us"] + items_us + np.where(merged > 0, merge_us, idle_us)
    return times_us
