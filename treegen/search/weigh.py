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

from dataclasses import dataclass, replace

import numpy as np

from treegen.ir.arrays import INT32_MAX, Floats, Longs, offsets
from treegen.ir.kernel_config import KernelConfig
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
from treegen.search.weighed_policies import WeighedPolicies, as_named
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


def least(problem: Problem, weights: Weights | None) -> Choice:
    """Returns the choice of `weighed` from a problem's weights."""
    if weights is None:
        return Choice(as_named(Cohort(1), has_rows_inside=problem.tree.topology.has_rows_inside), NOTHING)
    place = weights.best_planned(problem)
    strategy = as_named(weights.policy(place), has_rows_inside=problem.tree.topology.has_rows_inside)
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
            policy = as_named(weights.policy(place), has_rows_inside=problem.tree.topology.has_rows_inside)
            if every or not is_too_large(policy, problem.tree, problem.shape):
                found.setdefault(policy, float(weights.times_us[place]))
            if len(found) == most:
                break
    return list(found.items())


@dataclass(frozen=True)
class Weights(WeighedPolicies):
    """Policies with their estimated times, as NumPy finds them.

    Attributes:
        walks, splits, times_us: See WeighedPolicies.
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
    def names_shares(self) -> bool:  # type: ignore[override]
        """See WeighedPolicies."""
        return self.of_batch is not None

    def shares_of(self, walk: int) -> float:
        """See WeighedPolicies."""
        return self.shares.item(walk)

    def items(self, place: tuple[int, int]) -> int:
        """See WeighedPolicies."""
        return self._items(place, self.cohorts.of_walk(place[1]))

    def time_us(self, place: tuple[int, int]) -> float:
        """See WeighedPolicies."""
        return self._time_us(place, self.cohorts.of_walk(place[1]))

    def exact(self) -> Weights:
        """Returns these weights with the time of every policy, as of `time_us`."""
        times_us = [self.time_us((split, walk)) for split in range(len(self.splits)) for walk in range(len(self.walks))]
        return replace(self, times_us=np.reshape(times_us, self.times_us.shape))

    def best(self, most_items: int | None = None) -> tuple[int, int]:
        """See WeighedPolicies."""
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
