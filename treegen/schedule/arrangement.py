"""Arrangement: a plan's groups become work items in launch order, each with the runs of KV slots that it reads."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, largest, number, offsets, ragged, ragged_ranges, ramp, zeros
from treegen.ir.plan import Plan
from treegen.ir.positions import Positions
from treegen.ir.schedule import TileClass
from treegen.ir.tree import Tree
from treegen.schedule.pack_runs import Sizes
from treegen.schedule.segment_runs import Runs, runs_of_groups, runs_of_items
from treegen.target.problem import Problem
from treegen.target.tile_config import fixed_class, sizes_of, tile_sizes


class Frame(NamedTuple):
    """Tile classes that serve any tree, so that the launches are the same for all: so many for every one of `stages`,
    stage by stage, larger rows first.
    """

    classes: tuple[TileClass, ...]
    stages: int

    @property
    def sizes(self) -> tuple[TileClass, ...]:
        """The classes of a stage."""
        return self.classes[: len(self.classes) // self.stages]


class Items(NamedTuple):
    """Row tiles: rows `begin:begin + rows` of a group, in the tile class `tile` of all that its groups may have."""

    group: Longs
    begin: Longs
    rows: Longs
    tile: Longs

    def at(self, places: Longs) -> Items:
        """These of the items, in this order."""
        return Items(*(column[places] for column in self))


class Arranged(NamedTuple):
    """Work items in launch order and the runs that each of them reads.

    sizes, tokens: the tile class of every launch, and its tokens. work: tokens of every item. bounds: where the items
    of every launch begin, and where the last ones end.
    """

    sizes: tuple[TileClass, ...]
    tokens: Sizes
    items: Items
    runs: Runs
    work: Longs
    bounds: list[int]
    num_stages: int


def arrange(plan: Plan, problem: Problem, frame: Frame | None = None, positions: Positions | None = None) -> Arranged:
    """Work items in launch order with the runs that they read, before these are cut. Arguments and errors as of
    `lower`.
    """
    tree, shape, target = problem
    most_rows = max(1, largest(plan.group_rows)) if len(plan) else 1
    if plan.fixed_block and frame is None:
        frame = Frame((fixed_class(shape, target, plan.fixed_block),), 1)
    if frame is None:
        sizes, tokens, heights = tile_sizes(plan.tiles, plan.mask, most_rows, shape, target)
    else:
        sizes, tokens, heights = sizes_of(frame.sizes, plan.mask, shape)
    items, runs = cut_rows(plan, runs_of_groups(plan, tree, positions), heights, whole=most_rows <= heights.item(0))
    items, runs, work, num_stages = _in_launch_order(plan, items, runs, len(sizes), frame)
    launches = num_stages * len(sizes)
    bounds = [0, len(items.tile)] if launches == 1 else items.tile.searchsorted(np.arange(launches + 1)).tolist()
    if num_stages > 1:
        sizes, tokens = sizes * num_stages, tokens * num_stages
    return Arranged(sizes if frame is None else frame.classes, tokens, items, runs, work, bounds, num_stages)


def cut_rows(plan: Plan, runs: Runs, heights: Longs, *, whole: bool) -> tuple[Items, Runs]:
    """Every group's row tiles and their runs, without tiles that have no runs. heights: the rows of a tile in every
    class, larger first; of every group, or one line for all. whole: no group has more rows than a tile.
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
        tile = zeros(len(rows))
    else:
        tile = (rows[:, None] <= (heights[:, 1:] if len(heights) == 1 else heights[group, 1:])).sum(1)
    items, counts = Items(group, begin, rows, tile), runs.counts
    if np.count_nonzero(counts) < len(counts):
        items, runs = items.at(counts.nonzero()[0]), runs._replace(indptr=offsets(counts[counts > 0]))
    return items, runs


def _in_launch_order(
    plan: Plan, items: Items, runs: Runs, sizes: int, frame: Frame | None
) -> tuple[Items, Runs, Longs, int]:
    """Items stage by stage, class by class, the longest first, with their runs and tokens; and the number of stages.

    Of items as long as one another those that begin with the same KV come together: they run at the same time, so that
    all but the first find it in L2, however long the paths are that they are parts of.

    `tile` of the result counts the classes of all stages.
    """
    num_stages = 1 if frame is None else frame.stages
    if frame is not None:
        items = items._replace(tile=items.tile + plan.stage[items.group].astype(np.int64) * sizes)
    elif np.count_nonzero(plan.stage):
        stages, stage = np.unique(plan.stage[items.group], return_inverse=True)
        items, num_stages = items._replace(tile=items.tile + stage * sizes), max(len(stages), 1)
    work = runs.tokens
    key = runs.table.take(runs.indptr[:-1], 0)[:, 0] - (work << number(32))  # slots, and tokens, have 31 bits
    if num_stages * sizes > 1:
        order = np.lexsort((key, items.tile))
    elif np.count_nonzero(key[1:] < key[:-1]):
        order = key.argsort(kind="stable")
    else:
        return items, runs, work, 1
    return items.at(order), runs.of(order), work[order], num_stages


@lru_cache(64)
def class_offsets(bounds: tuple[int, ...]) -> Ints:
    """Where the items of every class begin: the same at most steps of a batch."""
    return frozen(np.array(bounds))


def row_table_of(plan: Plan, tree: Tree) -> tuple[Ints, Longs]:
    """The row table and where each group's rows begin in it.

    The table opens with the caller's rows in rank order, in which a group of one interval finds its rows; groups of
    several intervals have theirs listed behind.
    """
    order, groups = tree.topology.row_of_rank, len(plan)
    if len(plan.row_lo) == groups == np.count_nonzero(plan.group_rows):  # one interval each
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
