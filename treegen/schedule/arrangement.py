"""Arrangement: cuts a plan's groups into work items in launch order, each with the KV runs that it reads."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, largest, number, offsets, ragged, ragged_ranges, ramp, zeros
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.plan import Plan
from treegen.ir.positions import Positions
from treegen.ir.tree import Tree
from treegen.schedule.pack_runs import Sizes
from treegen.schedule.segment_runs import Runs, runs_of_groups, runs_of_items
from treegen.target.problem import Problem
from treegen.target.tile_config import invariant_config, sizes_of, tile_sizes


class Frame(NamedTuple):
    """Kernel configs that serve every tree, so that the launches never change.

    configs: all kernel configs, round by round, larger rows first; every round has the same number of them. rounds: the
    number of rounds.
    """

    configs: tuple[KernelConfig, ...]
    rounds: int

    @property
    def round_configs(self) -> tuple[KernelConfig, ...]:
        """The kernel configs of one round."""
        return self.configs[: len(self.configs) // self.rounds]


class Items(NamedTuple):
    """Columns of work items: each has the rows `begin:begin + rows` of its group, and the config numbered `config`."""

    group: Longs
    begin: Longs
    rows: Longs
    config: Longs

    def at(self, places: Longs) -> Items:
        """Picks the items at these places, in this order."""
        return Items(*(column[places] for column in self))


class Arranged(NamedTuple):
    """Work items in launch order, with the KV runs that each of them reads.

    configs: the kernel config of each launch. tokens: KV tokens of a tile in each launch. work: KV tokens of each item.
    bounds: the offset of each launch's first item, then the number of items. num_rounds: the number of rounds.
    """

    configs: tuple[KernelConfig, ...]
    tokens: Sizes
    items: Items
    runs: Runs
    work: Longs
    bounds: list[int]
    num_rounds: int


def arrange(plan: Plan, problem: Problem, frame: Frame | None = None, positions: Positions | None = None) -> Arranged:
    """Cuts groups into work items, sorts these into launch order, and lists the KV runs of each.

    The runs are not cut into tiles yet. Arguments and errors are those of `lower`.
    """
    tree, shape, target = problem
    most_rows = max(1, largest(plan.group_rows)) if len(plan) else 1
    if plan.invariant_block and frame is None:
        frame = Frame((invariant_config(shape, target, plan.invariant_block),), 1)
    if frame is None:
        configs, tokens, heights = tile_sizes(plan.tiles, plan.mask, most_rows, shape, target)
    else:
        configs, tokens, heights = sizes_of(frame.round_configs, plan.mask, shape)
    items, runs = cut_rows(plan, runs_of_groups(plan, tree, positions), heights, whole=most_rows <= heights.item(0))
    items, runs, work, num_rounds = _in_launch_order(plan, items, runs, len(configs), frame)
    launches = num_rounds * len(configs)
    bounds = [0, len(items.config)] if launches == 1 else items.config.searchsorted(np.arange(launches + 1)).tolist()
    if num_rounds > 1:
        configs, tokens = configs * num_rounds, tokens * num_rounds
    return Arranged(configs if frame is None else frame.configs, tokens, items, runs, work, bounds, num_rounds)


def cut_rows(plan: Plan, runs: Runs, heights: Longs, *, whole: bool) -> tuple[Items, Runs]:
    """Cuts the rows of each group into work items of at most a tile's rows, and drops items without runs.

        group    rows 0 .................... 149          tile of 64 rows
        items    [ 0:64 ] [ 64:128 ] [ 128:150 ]          each with the runs that some of its rows see

    Args:
        plan: The groups.
        runs: The KV runs of each group.
        heights: Rows of a tile in each kernel config, larger first: `[groups, configs]`, or `[1, configs]` for all
            groups.
        whole: Whether no group has more rows than the largest tile.

    Returns:
        The items, each in the smallest kernel config that holds its rows, and their runs.
    """
    rows = plan.group_rows.astype(np.int64)
    if whole and np.count_nonzero(rows) == len(rows):
        group, begin = ramp(len(rows)), zeros(len(rows))
    else:
        highest = heights[:, 0]
        group, step = ragged(-(-rows // highest))
        highest = highest if len(heights) == 1 else highest[group]
        begin = step * highest
        rows = np.minimum(rows[group] - begin, highest)
        runs = runs_of_items(runs, group, begin, rows)
    if heights.shape[1] == 1:
        config = zeros(len(rows))
    else:
        config = (rows[:, None] <= (heights[:, 1:] if len(heights) == 1 else heights[group, 1:])).sum(1)
    items, counts = Items(group, begin, rows, config), runs.counts
    if np.count_nonzero(counts) < len(counts):
        items, runs = items.at(counts.nonzero()[0]), runs._replace(indptr=offsets(counts[counts > 0]))
    return items, runs


def _in_launch_order(
    plan: Plan, items: Items, runs: Runs, num_configs: int, frame: Frame | None
) -> tuple[Items, Runs, Longs, int]:
    """Sorts items by round, then by kernel config, then the longest first; returns their runs, tokens, and the rounds.

    Items of one length that begin with the same KV slot are neighbours. They run at the same time, so all but the first
    find that KV in L2. In the result, `config` numbers the kernel configs of all rounds.
    """
    num_rounds = 1 if frame is None else frame.rounds
    if frame is not None:
        items = items._replace(config=items.config + plan.round[items.group].astype(np.int64) * num_configs)
    elif np.count_nonzero(plan.round):
        rounds, round = np.unique(plan.round[items.group], return_inverse=True)
        items, num_rounds = items._replace(config=items.config + round * num_configs), max(len(rounds), 1)
    work = runs.tokens
    # First slots and numbers of tokens have 31 bits each.
    key = runs.table.take(runs.indptr[:-1], 0)[:, 0] - (work << number(32))
    if num_rounds * num_configs > 1:
        order = np.lexsort((key, items.config))
    elif np.count_nonzero(key[1:] < key[:-1]):
        order = key.argsort(kind="stable")
    else:
        return items, runs, work, 1
    return items.at(order), runs.of(order), work[order], num_rounds


@lru_cache(64)
def config_offsets(bounds: tuple[int, ...]) -> Ints:
    """Makes the array of config offsets, once for all steps of a batch that have the same."""
    return frozen(np.array(bounds))


def row_table_of(plan: Plan, tree: Tree) -> tuple[Ints, Longs]:
    """Makes the row table, and the offset of each group's first row in it.

    The table begins with the caller's rows in rank order, where a group of one rank interval finds its rows. Groups of
    several intervals list theirs after that.

        intervals    group 0: 0:3      group 1: 2:4 and 6:7
        row table    [ rank 0 | 1 | 2 | 3 | 4 | 5 | 6 || 2 | 3 | 6 ]
        first row    group 0: 0        group 1: 7
    """
    order, groups = tree.topology.row_of_rank, len(plan)
    if len(plan.row_lo) == groups == np.count_nonzero(plan.group_rows):  # every group has one interval
        return order, plan.row_lo.astype(np.int64)
    intervals = plan.row_indptr[1:] - plan.row_indptr[:-1]
    several = (intervals > 1).nonzero()[0]
    first = np.append(plan.row_lo, 0)[plan.row_indptr[:-1]].astype(np.int64)
    if not len(several):
        return order, first
    listed = (intervals > 1).repeat(intervals)
    lo, hi = plan.row_lo[listed], plan.row_hi[listed]
    first[several] = len(order) + offsets(plan.group_rows[several])[:-1]
    return frozen(np.concatenate([order, order[ragged_ranges(lo, hi - lo)]])), first
