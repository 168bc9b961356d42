"""Choosing by estimates: a fixed list of policies, weighed all at once in arrays, without plans, in a fraction of a
millisecond. `auto` and kernels for batches choose so where nothing was measured.

A tree's cohorts are counted once for every walk (treegen.search.cohort_counts). Every walk has the same number of
splits, and each of them is a policy: its work items, tiles, partial results and bytes are arrays [splits, walks], and
the terms of the cost model (treegen.target.cost_terms) turn these into microseconds. Items are counted; what a split
adds to a walk's tiles, and the tiles of its longest item, are estimated.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from treegen.cost.figures import time_text
from treegen.cost.launch_counts import FP32_BYTES, evened_turns
from treegen.ir.arrays import INT32_MAX
from treegen.ir.schedule import TileClass
from treegen.ir.tree import Tree
from treegen.search.cohort_counts import (
    MOST_CUTS,
    MOST_KEPT,
    WHOLE,
    Bins,
    Cohorts,
    Cut,
    Floats,
    Tally,
    WalkLayout,
    bins_of,
    cohorts_of,
    cuts_of,
    fold,
    layout_of,
    tally,
)
from treegen.search.size import fits_whole_paths, is_too_large
from treegen.strategies.baselines import query
from treegen.strategies.cohort import Cohort
from treegen.strategies.strategy import Choice, Strategy
from treegen.target.cost_terms import ITEMS, MERGES, facts_of
from treegen.target.problem import Problem
from treegen.target.targets import Target

WAVES = (0.5, 1, 2, 4, 8)
"""Thread blocks per SM that the splits of a walk make. Every walk is weighed without a split, too."""
NOTHING = "nothing to do"
"""The reason of a choice for a tree whose rows see nothing."""
MOST_POLICIES = (1 + len(WAVES)) * (len(WHOLE) + MOST_CUTS)
"""Policies that are weighed at most."""

_WAVE_US = 8.0
"""Microseconds that a wave of thread blocks, two on every SM, takes besides where paths are split, in kernels with one
tile class (treegen.runtime.batch_kernel). Fitted on an H200 to 34 running batches with 14 to 36 policies each: what is
chosen then takes 1.014 times the time of the best policy on average, and 1.077 at most; without it 1.032 and 1.119.
"""
_CUT_TILES = 0.5  # tiles that a cut through the tokens of a cohort adds
_STEP = 64  # splits are multiples of so many tokens


def weighed(problem: Problem, *, most_items: int | None = None, tile: TileClass | None = None) -> Choice:
    """Chooses the policy with the least estimated time from a fixed list.

    Args:
        problem: A tree, the attention shape of its rows, and the target.
        most_items: Leaves out policies whose plans have more work items. If all have more, takes one with the fewest.
        tile: The tile class of all plans, where launches have but one; policies then name no tile.

    Returns:
        A `query` or `cohort` strategy, which can plan any tree, and a reason with its estimated time.

    Raises:
        ShapeError: No tile class fits the shape.
    """
    weights = weights_of(problem, tile)
    if weights is None:
        return Choice(as_named(Cohort(1), problem.tree), NOTHING)
    place = weights.best_planned(problem) if most_items is None else weights.best(most_items)
    strategy = as_named(weights.policy(place), problem.tree)
    return Choice(strategy, weights.reason(strategy, float(weights.times_us[place])))


def candidates(problem: Problem, most: int | None = None) -> list[tuple[Strategy, float]]:
    """All policies, or the best `most` of them, each with its estimated microseconds, by rising times. Those whose
    plans are too large for the tree are left out. Errors as of `weighed`.
    """
    weights = weights_of(problem)
    found: dict[Strategy, float] = {}
    if weights is not None:
        every = fits_whole_paths(problem.tree)
        for place in weights.order():
            policy = as_named(weights.policy(place), problem.tree)
            if every or not is_too_large(policy, problem.tree, problem.shape):
                found.setdefault(policy, float(weights.times_us[place]))
            if len(found) == most:
                break
    return list(found.items())


def as_named(strategy: Strategy, tree: Tree) -> Strategy:
    """`query` for a cohort of one row with its whole path, where both plan the tree alike."""
    if isinstance(strategy, Cohort) and _is_query(strategy) and not _has_rows_inside(tree):
        return query(strategy.split)
    return strategy


def _is_query(strategy: Cohort) -> bool:
    return strategy.head_rows == 1 and strategy.tile is None and strategy.apart is None and not strategy.cut


def _has_rows_inside(tree: Tree) -> bool:
    """Whether rows of a node see different parts of it: `query` reads each in one piece, a cohort of one row cut."""
    node = tree.topology.spans.node
    return bool((node[1:] == node[:-1]).any())


class Weights(NamedTuple):
    """Policies with their estimated times.

    walks: a policy without split for each walk. splits [splits, walks]: tokens per work item, INT32_MAX where nothing
    is split. times_us [splits, walks]: microseconds. cohorts, layout, whole: of all walks.
    """

    walks: tuple[Cohort, ...]
    splits: Floats
    times_us: Floats
    cohorts: Cohorts
    layout: WalkLayout
    whole: Tally

    @property
    def query_us(self) -> float:
        """Microseconds of plain per-row decoding with its best split."""
        alone = [place for place, walk in enumerate(self.walks) if walk.head_rows == 1 and walk.apart is None]
        return float(self.times_us[:, alone].min())

    def reason(self, strategy: Strategy, time_us: float) -> str:
        """Why a strategy is taken that takes so many microseconds."""
        taken, number = time_text(time_us), self.times_us.size
        if strategy.name == "query":
            return f"sharing does not pay: plain per-row decoding takes least of {number} policies, {taken}"
        plain = time_text(self.query_us)
        return f"least estimated time of {number} policies, {taken}; plain per-row decoding takes {plain}"

    def policy(self, place: tuple[int, int]) -> Cohort:
        """The policy at a place of `times_us`."""
        walk, split = self.walks[place[1]], int(self.splits[place])
        return walk if split == INT32_MAX else replace(walk, split=split)

    def items(self, place: tuple[int, int]) -> int:
        """Work items of that policy's plan."""
        return self.cohorts.items(place[1], float(self.splits[place]))

    def best(self, most_items: int | None = None) -> tuple[int, int]:
        """The place of the policy with the least time that has at most `most_items`, else of one with the fewest."""
        walks = len(self.walks)
        if most_items is None:
            return divmod(int(self.times_us.argmin()), walks)
        places, items = self.order(), []
        for place in places:
            items.append(self.items(place))
            if items[-1] <= most_items:
                return place
        return places[items.index(min(items))]

    def best_planned(self, problem: Problem) -> tuple[int, int]:
        """The place of the policy with the least time whose plan is not too large for the tree, else of the one whose
        plan is smallest.
        """
        tree, shape, _ = problem
        if fits_whole_paths(tree):
            return self.best()
        places = self.order()
        fitting = (place for place in places if not is_too_large(self.policy(place), tree, shape))
        return next(fitting, None) or min(places, key=lambda place: self.policy(place).plan_size(tree, shape))

    def order(self) -> list[tuple[int, int]]:
        """All places by rising times."""
        return [divmod(index, len(self.walks)) for index in self.times_us.argsort(axis=None, kind="stable").tolist()]


