"""Lowering: a plan, a tree's KV locations and an attention shape become a schedule. No Python loop over items or
tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, largest, number, offsets, ragged, ragged_ranges, ramp, zeros
from treegen.ir.errors import PlanError
from treegen.ir.plan import BIT_MASKS, Plan
from treegen.ir.positions import Positions
from treegen.ir.schedule import Schedule, TileClass, TileMask
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.schedule.merge_lists import (
    NO_EPILOGUE,
    Epilogue,
    Merges,
    check_last_items,
    epilogue_lists,
    in_last_stage,
    kept_between_stages,
    merge_lists,
    no_merges,
    partial_items,
    single_stage_merges,
)
from treegen.schedule.pack_runs import (
    Each,
    PackedTables,
    Sizes,
    fixed_pieces_of,
    packed_pieces_of,
    pieces_of,
    places_along_paths,
    table,
    tabulate,
)
from treegen.schedule.segment_runs import Runs, bit_words, masked_launches, masked_runs, runs_of_groups, runs_of_items
from treegen.strategies.makespan import assign
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.task_costs import task_costs, task_rows
from treegen.target.tile_config import BLOCK_TOKENS, DEALT_BLOCK_TOKENS, fixed_class, lanes_of, sizes_of, tile_sizes


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


class _Work(NamedTuple):
    """Lists of work, as in Schedule."""

    indptr: Ints
    entries: Ints


_NO_WORK = _Work(frozen(np.zeros(1)), frozen(np.empty(0)))
_NO_POSITIONS = frozen(np.empty(0))


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


class Counts(NamedTuple):
    """Per tree of a forest: rows of partial results, each written once and read once, and runs in masked work items."""

    partial_rows: Longs
    mask_runs: Longs


def lower(
    plan: Plan,
    problem: Problem,
    frame: Frame | None = None,
    positions: Positions | None = None,
) -> Schedule:
    """The schedule of `plan`: row tiles of its groups as items, by tile class and longest first, and merge lists.

    An item whose rows have no other item writes final output, any other writes partial slots that are merged. Under
    "final" merge, items of the plan's last stage do not count those before: they merge their partials and write final
    output. frame: the classes to take as they are, with the plan's stages as they are numbered, instead of those that
    the plan calls for. positions: of the tree, for kernels whose scores depend on them. Raises ShapeError when no tile
    class fits the shape, and PlanError when a plan that runs unfused has rows to merge, or when a row has several items
    that could merge its partials, or when a plan's runs do not fill its fixed blocks.
    """
    arranged = arrange(plan, problem, frame, positions)
    if plan.fixed_block:
        classes = arranged.sizes
        tables = _tabulate_fixed(plan, problem.tree, classes[0], arranged.items, arranged.runs)
    else:
        classes, tables = _tabulate_classes(plan, arranged, fixed=frame is not None or plan.fixed_block > 0)
    return scheduled(plan, problem, arranged, classes, tables, positions, framed=frame is not None)


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


def scheduled(
    plan: Plan,
    problem: Problem,
    arranged: Arranged,
    classes: tuple[TileClass, ...],
    tables: PackedTables,
    positions: Positions | None = None,
    *,
    framed: bool,
) -> Schedule:
    """The schedule of arranged items with these tables of what they read. framed: the classes stay as they are."""
    tree, shape, target = problem
    items, num_stages, launches = arranged.items, arranged.num_stages, len(arranged.bounds) - 1
    row_table, row0 = row_table_of(plan, tree)
    row0 = row0[items.group] + items.begin
    results = _results(plan, items, row_table, row0, tree.num_rows, num_stages, launches)
    if framed or plan.fixed_block:
        if any(tile.merging for tile in classes) and not len(results.epilogue.slots):
            results = results._replace(epilogue=Epilogue(frozen(np.zeros(len(row_table) + 1)), NO_EPILOGUE.slots))
    elif results.merging is not None:
        classes = tuple(replace(tile, merging=own) for tile, own in zip(classes, results.merging, strict=True))
    dealt = _deal(plan, classes, items.rows, arranged.work, shape, target)
    return Schedule.trusted(
        classes=classes,
        class_indptr=class_offsets(tuple(arranged.bounds)),
        items=table(row0, items.rows, *tables.walk, results.slot0, items.group),
        rows=row_table,
        tiles=tables.tiles,
        blocks=tables.blocks,
        merge_rows=results.merges.rows,
        merge_indptr=results.merges.indptr,
        merge_slots=results.merges.slots,
        stage_indptr=_stage_indptr(num_stages, launches),
        merge_stage_indptr=results.merges.stage_indptr,
        work_indptr=dealt.indptr,
        work=dealt.entries,
        epilogue_indptr=results.epilogue.indptr,
        epilogue_slots=results.epilogue.slots,
        row_positions=_NO_POSITIONS if positions is None else positions.row,
        fixed=plan.fixed_block > 0,
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
    sizes = [tile_sizes(plan.tiles, plan.mask, most, shape, target) for most in np.maximum(most_rows, 1).tolist()]
    heights, tokens = np.concatenate([own.heights for own in sizes]), np.array([own.tokens for own in sizes])
    heights = heights[tree]
    whole = not np.count_nonzero(plan.group_rows > heights[:, 0])
    items, runs = cut_rows(plan, runs_of_groups(plan, forest), heights, whole=whole)

    row_table, row0 = row_table_of(plan, forest)
    item, position = ragged(items.rows)
    row = row_table[(row0[items.group] + items.begin)[item] + position]
    partial_item = partial_items(
        items.rows, row, np.bincount(row, minlength=forest.num_rows), in_last_stage(plan, tree, trees)[items.group]
    )
    partial_rows = np.bincount(tree[items.group], np.where(partial_item, items.rows, 0), trees).astype(np.int64)
    if plan.stage.any() and plan.merge == "reduce":
        partial = partial_item[item]
        stage = plan.stage[items.group[item[partial]]].astype(np.int64)
        kept = kept_between_stages(row[partial].astype(np.int64), stage, int(plan.stage.max()) + 1)
        partial_rows += np.bincount(np.searchsorted(first_row, kept, side="right") - 1, minlength=trees)

    of_group = (tree * (int(plan.stage.max(initial=0)) + 1) + plan.stage)[items.group]
    _, first, launch = np.unique(of_group * tokens.shape[1] + items.tile, return_index=True, return_inverse=True)
    if not len(first):
        return Counts(partial_rows, np.zeros(trees, np.int64))
    of_launch, of_run = tokens[tree[items.group[first]], items.tile[first]], launch.repeat(runs.counts)
    pieces = packed_pieces_of(runs, runs.tokens, launch, tuple(of_launch.tolist()), _usual_block(plan))
    masked = np.bincount(of_run, masked_runs(runs, items.rows), len(first)) > 0
    mask_runs = np.where(masked[launch], np.add(*pieces.of_items), 0)
    return Counts(partial_rows, np.bincount(tree[items.group], mask_runs, trees).astype(np.int64))


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


@cache
def _launched(tile: TileClass, mask: TileMask, block: int, dealt: bool) -> TileClass:
    """The tile class with what the runs of a launch need."""
    return replace(tile, mask=mask, block=block, dealt=dealt)


@lru_cache(64)
def class_offsets(bounds: tuple[int, ...]) -> Ints:
    """Where the items of every class begin: the same at most steps of a batch."""
    return frozen(np.array(bounds))


@cache
def _stage_indptr(stages: int, launches: int) -> Ints:
    """Offsets of so many launches in stages, as many in each."""
    return frozen(np.arange(stages + 1) * (launches // stages))


def _usual_block(plan: Plan) -> int:
    """Granularity of packed runs."""
    return DEALT_BLOCK_TOKENS if plan.blocks else BLOCK_TOKENS


def _tabulate_classes(plan: Plan, arranged: Arranged, *, fixed: bool) -> tuple[tuple[TileClass, ...], PackedTables]:
    """The classes with the mask and blocks that their runs need, and the tables of all, one behind the other. fixed:
    the classes stay as they are.
    """
    sizes, tokens, items, runs, work, bounds, _ = arranged
    if fixed and plan.mask in BIT_MASKS:
        runs.table[:, 2], runs.table[:, 3] = bit_words(runs.table[:, 2], runs.table[:, 3])
    if fixed or not sizes[0].fused:
        pieces = pieces_of(runs, items.tile, tokens, tuple(tile.block for tile in sizes))
        return sizes, tabulate(runs, pieces, items.tile, tokens)
    pieces = packed_pieces_of(runs, work, items.tile, tokens, _usual_block(plan))
    mask: TileMask = "bits" if plan.mask in BIT_MASKS else "interval"
    of_runs = [0, len(runs.table)] if len(sizes) == 1 else runs.indptr[bounds].tolist()
    masked = masked_launches(runs, items.rows, of_runs)
    if mask == "bits":
        for is_masked, (begin, end) in zip(masked, pairwise(of_runs), strict=True):
            if is_masked:
                of_class = runs.table[begin:end]
                of_class[:, 2], of_class[:, 3] = bit_words(of_class[:, 2], of_class[:, 3])
    dealt = plan.blocks > 0
    classes = [
        _launched(tile, mask if is_masked else "none", block, dealt)
        for tile, block, is_masked in zip(sizes, pieces.block, masked, strict=True)
    ]
    return tuple(classes), tabulate(runs, pieces, items.tile, tokens)


def _tabulate_fixed(plan: Plan, tree: Tree, tile: TileClass, items: Items, runs: Runs) -> PackedTables:
    """The tables of a plan with fixed blocks, whose groups are work items each."""
    if len(items.group) and int(items.begin.max()):
        rows = int(plan.group_rows.max())
        raise PlanError(
            "fixed_block", f"a group of {rows} rows", f"exceeds a tile of {tile.rows} head rows", "divide it"
        )
    places = places_along_paths(plan, tree, items.group, runs)
    return tabulate(runs, fixed_pieces_of(runs, places, tile.tokens, tile.block), items.tile, (tile.tokens,))


class _Results(NamedTuple):
    """Where items write, in the terms of Schedule, and which classes merge in their epilogues, if any."""

    slot0: Each
    merges: Merges
    epilogue: Epilogue
    merging: list[bool] | None = None


def _results(
    plan: Plan, items: Items, row_table: Ints, row0: Longs, num_rows: int, num_stages: int, launches: int
) -> _Results:
    """Who writes partial slots, and when and by whom they are merged. row0: every item's first entry of the table."""
    rows = items.rows
    if int(np.add.reduce(rows)) == num_rows and not np.count_nonzero(plan.row_lo[1:] < plan.row_hi[:-1]):
        return _Results(-1, no_merges(rows[:0], num_stages), NO_EPILOGUE)  # every row has one item
    entry = ragged_ranges(row0, rows)
    row = row_table[entry]
    items_of_row = np.bincount(row, minlength=num_rows)
    unseeing = (items_of_row == 0).nonzero()[0]
    if len(row) + len(unseeing) == num_rows:  # no row has two items
        return _Results(-1, no_merges(unseeing, num_stages), NO_EPILOGUE)

    last = in_last_stage(plan, np.zeros(len(plan), np.int64), 1)[items.group]
    if last.any():
        item = np.arange(len(rows)).repeat(rows)
        check_last_items(item, row, last)
    partial = partial_items(rows, row, items_of_row, last)
    if plan.mask == "dense" and partial.any():
        raise PlanError("mask", plan.mask, "cannot merge rows that several groups have", "give every row to one group")
    before = offsets(np.where(partial, rows, 0))[:-1]
    slot0 = np.where(partial, before, -1)

    # Where a row's item of the last stage writes final output, its partials are merged there, else by a kernel.
    slot, kept, epilogue, merging = entry + (slot0 - row0).repeat(rows), partial.repeat(rows), NO_EPILOGUE, None
    if last.any():
        final = (last & ~partial).repeat(rows)
        entry_of_row = np.full(num_rows, -1)
        entry_of_row[row[final]] = entry[final]
        joined = kept & (entry_of_row[row] >= 0)
        epilogue = epilogue_lists(entry_of_row[row[joined]], slot[joined], len(row_table))
        kept &= ~joined
        if len(epilogue.slots):
            merges_any = final & (epilogue.indptr[1:] > epilogue.indptr[:-1])[entry]
            merging = (np.bincount(items.tile[item], merges_any, launches) > 0).tolist()
    kept_row = row[kept]
    if plan.fixed_block:  # every row's partials in the order of groups, which is that of its path
        order = items.group.repeat(rows)[kept].argsort(kind="stable")
        return _Results(slot0, single_stage_merges(kept_row[order], slot[kept][order], unseeing), epilogue)
    if num_stages == 1:
        merges = single_stage_merges(kept_row, slot[kept], unseeing)
    elif not len(kept_row):
        merges = no_merges(unseeing, num_stages)
    else:
        stage = items.tile.repeat(rows)[kept] // (launches // num_stages)
        if plan.merge == "final":
            stage = np.full(len(stage), num_stages - 1)
        merges = merge_lists(kept_row, slot[kept], stage, unseeing, num_stages)
    return _Results(slot0, merges, epilogue, merging)


def _deal(plan: Plan, classes: tuple[TileClass, ...], rows: Longs, work: Longs, shape: Shape, target: Target) -> _Work:
    """Lists of work for the thread blocks that the plan asks for, if any: the costliest items first
    (treegen.strategies.makespan). rows, work: rows and tokens of every item.

    Raises PlanError when the plan needs several tile classes.
    """
    if not plan.blocks:
        return _NO_WORK
    if len(classes) > 1 or not classes[0].fused:
        raise PlanError("blocks", plan.blocks, "needs a single tile class", "use one tile size, stage and fused mask")
    lanes = lanes_of(classes[0], shape)
    costs = task_costs(shape, target)(task_rows(rows, classes[0], shape), work)
    worker = assign(np.repeat(costs, lanes), min(plan.blocks, max(len(rows) * lanes, 1)))
    counts = np.bincount(worker, minlength=1)
    return _Work(frozen(offsets(counts)), frozen(np.argsort(worker, kind="stable")))


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
