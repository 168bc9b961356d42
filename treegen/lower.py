"""Lowering: a plan, a tree's KV locations and an attention shape become a schedule. No Python loop over items or
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from treegen.division import assign
from treegen.ir.arrays import Ints, Longs, frozen, offsets, ragged, ragged_ranges
from treegen.ir.errors import PlanError
from treegen.ir.plan import Plan
from treegen.ir.schedule import MOST_BIT_ROWS, Schedule, TileClass, TileMask
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.merges import (
    NO_EPILOGUE,
    Epilogue,
    check_last_items,
    epilogue_lists,
    in_last_stage,
    kept_between_stages,
    merge_lists,
    partial_items,
)
from treegen.profiled import task_costs, task_rows
from treegen.runs import (
    Runs,
    Tables,
    bit_words,
    block_tokens,
    masked_runs,
    runs_of_groups,
    runs_of_items,
    table,
    tabulate,
)
from treegen.targets import Target
from treegen.tiles import BLOCK_TOKENS, DEALT_BLOCK_TOKENS, rows_per_tile, tile_class, unfused_class, wanted_class

BIT_MASKS = ("token-bits", "row-bits")


class Frame(NamedTuple):
    """Tile classes that serve any tree, so that the launches are the same for all: so many for every one of `stages`,
    stage by stage, larger rows first.
    """

    classes: tuple[TileClass, ...]
    stages: int

    @property
    def sizes(self) -> list[TileClass]:
        """The classes of a stage."""
        return list(self.classes[: len(self.classes) // self.stages])


class _Work(NamedTuple):
    """Lists of work, as in Schedule."""

    indptr: Ints
    entries: Ints


class _Items(NamedTuple):
    """Row tiles: rows `begin:begin + rows` of a group, in the group's tile class `tile` of all its stages' classes,
    reading `work` tokens.
    """

    group: Longs
    begin: Longs
    rows: Longs
    tile: Longs
    work: Longs


class Counts(NamedTuple):
    """Per tree of a forest: rows of partial results, each written once and read once, and runs in masked work items."""

    partial_rows: Longs
    mask_runs: Longs


def lower(plan: Plan, tree: Tree, shape: Shape, target: Target, frame: Frame | None = None) -> Schedule:
    """The schedule of `plan`: row tiles of its groups as items, by tile class and longest first, and merge lists.

    An item whose rows have no other item writes final output, any other writes partial slots that are merged. Under
    "final" merge, items of the plan's last stage do not count those before: they merge their partials and write final
    output. frame: the classes to take as they are, with the plan's stages as they are numbered, instead of those that
    the plan calls for. Raises ShapeError when no tile class fits the shape, and PlanError when a plan that runs unfused
    has rows to merge, or when a row has several items that could merge its partials.
    """
    sizes = frame.sizes if frame else _tile_sizes(plan, shape, target, int(plan.group_rows.max(initial=1)))
    heights = np.array([_height(tile, plan, shape) for tile in sizes])
    items, runs = _cut(plan, runs_of_groups(plan, tree), np.tile(heights, (len(plan), 1)))
    item_group, begin, rows, item_class, work = items

    # Items that read nothing are dropped; the others are launched stage by stage, class by class, the longest first.
    stage = plan.stage[item_group[work > 0]].astype(np.int64)
    num_stages = frame.stages if frame else 1
    if not frame and len(stage):
        stages, stage = np.unique(stage, return_inverse=True)
        num_stages = len(stages)
    item_class[work > 0] += stage * len(sizes)
    order = np.lexsort((-work, item_class)) if item_class.any() else np.argsort(-work, kind="stable")
    order = order[work[order] > 0]
    number = np.full(len(rows), -1, np.int64)
    number[order] = np.arange(len(order))
    runs = Runs(number[runs.owner], *runs[1:])
    by_owner = np.argsort(runs.owner, kind="stable")
    runs = Runs(*(column[by_owner] for column in runs))
    item_group, rows, item_class = item_group[order], rows[order], item_class[order]
    class_indptr = np.searchsorted(item_class, np.arange(num_stages * len(sizes) + 1))
    given, fixed = (frame.classes, True) if frame else (sizes * num_stages, False)
    classes, tables = _tabulate_classes(runs, plan, given, class_indptr, rows, fixed=fixed)

    row_table, row0 = _row_table(plan, tree)
    row0 = row0[item_group] + begin[order]
    item, position = ragged(rows)
    row = row_table[row0[item] + position]
    last = in_last_stage(plan, np.zeros(len(plan), np.int64), 1)[item_group]
    if last.any():
        check_last_items(item, row, last)
    partial, items_of_row = partial_items(item, row, last, tree.num_rows)
    if plan.mask == "dense" and partial.any():
        raise PlanError("mask", plan.mask, "cannot merge rows that several groups have", "give every row to one group")
    slot0 = np.where(partial, offsets(np.where(partial, rows, 0))[:-1], -1)

    # Where a row's item of the last stage writes final output, its partials are merged there, else by a kernel.
    slot, kept, epilogue = slot0[item] + position, partial[item], NO_EPILOGUE
    if last.any():
        entry, final = row0[item] + position, (last & ~partial)[item]
        entry_of_row = np.full(tree.num_rows, -1)
        entry_of_row[row[final]] = entry[final]
        joined = kept & (entry_of_row[row] >= 0)
        epilogue = epilogue_lists(entry_of_row[row[joined]], slot[joined], len(row_table))
        kept &= ~joined
    merges = merge_lists(
        row[kept],
        slot[kept],
        np.full(kept.sum(), num_stages - 1) if plan.merge == "final" else item_class[item[kept]] // len(sizes),
        np.flatnonzero(items_of_row == 0),
        num_stages,
    )
    if frame:
        if any(tile.merging for tile in classes) and not len(epilogue.slots):
            epilogue = Epilogue(frozen(np.zeros(len(row_table) + 1)), epilogue.slots)
    elif len(epilogue.slots):
        merging = np.bincount(item_class[item], final & (np.diff(epilogue.indptr)[entry] > 0), len(classes)) > 0
        classes = tuple(replace(tile, merging=bool(own)) for tile, own in zip(classes, merging, strict=True))
    dealt = _deal(plan, classes, rows, runs, shape, target)
    walk = (tables.tile0, tables.tile_count, tables.block0, tables.block_tiles)
    return Schedule(
        classes=classes,
        class_indptr=frozen(class_indptr),
        items=frozen(table(row0, rows, *walk, slot0, item_group)),
        rows=row_table,
        tiles=frozen(tables.tiles),
        blocks=frozen(tables.blocks),
        stage_indptr=frozen(np.arange(num_stages + 1) * len(sizes)),
        merge_rows=merges.rows,
        merge_indptr=merges.indptr,
        merge_slots=merges.slots,
        merge_stage_indptr=merges.stage_indptr,
        work_indptr=dealt.indptr,
        work=dealt.entries,
        epilogue_indptr=epilogue.indptr,
        epilogue_slots=epilogue.slots,
    )


def count(plan: Plan, forest: Tree, first_row: Longs, shape: Shape, target: Target) -> Counts:
    """What the schedules of many plans at once have in numbers, without making their tables.

    `plan` holds a plan of every tree of the forest, whose rows are `first_row[t]:first_row[t + 1]`; each is lowered as
    if it were alone.
    """
    trees = len(first_row) - 1
    tree = np.searchsorted(first_row, np.append(plan.row_lo, 0)[plan.row_indptr[:-1]], side="right") - 1
    most_rows = np.zeros(trees, np.int64)
    np.maximum.at(most_rows, tree, plan.group_rows)
    sizes = [_tile_sizes(plan, shape, target, int(most)) for most in most_rows]
    heights = np.array([[_height(tile, plan, shape) for tile in own] for own in sizes])
    tokens = np.array([[tile.tokens for tile in own] for own in sizes])
    items, runs = _cut(plan, runs_of_groups(plan, forest), heights[tree])

    row_table, row0 = _row_table(plan, forest)
    working = np.flatnonzero(items.work)
    item, position = ragged(items.rows[working])
    item = working[item]
    row = row_table[(row0[items.group] + items.begin)[item] + position]
    partial_item, _ = partial_items(item, row, in_last_stage(plan, tree, trees)[items.group], forest.num_rows)
    partial_rows = np.bincount(tree[items.group], np.where(partial_item, items.rows, 0), trees).astype(np.int64)
    if plan.stage.any() and plan.merge == "reduce":
        partial = partial_item[item]
        stage = plan.stage[items.group[item[partial]]].astype(np.int64)
        kept = kept_between_stages(row[partial].astype(np.int64), stage, int(plan.stage.max()) + 1)
        partial_rows += np.bincount(np.searchsorted(first_row, kept, side="right") - 1, minlength=trees)

    of_group = (tree * (int(plan.stage.max(initial=0)) + 1) + plan.stage)[items.group]
    _, first, launch = np.unique(of_group * tokens.shape[1] + items.tile, return_index=True, return_inverse=True)
    of_launch = tokens[tree[items.group[first]], items.tile[first]]
    of_run, masked = launch[runs.owner], masked_runs(runs, items.rows)
    tile_tokens, block = of_launch[of_run], block_tokens(runs, launch, of_launch, _usual_block(plan))[of_run]
    pieces = runs.length // tile_tokens - -(runs.length % tile_tokens) // block
    pieces = np.where((np.bincount(of_run, masked, len(first)) > 0)[of_run], pieces, 0)
    return Counts(partial_rows, np.bincount(tree[items.group][runs.owner], pieces, trees).astype(np.int64))


def _cut(plan: Plan, runs: Runs, heights: Longs) -> tuple[_Items, Runs]:
    """Every group's row tiles and their runs. heights: per group the rows of a tile in every class, larger first."""
    group, step = ragged(-(-plan.group_rows // heights[:, 0]))
    begin = step * heights[group, 0]
    rows = np.minimum(plan.group_rows[group] - begin, heights[group, 0]).astype(np.int64)
    tile = (rows[:, None] <= heights[group, 1:]).sum(1)
    runs = runs_of_items(runs, len(plan), group, begin, rows)
    work = np.bincount(runs.owner, runs.length, len(rows)).astype(np.int64)
    return _Items(group, begin, rows, tile, work), runs


def _tile_sizes(plan: Plan, shape: Shape, target: Target, most_rows: int) -> list[TileClass]:
    """The tile classes that the plan wants, larger rows first, or the one that suits groups of `most_rows` rows."""
    most_rows = max(1, most_rows)
    if plan.mask == "dense":
        return [unfused_class(shape, most_rows)]
    if plan.tiles:
        return [wanted_class(rows, tokens, shape, target) for rows, tokens in plan.tiles]
    return [tile_class(shape, target, most_rows)]


def _height(tile: TileClass, plan: Plan, shape: Shape) -> int:
    """Whole query rows of an item."""
    height = rows_per_tile(tile.rows, shape.group)
    return min(height, MOST_BIT_ROWS) if plan.mask in BIT_MASKS else height


def _usual_block(plan: Plan) -> int:
    """Granularity of packed runs."""
    return DEALT_BLOCK_TOKENS if plan.blocks else BLOCK_TOKENS


def _tabulate_classes(
    runs: Runs, plan: Plan, sizes: Sequence[TileClass], class_indptr: Longs, rows: Longs, *, fixed: bool
) -> tuple[tuple[TileClass, ...], Tables]:
    """The tables of all classes one behind the other, and the classes with the mask and blocks that their runs need;
    fixed: as they are.
    """
    masked = masked_runs(runs, rows)
    mask: TileMask = "bits" if plan.mask in BIT_MASKS else "interval"
    first_run = np.searchsorted(runs.owner, class_indptr)
    classes, tables = [], []
    tiles_before = blocks_before = 0
    for c, tile in enumerate(sizes):
        chosen = slice(first_run[c], first_run[c + 1])
        own = Runs(runs.owner[chosen] - class_indptr[c], *(column[chosen] for column in runs[1:]))
        items = class_indptr[c + 1] - class_indptr[c]
        if tile.fused:
            is_masked = tile.mask != "none" or bool(masked[chosen].any())
            if is_masked and mask == "bits":
                own = own._replace(**dict(zip(("lo", "hi"), bit_words(own.lo, own.hi), strict=True)))
            if not fixed:
                of_class = np.zeros(items, np.int64)
                block = int(block_tokens(own, of_class, np.array([tile.tokens]), _usual_block(plan))[0])
                tile = replace(tile, mask=mask if is_masked else "none", block=block, dealt=plan.blocks > 0)
        made = tabulate(own, items, tile.tokens, tile.block)
        classes.append(tile)
        tables.append(made._replace(tile0=made.tile0 + tiles_before, block0=made.block0 + blocks_before))
        tiles_before += len(made.tiles)
        blocks_before += len(made.blocks)
    return tuple(classes), Tables(*(np.concatenate(column) for column in zip(*tables, strict=True)))


def _deal(plan: Plan, classes: tuple[TileClass, ...], rows: Longs, runs: Runs, shape: Shape, target: Target) -> _Work:
    """Lists of work for the thread blocks that the plan asks for, if any: the costliest items first (treegen.division).

    Raises PlanError when the plan needs several tile classes.
    """
    if not plan.blocks:
        return _Work(frozen(np.zeros(1)), frozen(np.empty(0)))
    if len(classes) > 1 or not classes[0].fused:
        raise PlanError("blocks", plan.blocks, "needs a single tile class", "use one tile size, stage and fused mask")
    lanes = shape.num_kv_heads * -(-shape.group // classes[0].rows)
    tokens = np.bincount(runs.owner, runs.length, len(rows)).astype(np.int64)
    costs = task_costs(shape, target)(task_rows(rows, classes[0], shape), tokens)
    worker = assign(np.repeat(costs, lanes), min(plan.blocks, max(len(rows) * lanes, 1)))
    counts = np.bincount(worker, minlength=1)
    return _Work(frozen(offsets(counts)), frozen(np.argsort(worker, kind="stable")))


def _row_table(plan: Plan, tree: Tree) -> tuple[Ints, Longs]:
    """The row table and where each group's rows begin in it.

    The table opens with the caller's rows in rank order, in which a group of one interval finds its rows; groups of
    several intervals have theirs listed behind.
    """
    order = tree.topology.row_of_rank
    several = np.flatnonzero(np.diff(plan.row_indptr) > 1)
    first = np.append(plan.row_lo, 0)[plan.row_indptr[:-1]].astype(np.int64)
    if not len(several):
        return order, first
    listed = np.isin(plan.row_interval_group, several)
    lo, hi = plan.row_lo[listed], plan.row_hi[listed]
    first[several] = len(order) + offsets(plan.group_rows[several])[:-1]
    return frozen(np.concatenate([order, order[ragged_ranges(lo, hi - lo)]])), first