def weights_of(problem: Problem, tile: TileClass | None = None) -> Weights | None:
    """Weighs every policy of the list; None where no row sees anything. Arguments and errors as of `weighed`."""
    tree, shape, target = problem
    if not len(tree.topology.spans):
        return None
    cuts = cuts_of(tree)
    make = layout_of if tree.num_rows <= MOST_KEPT else layout_of.__wrapped__
    layout = make(shape, target, tree.num_rows, len(cuts), tile)
    cohorts = cohorts_of(tree, layout, cuts)
    bins, whole = bins_of(cohorts), tally(cohorts, len(layout.walks))
    splits = _splits(bins, whole, layout, target)
    whole_paths = len(layout.walks) - len(cuts)
    cut = [replace(walk, apart=cut.apart) for walk, cut in zip(layout.walks[whole_paths:], cuts, strict=True)]
    outputs = _outputs(bins.parts(splits), bins, layout, cuts, tree.num_rows)
    times_us = _times_us(splits, outputs, whole, layout, problem)
    if tile is not None:
        waves = outputs.items * layout.tiles.lanes / (2 * target.sms)
        times_us = times_us + _WAVE_US * np.where(outputs.merged > 0, waves, 0.0)
    return Weights((*layout.walks[:whole_paths], *cut), splits, times_us, cohorts, layout, whole)


