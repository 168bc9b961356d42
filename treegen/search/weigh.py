"""Choosing by estimates: a fixed list of policies is weighed in arrays, in a fraction of a millisecond.

Nothing is planned for that. `auto` and kernels for running batches choose so where nothing was measured.

A tree's cohorts are counted once for every walk (treegen.search.cohort_counts). Every walk has the same number of
splits, and each of these is a policy:

                  walk 0    walk 1   ...
    no split      policy    policy           Arrays [splits, walks] have the work items, tiles, partial results and
    even shares   policy    policy           bytes of each policy. The terms of the cost model
    1 per SM      policy    policy           (treegen.target.cost_terms) turn these into microseconds.
    ...

Items are counted. The tiles that a split adds to a walk, and the tiles of its longest item, are estimated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from treegen.cost.figures import time_text
from treegen.ir.arrays import INT32_MAX, Floats, Longs, offsets
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.tree import Tree
from treegen.search.cohort_counts import Cohorts, cohorts_of
from treegen.search.cohort_sums import Tally, bins_of, tally
from treegen.search.path_cuts import MOST_CUTS, cuts_of
from treegen.search.size import fits_whole_paths, is_too_large
from treegen.search.split_estimates import (
    BATCH_BLOCKS_PER_SM,
    BLOCKS_PER_SM,
    EVEN_ROW,
    BatchTimes,
    batch_times_of,
    least_tiles,
    outputs_of,
    shares_of,
    splits_of,
    tiles_of_last,
    times_of,
)
from treegen.search.walk_layout import WHOLE, WalkLayout, layout_of
from treegen.strategies.baselines import query
from treegen.strategies.cohort import Cohort
from treegen.strategies.context_cuts import even_parts, parts_of
from treegen.strategies.strategy import Choice, Strategy
from treegen.target.problem import Problem

NOTHING = "nothing to do"
"""The reason for the choice for a tree whose rows see nothing."""
MOST_POLICIES = (2 + len(BLOCKS_PER_SM)) * (len(WHOLE) + MOST_CUTS)
"""The most policies that are weighed."""


def weighed(problem: Problem) -> Choice:
    """Chooses the policy with the least estimated time from a fixed list.

    Args:
        problem: A tree, the attention shape of its rows, and the target.

    Returns:
        A `query` or `cohort` strategy, which can plan any tree, and a reason with its estimated time.

    Raises:
        ShapeError: No kernel config fits the shape.
    """
    return least(problem, weights_of(problem))


def least(problem: Problem, weights: Weights | None, most_items: int | None = None) -> Choice:
    """Returns the choice of `weighed` from a problem's weights.

    most_items: leaves out policies whose plans have more work items. If all have more, takes one with the fewest.
    """
    if weights is None:
        return Choice(as_named(Cohort(1), problem.tree), NOTHING)
    place = weights.best_planned(problem) if most_items is None else weights.best(most_items)
    strategy = as_named(weights.policy(place), problem.tree)
    return Choice(strategy, weights.reason(strategy, weights.time_us(place)))


def candidates(problem: Problem, most: int | None = None) -> list[tuple[Strategy, float]]:
    """Returns all policies, or the best `most` of them, with their estimated microseconds, by rising times.

    Policies whose plans are too large for the tree are left out. Arguments and errors are those of `weighed`.
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
    """Returns `query` for a cohort of one row with its whole path, if both plan the tree alike."""
    if isinstance(strategy, Cohort) and strategy.shares is None and _is_query(strategy) and not _has_rows_inside(tree):
        return query(strategy.split)
    return strategy


def _is_query(strategy: Cohort) -> bool:
    return (
        strategy.head_rows == 1
        and strategy.tile is None
        and strategy.split_shared_rows is None
        and not strategy.cut_nodes
    )


def _has_rows_inside(tree: Tree) -> bool:
    """Tells whether rows of a node see different parts of it.

    `query` reads each row's part of a node uncut; a cohort of one row reads it cut.
    """
    node = tree.topology.spans.node
    return bool((node[1:] == node[:-1]).any())


