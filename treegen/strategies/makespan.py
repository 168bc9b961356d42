"""FlashForge's division of tasks into pieces, and their distribution to thread blocks (section 5.1).

Task i reads tokens[i] tokens for rows[i] query head rows and exists count[i] times (once per KV head and row tile). Cut
into k pieces it costs k times cost(rows[i], tokens[i] / k). `blocks` thread blocks share all pieces, and the aim is the
least makespan: the load of the busiest thread block. Rows are not cut, because that would read the KV again. Costs are
positive microseconds, rounded to multiples of 2**-20, so that loads are exact whatever the order of the sum.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from typing import TypeAlias

import numpy as np

from treegen.ir.arrays import Floats, Longs, ragged
from treegen.target.task_costs import Costs, Counts

EqualCosts: TypeAlias = list[tuple[float, int]]  # (cost, number of sub-tasks with this cost), by falling cost

# No piece is shorter than the narrowest KV tile.
SHORTEST_PIECE = 16
# Beyond this number of combinations, the search goes task by task.
MOST_COMBINATIONS = 1000
_RESOLUTION = 2.0**20
_TOLERANCE = 1e-4
# The search task by task ends at a makespan of at most this times its lower bound.
_CLOSE = 1.02
# `assign` places sub-tasks one by one where fewer than this number can be placed at once.
_FEWEST_AT_ONCE = 16
# Costs that the search for the balanced cost evaluates at once.
_SECTION_SIZE = 256


def balanced_cost(rows: Counts, tokens: Counts, count: Counts, blocks: int, cost: Costs, whole: Floats) -> float:
    """Returns cost_l: the least x that is at least the mean load of a block if no piece may cost more than x.

    The mean is (1 / blocks) sum_i count_i k_i(x) cost(rows_i, tokens_i / k_i(x)), k_i(x) = ceil(cost_i / x) (Eq. 4). It
    jumps where some k_i changes and costs need not be monotone, so "mean <= x" can hold, fail and hold again with
    growing x. The search narrows a bracket, below which it fails and above which it holds, to a relative 1e-4. The
    result is the bracket's upper end, where it holds. That is the least such x if it holds from there on. It is 0
    without tasks. whole: the costs of undivided tasks.
    """
    if not len(whole):
        return 0.0

    def mean_load(x: Floats) -> Floats:
        """Returns the mean load for each x. Tasks outside of `cut` cost no more than any x."""
        pieces = np.ceil(whole[cut] / x[:, None])
        load = (pieces * cost(rows[cut], tokens[cut] / pieces)) @ count[cut] + total[~cut].sum()
        return np.asarray(load / blocks)

    total = whole * count
    uncut = float(total.sum()) / blocks
    low, high = uncut, max(uncut, float(whole.max()))
    cut = whole > low
    while (mean_load(np.array([low]))[0] if cut.any() else uncut) <= low:
        low, high = low / 2, low
        cut = whole > low
    if not cut.any():
        return high
    # Several points of the bracket are tried at once: a call of `cost` takes the same time for many sizes as for few.
    sections = max(1, _SECTION_SIZE // int(cut.sum()))
    while high > low * (1 + _TOLERANCE):
        inner = low * (high / low) ** (np.arange(1, sections + 1) / (sections + 1))
        first = int(np.append(mean_load(inner) <= inner, True).argmax())
        bracket = np.concatenate([[low], inner, [high]])
        low, high = float(bracket[first]), float(bracket[first + 1])
    return high


def division_bounds(rows: Counts, tokens: Counts, count: Counts, blocks: int, cost: Costs, whole: Floats) -> Longs:
    """Returns the most pieces worth trying per task: ceil(cost_i / cost_l) (Eq. 5), and no piece below 16 tokens.

    whole: as in `balanced_cost`.
    """
    balanced = balanced_cost(rows, tokens, count, blocks, cost, whole)
    wanted = np.ceil(whole / balanced) if len(whole) else whole
    return np.asarray(np.maximum(np.minimum(wanted, tokens // SHORTEST_PIECE), 1), np.int64)


def assign(costs: Floats, blocks: int) -> Longs:
    """Returns the block of each sub-task: by falling cost, each goes to the block with the least load.

    Equal costs keep their order, and of equal loads the lowest block is taken. The makespan is at most 4/3 - 1/(3
    blocks) times the least possible one (Graham, 1969).
    """
    exact = _exact(costs)
    order = np.argsort(-exact, kind="stable")
    # load * blocks + block, exact in float64 up to 32 seconds on 264 blocks: its order is that of the rule.
    keys = np.arange(blocks, dtype=np.float64)
    steps = exact[order] * (_RESOLUTION * blocks)
    placed = np.empty(len(steps))
    done = 0
    while done < len(steps):
        # The next sub-tasks go to the blocks in order, until one of these blocks would be the least loaded again.
        higher = keys[: len(steps) - done] + steps[done : done + blocks]
        again = np.minimum.accumulate(higher)[:-1] < keys[1 : len(higher)]
        taken = int(again.argmax()) + 1 if again.any() else len(higher)
        if taken == len(higher) or taken >= _FEWEST_AT_ONCE:
            placed[done : done + taken] = keys[:taken]
            keys[:taken] = higher[:taken]
        else:
            taken = len(higher)
            heap = keys.tolist()
            placed[done : done + taken] = [heapreplace(heap, heap[0] + step) for step in steps[done:][:taken].tolist()]
            keys = np.array(heap)
        keys.sort()
        done += taken
    block = np.empty(len(order), np.int64)
    block[order] = placed.astype(np.int64) % blocks
    return block


def _exact(costs: Floats) -> Floats:
    """Rounds costs to positive multiples of 2**-20, so that their sums are exact."""
    return np.maximum(np.rint(costs * _RESOLUTION), 1.0) / _RESOLUTION


def _equal_costs(costs: Floats, count: Counts) -> EqualCosts:
    return sorted(zip(costs.tolist(), count.tolist(), strict=True), reverse=True)


def longest_first(costs: EqualCosts, blocks: int, limit: float = np.inf) -> tuple[float, dict[float, int]]:
    """Returns the makespan, and blocks by load, if sub-tasks of falling cost go to the least loaded block.

    It stops when the makespan exceeds `limit`; the makespan is then a lower bound.
    """
    # The order of equally loaded blocks does not change the loads, so blocks of equal load move together.
    width = {0.0: blocks}
    loads = [0.0]
    peak = 0.0
    for cost, left in costs:
        while left:
            load = loads[0]
            if left >= blocks and peak - load <= cost:
                # Loads differ by no more than a sub-task: in each round every block takes one.
                rounds = left // blocks
                left -= rounds * blocks
                peak += rounds * cost
                loads = [other + rounds * cost for other in loads]
                width = {other + rounds * cost: number for other, number in width.items()}
                continue
            number = width[load]
            higher = load + cost
            if left < number:
                width[load] = number - left
                number = left
                if higher not in width:
                    heappush(loads, higher)
            else:
                del width[load]
                if higher in width:
                    heappop(loads)
                else:
                    heapreplace(loads, higher)
            width[higher] = width.get(higher, 0) + number
            left -= number
            if higher > peak:
                peak = higher
        if peak > limit:
            break
    return peak, width


def divide(rows: Counts, tokens: Counts, count: Counts, blocks: int, cost: Costs) -> Longs:
    """Returns the pieces of each task with the least makespan found; never worse than no division.

    They are at most `division_bounds`. Tasks with the same rows and tokens are cut alike. Up to 1,000 combinations are
    all searched; beyond that, the search goes task by task, longest first. Of equal makespans, the one with the fewest
    sub-tasks is taken.
    """
    if not len(tokens):
        return np.empty(0, np.int64)
    stride = int(tokens.max()) + 1
    keys, kind = np.unique(np.asarray(rows, np.int64) * stride + tokens, return_inverse=True)
    kind_rows, kind_tokens = keys // stride, keys % stride
    kind_count = np.bincount(kind, count).astype(np.int64)
    whole = cost(kind_rows, kind_tokens)
    bounds = division_bounds(kind_rows, kind_tokens, kind_count, blocks, cost, whole)
    pieces = np.ones(len(keys), np.int64)
    by_cost = np.argsort(-whole, kind="stable")
    cut = by_cost[bounds[by_cost] > 1]
    if len(cut):
        task, position = ragged(bounds[cut])
        table = np.full((len(cut), int(bounds[cut].max())), np.inf)
        table[task, position] = _exact(cost(kind_rows[cut][task], kind_tokens[cut][task] / (position + 1)))
        kept = bounds == 1
        search = _Search(table, kind_count[cut], _equal_costs(_exact(whole[kept]), kind_count[kept]), blocks)
        few = np.prod(bounds[cut].astype(np.float64)) <= MOST_COMBINATIONS
        pieces[cut] = 1 + (search.all_combinations() if few else search.task_by_task())
    return pieces[kind]


class _Search:
    """Finds the least makespan over the divisions of some tasks, beside sub-tasks that stay as they are.

    table[task, k - 1]: the cost of one of k pieces, infinite beyond the task's bound. count[task]: how often the task
    exists. fixed: all other sub-tasks. A division is an index into each row of the table. A makespan is at least the
    mean load of the blocks, and at least the longest piece. Divisions are tried in the order of the larger of these two
    bounds, and not where it exceeds the best makespan so far.
    """

    def __init__(self, table: Floats, count: Longs, fixed: EqualCosts, blocks: int) -> None:
        self._table = table
        self._number = count[:, None] * np.arange(1, table.shape[1] + 1)
        self._share = table * self._number / blocks
        self._fixed = fixed
        self._fixed_share = sum(cost * number for cost, number in fixed) / blocks
        self._fixed_longest = fixed[0][0] if fixed else 0.0
        self._blocks = blocks

    def all_combinations(self) -> Longs:
        """Returns the best of all divisions."""
        grid = np.indices(tuple(np.isfinite(self._table).sum(axis=1))).reshape(len(self._table), -1)
        return self._least(grid, np.inf, grid[:, 0])[1]

    def task_by_task(self) -> Longs:
        """Returns the best division on a walk that starts at the least bound and changes one task after another.

        It ends early within 2 % of that bound, because costs are not known better.
        """
        start, bound = self._least_bound()
        makespan, chosen = self._least(np.stack([start, np.zeros_like(start)], axis=1), np.inf, start)
        for task, options in enumerate(np.isfinite(self._table).sum(axis=1).tolist()):
            if makespan <= _CLOSE * bound:
                break
            grid = np.repeat(chosen[:, None], options, axis=1)
            grid[task] = np.arange(options)
            makespan, chosen = self._least(grid, makespan, chosen)
        return chosen

    def _least(self, grid: Longs, makespan: float, chosen: Longs) -> tuple[float, Longs]:
        """Returns the makespan and the division of the best column of `grid`, or of `chosen` if none is better."""
        task = np.arange(len(grid))
        longest = np.maximum(self._table[task[:, None], grid].max(axis=0), self._fixed_longest)
        # Sums for the mean are rounded, and makespans are not: the factor keeps the bound below them.
        mean = (self._share[task[:, None], grid].sum(axis=0) + self._fixed_share) * (1 - 1e-12)
        bound = np.maximum(mean, longest)
        number = self._number[task[:, None], grid].sum(axis=0)
        fewest = int(self._number[task, chosen].sum())
        for column in np.lexsort((number, bound)).tolist():
            if bound[column] > makespan:
                break
            if bound[column] == makespan and number[column] >= fewest:
                continue
            division = grid[:, column]
            costs = list(zip(self._table[task, division].tolist(), self._number[task, division].tolist(), strict=True))
            result, _ = longest_first(sorted(self._fixed + costs, reverse=True), self._blocks, makespan)
            if (result, number[column]) < (makespan, fewest):
                makespan, chosen, fewest = result, division, int(number[column])
        return makespan, chosen

    def _least_bound(self) -> tuple[Longs, float]:
        """Returns the division with the least bound (mean load or longest piece), and the bound.

        Among divisions whose longest piece is x, the least mean has the one that gives every task its least total cost
        with pieces of at most x. This mean falls with x, so the least bound is where it meets x, or one step before.
        """
        steps = np.unique(np.append(self._table[np.isfinite(self._table)], self._fixed_longest))
        steps = steps[steps >= max(self._fixed_longest, float(self._table.min(axis=1).max()))]
        low, high = 0, len(steps) - 1
        while low < high:
            middle = (low + high) // 2
            if self._cut_to(steps[middle])[1] <= steps[middle]:
                high = middle
            else:
                low = middle + 1
        options = [self._cut_to(steps[step]) for step in (low, max(low - 1, 0))]
        bounds = [max(mean, float(self._table[np.arange(len(cut)), cut].max())) for cut, mean in options]
        best = int(np.argmin(bounds))
        return options[best][0], max(bounds[best], self._fixed_longest)

    def _cut_to(self, longest: float) -> tuple[Longs, float]:
        """Returns the division of the least total cost with pieces of at most `longest`, and its mean load."""
        share = np.where(self._table <= longest, self._share, np.inf)
        return share.argmin(axis=1), float(share.min(axis=1).sum()) + self._fixed_share


def borders(tokens: Counts, pieces: Counts) -> tuple[Longs, Longs, Longs]:
    """Returns (task, start, stop) of each piece: task i cut into pieces[i] parts that differ by one token at most."""
    task, position = ragged(pieces)
    length, parts = np.asarray(tokens, np.int64)[task], np.asarray(pieces, np.int64)[task]
    return task, position * length // parts, (position + 1) * length // parts
