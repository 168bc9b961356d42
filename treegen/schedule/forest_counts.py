"""Counts of the schedules of a forest's plans, one plan for each tree, without making their tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Longs, ragged
from treegen.ir.plan import Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.schedule.arrangement import cut_rows, row_table_of
from treegen.schedule.merge_lists import in_last_round, kept_between_rounds, partial_items
from treegen.schedule.pack_runs import cut_runs_to_pack, usual_run_tokens
from treegen.schedule.segment_runs import masked_runs, runs_of_groups
from treegen.target.targets import Target
from treegen.target.tile_config import tile_sizes


class ForestCounts(NamedTuple):
    """Counts for each tree of a forest.

    partial_rows: rows of partial results, each written once and read once. mask_runs: packed runs and full tiles of
    launches with masks.
    """

    partial_rows: Longs
    mask_runs: Longs


def count(plan: Plan, forest: Tree, first_row: Longs, shape: Shape, target: Target) -> ForestCounts:
    """Counts partial rows and masked runs of the schedules of a forest's plans, each lowered as if it were alone.

    Args:
        plan: The plans of all trees as one.
        forest: All trees as one.
        first_row: The first row of each tree, then the number of rows.
        shape: The attention shape.
        target: The device to lower for.
    """
    trees = len(first_row) - 1
    tree = np.searchsorted(first_row, np.append(plan.row_lo, 0)[plan.row_indptr[:-1]], side="right") - 1
    most_rows = np.zeros(trees, np.int64)
    np.maximum.at(most_rows, tree, plan.group_rows)
    sizes = [tile_sizes(plan.tiles, plan.mask, most, shape, target) for most in np.maximum(most_rows, 1).tolist()]
    heights, tokens = np.concatenate([own.heights for own in sizes]), np.array([own.tokens for own in sizes])
    heights = heights[tree]
    whole = not np.count_nonzero(plan.group_rows > heights[:, 0])
    items, runs = cut_rows(plan, runs_of_groups(plan, forest), heights, whole=whole)

    row_table, row0 = row_table_of(plan, forest)
    item, position = ragged(items.rows)
    row = row_table[(row0[items.group] + items.begin)[item] + position]
    partial_item = partial_items(
        items.rows, row, np.bincount(row, minlength=forest.num_rows), in_last_round(plan, tree, trees)[items.group]
    )
    partial_rows = np.bincount(tree[items.group], np.where(partial_item, items.rows, 0), trees).astype(np.int64)
    if plan.round.any() and plan.merge == "reduce":
        partial = partial_item[item]
        round = plan.round[items.group[item[partial]]].astype(np.int64)
        kept = kept_between_rounds(row[partial].astype(np.int64), round, int(plan.round.max()) + 1)
        partial_rows += np.bincount(np.searchsorted(first_row, kept, side="right") - 1, minlength=trees)

    of_group = (tree * (int(plan.round.max(initial=0)) + 1) + plan.round)[items.group]
    _, first, launch = np.unique(of_group * tokens.shape[1] + items.config, return_index=True, return_inverse=True)
    if not len(first):
        return ForestCounts(partial_rows, np.zeros(trees, np.int64))
    of_launch, of_run = tokens[tree[items.group[first]], items.config[first]], launch.repeat(runs.counts)
    cut = cut_runs_to_pack(runs, runs.tokens, launch, tuple(of_launch.tolist()), usual_run_tokens(plan))
    masked = np.bincount(of_run, masked_runs(runs, items.rows), len(first)) > 0
    mask_runs = np.where(masked[launch], np.add(*cut.of_items), 0)
    return ForestCounts(partial_rows, np.bincount(tree[items.group], mask_runs, trees).astype(np.int64))