def _splits(bins: Bins, whole: Tally, layout: WalkLayout, target: Target) -> Floats:
    """The splits of every walk [splits, walks]: none, and for each of WAVES what makes so many thread blocks.

    Where there are more cohorts than that, only the longest are split: into items that take a thread block, alone on an
    SM, the time of the walk on full SMs, or a fraction of it.
    """
    tiles, waves = layout.tiles, np.array(WAVES)[:, None]
    wanted = np.maximum(np.floor(waves * target.sms / tiles.lanes), 1.0)
    divided = wanted > whole.cohorts
    throughput_us = (whole.full + whole.packed) * tiles.lanes * tiles.full_us / target.sms
    # The last item of a cohort is half as long as the others on average.
    even = whole.tokens / np.maximum(wanted - whole.cohorts / 2, 0.5)
    splits = np.where(divided, even, tiles.tokens * throughput_us / (tiles.lone_us * waves))
    splits = np.ceil(splits / _STEP) * _STEP
    excess = bins.sums(bins.cohorts * bins.parts(splits), len(layout.walks)) / wanted
    splits = np.where(divided & (excess > 1), np.ceil(splits * excess / _STEP) * _STEP, splits)
    splits = np.where(splits < whole.longest, splits, float(INT32_MAX))
    return np.concatenate([np.full((1, len(layout.walks)), float(INT32_MAX)), splits])


class _Outputs(NamedTuple):
    """What policies write: [splits, walks] each.

    items: work items. item_rows: rows of all items; written: those of items that write partial results. merged: rows
    that the launch of merges writes; longest: partial results of the row that has most.
    """

    items: Floats
    item_rows: Floats
    written: Floats
    merged: Floats
    longest: Floats


def _outputs(parts: Floats, bins: Bins, layout: WalkLayout, cuts: list[Cut], num_rows: int) -> _Outputs:
    """The results of cohorts in `parts` [splits, bins] work items."""
    walks, lower = len(layout.walks), len(cuts)
    # The share of a chunk's rows that have results in a walk's other chunk, too.
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
    return _Outputs(items, item_rows, written, merged, np.where(written > 0, longest, 0.0))


def _times_us(splits: Floats, outputs: _Outputs, whole: Tally, layout: WalkLayout, problem: Problem) -> Floats:
    """Microseconds of every walk with each of its splits, by the terms of the cost model: [splits, walks]."""
    tree, shape, target = problem
    tiles, facts = layout.tiles, facts_of(target)
    items, item_rows, written, merged, longest = outputs
    q_row = shape.num_qo_heads * shape.head_dim * shape.dtype_bytes
    final_row = shape.num_qo_heads * (shape.head_dim_v * shape.dtype_bytes + FP32_BYTES)
    memory = tree.unique_tokens * shape.kv_token_bytes + item_rows * q_row
    memory += written * shape.partial_bytes + (item_rows - written) * final_row
    turns = (items * tiles.lanes).astype(np.int64)
    # Splits fall on borders of tiles where a cohort reads one span: one row of a tree whose rows share nothing.
    cut_tiles = _CUT_TILES * ((np.array(layout.rows) > 1) | (len(layout.part) > len(layout.walks)))
    # The longest item is where most packed tiles are, which are the ends of spans, one behind another.
    rest = (whole.tokens - whole.full * tiles.tokens) / np.maximum(whole.packed, 1.0)  # tokens of a packed tile
    longest_packed = np.minimum(splits / np.maximum(rest, 1.0), whole.longest_packed)
    longest_full = np.minimum((splits - longest_packed * rest) / tiles.tokens, whole.longest_full)
    longest_packed += cut_tiles * (splits < whole.longest)
    counts = {
        "turns": turns,
        "evened": evened_turns(turns, target.sms),
        "full": whole.full * tiles.lanes,
        "packed": (whole.packed + cut_tiles * (items - whole.cohorts)) * tiles.lanes,
        "longest_turns": 1.0,
        "longest_full": longest_full,
        "longest_packed": longest_packed,
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
    items_us = ITEMS.values(SimpleNamespace(**counts, **facts))["items_us"]
    merge_us = MERGES.values(SimpleNamespace(**merges, **facts))["merge_us"] + facts["next_launch_us"]
    times_us: Floats = facts["launch_us"] + items_us + np.where(merged > 0, merge_us, 0.0)
    return times_us