class Weights(NamedTuple):
    """Policies with their estimated times.

    Attributes:
        walks: A policy without split for each walk.
        splits: `[splits, walks]`; tokens per work item, INT32_MAX where nothing is split.
        times_us: `[splits, walks]`; microseconds. Those of policies for running batches are the least that they may
            take: see `time_us`.
        shares: `[walks]`; the thread blocks that even shares are for.
        cohorts: The cohorts of all walks.
        layout: The layout of all walks.
        whole: The totals of all walks.
        of_batch: The times of running batches; None for a kernel for one tree, whose policies name tokens in place of
            even shares.
    """

    walks: tuple[Cohort, ...]
    splits: Floats
    times_us: Floats
    shares: Floats
    cohorts: Cohorts
    layout: WalkLayout
    whole: Tally
    of_batch: BatchTimes | None

    @property
    def query_us(self) -> float:
        """Microseconds of plain per-row decoding with its best split."""
        alone = [
            place for place, walk in enumerate(self.walks) if walk.head_rows == 1 and walk.split_shared_rows is None
        ]
        return float(self.times_us[:, alone].min())

    def reason(self, strategy: Strategy, time_us: float) -> str:
        """Returns the reason for taking a strategy with this estimated time."""
        taken, number = time_text(time_us), self.times_us.size
        if strategy.name == "query" or (isinstance(strategy, Cohort) and _is_query(strategy)):
            return f"sharing does not pay: plain per-row decoding takes least of {number} policies, {taken}"
        plain = time_text(self.query_us)
        return f"least estimated time of {number} policies, {taken}; plain per-row decoding takes {plain}"

    def policy(self, place: tuple[int, int]) -> Cohort:
        """Returns the policy at a place of `times_us`."""
        walk, split, shares = self.walks[place[1]], int(self.splits[place]), self.shares.item(place[1])
        if split == INT32_MAX:
            return walk
        if self.of_batch is not None and place[0] == EVEN_ROW:
            return replace(walk, shares=int(shares) if shares.is_integer() else shares)
        return replace(walk, split=split)

    def items(self, place: tuple[int, int]) -> int:
        """Counts the work items of this policy's plan."""
        return self._items(place, self.cohorts.of_walk(place[1]))

    def time_us(self, place: tuple[int, int]) -> float:
        """Returns the estimated microseconds of the policy at a place.

        That of a policy for running batches follows from the tokens of each of its items.
        """
        return self._time_us(place, self.cohorts.of_walk(place[1]))

    def exact(self) -> Weights:
        """Returns these weights with the time of every policy, as of `time_us`."""
        times_us = [self.time_us((split, walk)) for split in range(len(self.splits)) for walk in range(len(self.walks))]
        return self._replace(times_us=np.reshape(times_us, self.times_us.shape))

    def best(self, most_items: int | None = None) -> tuple[int, int]:
        """Returns the place of the policy with the least time among those with at most `most_items`.

        If there is none, it is the place of one with the fewest items.
        """
        if most_items is None and self.of_batch is None:
            return divmod(int(self.times_us.argmin()), len(self.walks))
        repeated = self.splits == INT32_MAX  # a policy without split stands in the first row as well
        repeated[0] = False
        places, items, best, best_us = [place for place in self.order() if not repeated[place]], [], None, np.inf
        for place in places:
            if self.times_us[place] >= best_us:
                break
            cohorts = self.cohorts.of_walk(place[1])
            items.append(self._items(place, cohorts))
            if most_items is None or items[-1] <= most_items:
                time_us = self._time_us(place, cohorts)
                if time_us < best_us:
                    best, best_us = place, time_us
        return places[items.index(min(items))] if best is None else best

    def best_planned(self, problem: Problem) -> tuple[int, int]:
        """Returns the place of the policy with the least time whose plan is not too large for the tree.

        If all plans are too large, it is the place of the policy with the smallest plan.
        """
        tree, shape, _ = problem
        if fits_whole_paths(tree):
            return self.best()
        places = self.order()
        fitting = (place for place in places if not is_too_large(self.policy(place), tree, shape))
        return next(fitting, None) or min(places, key=lambda place: self.policy(place).plan_size(tree, shape))

    def _items(self, place: tuple[int, int], cohorts: Longs) -> int:
        """As `items`. cohorts: the tokens of each cohort of the policy's walk."""
        return int(np.ceil(cohorts / self.splits[place]).sum())

    def _time_us(self, place: tuple[int, int], cohorts: Longs) -> float:
        """As `time_us`. cohorts: the tokens of each cohort of the policy's walk."""
        if self.of_batch is None:
            return float(self.times_us[place])
        walk, of_groups = place[1], offsets(cohorts)
        if place[0] == EVEN_ROW and self.splits[place] < INT32_MAX:
            begin = even_parts(of_groups, float(self.shares[walk]))
            tokens = np.append(begin[1:], of_groups[-1]) - begin
        else:
            _, begin, end = parts_of(of_groups, int(self.splits[place]))
            tokens = end - begin
        tiles = tokens / self.layout.tiles.tokens[walk] + self.of_batch.item_tiles
        return self.of_batch.time_us(place, tiles_of_last(tiles, max(1, int(self.shares[walk]))))

    def order(self) -> list[tuple[int, int]]:
        """Returns all places by rising times."""
        return [divmod(index, len(self.walks)) for index in self.times_us.argsort(axis=None, kind="stable").tolist()]


def weights_of(problem: Problem, config: KernelConfig | None = None) -> Weights | None:
    """Weighs every policy of the list; None where no row sees anything. Errors as of `weighed`.

    config: the kernel config of all plans, where launches have but one; policies then name no tile.
    """
    tree, shape, target = problem
    if not len(tree.topology.spans):
        return None
    cuts = cuts_of(tree)
    layout = layout_of(shape, target, tree.num_rows, len(cuts), config)
    cohorts = cohorts_of(tree, layout, cuts)
    bins, whole = bins_of(cohorts), tally(cohorts, len(layout.walks))
    splits = splits_of(bins, whole, layout, shape, target, BLOCKS_PER_SM if config is None else BATCH_BLOCKS_PER_SM)
    whole_paths = len(layout.walks) - len(cuts)
    cut = [
        replace(walk, split_shared_rows=cut.rows) for walk, cut in zip(layout.walks[whole_paths:], cuts, strict=True)
    ]
    outputs = outputs_of(bins.parts(splits), bins, layout, cuts, tree.num_rows)
    of_batch = None if config is None else batch_times_of(outputs, whole, layout, problem)
    times_us = (
        times_of(splits, outputs, whole, layout, problem)
        if of_batch is None
        else of_batch.times_us(least_tiles(splits, outputs, whole, layout, problem))
    )
    shares = shares_of(layout, target)
    return Weights((*layout.walks[:whole_paths], *cut), splits, times_us, shares, cohorts, layout, whole, of_batch)
