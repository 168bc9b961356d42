"""Lowering: a plan, a tree's KV locations and an attention shape become a schedule. No Python loop over items or
tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints, Longs, frozen, offsets, ragged, ragged_ranges
from treegen.ir.plan import Plan
from treegen.ir.schedule import RUN_FIELDS, Schedule, TileClass
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.targets import Target
from treegen.tiles import BLOCK_TOKENS, rows_per_tile, tile_class, wanted_class


class _Runs(NamedTuple):
    """Runs of KV slots with an owner (a group, later an item) and the owner's rows that see them; grouped by owner."""

    owner: Longs
    slot: Longs
    length: Longs
    lo: Longs
    hi: Longs


class _Items(NamedTuple):
    """Row tiles: rows `begin:begin + rows` of a group, in the group's tile class `tile`, reading `work` tokens."""

    group: Longs
    begin: Longs
    rows: Longs
    tile: Longs
    work: Longs


class Counts(NamedTuple):
    """Per tree of a forest: rows of the partial buffer, and row intervals of the runs in masked work items."""

    partial_rows: Longs
    mask_runs: Longs


class _Tables(NamedTuple):
    """Tile and block tables, and per item where its part begins and how many tiles it has."""

    tiles: Ints
    blocks: Ints
    tile0: Longs
    tile_count: Longs
    block0: Longs
    block_tiles: Longs


def lower(plan: Plan, tree: Tree, shape: Shape, target: Target) -> Schedule:
    """The schedule of `plan`: row tiles of its groups as items, by tile class and longest first, and merge lists.

    An item whose rows have no other item writes final output, any other writes partial slots that the merge reads.
    Raises ShapeError when no tile class fits the shape.
    """
    sizes = _tile_sizes(plan, shape, target, int(plan.group_rows.max(initial=1)))
    heights = [rows_per_tile(tile.rows, shape.group) for tile in sizes]
    items, runs = _cut(plan, _runs_of_groups(plan, tree), np.tile(np.array(heights), (len(plan), 1)))
    item_group, begin, rows, item_class, work = items

    # Items that see nothing are dropped; the others are launched class by class, the longest first.
    order = np.lexsort((-work, item_class)) if len(sizes) > 1 else np.argsort(-work, kind="stable")
    order = order[work[order] > 0]
    number = np.full(len(rows), -1, np.int64)
    number[order] = np.arange(len(order))
    runs = _Runs(number[runs.owner], *runs[1:])
    runs = _Runs(*(column[np.argsort(runs.owner, kind="stable")] for column in runs))
    item_group, rows = item_group[order], rows[order]
    class_indptr = np.searchsorted(item_class[order], np.arange(len(sizes) + 1))
    classes, tables = _tabulate_classes(runs, sizes, class_indptr, rows)

    row_table, row0 = _row_table(plan, tree)
    row0 = row0[item_group] + begin[order]
    item, position = ragged(rows)
    row = row_table[row0[item] + position]
    shared, items_of_row = _shared(item, row, len(rows), tree.num_rows)
    slot0 = np.where(shared, offsets(np.where(shared, rows, 0))[:-1], -1)

    partial = shared[item]
    slot = (slot0[item] + position)[partial]
    partial_row = row[partial]
    by_row = np.argsort(partial_row, kind="stable")
    partials = np.bincount(partial_row, minlength=tree.num_rows)
    merge_rows = np.flatnonzero((partials > 0) | (items_of_row == 0))
    walk = (tables.tile0, tables.tile_count, tables.block0, tables.block_tiles)
    return Schedule(
        classes=classes,
        class_indptr=frozen(class_indptr),
        items=frozen(_table(row0, rows, *walk, slot0, item_group)),
        rows=row_table,
        tiles=frozen(tables.tiles),
        blocks=frozen(tables.blocks),
        merge_rows=frozen(merge_rows),
        merge_indptr=frozen(offsets(partials[merge_rows])),
        merge_slots=frozen(slot[by_row]),
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
    heights = np.array([[rows_per_tile(tile.rows, shape.group) for tile in own] for own in sizes])
    tokens = np.array([[tile.tokens for tile in own] for own in sizes])
    items, runs = _cut(plan, _runs_of_groups(plan, forest), heights[tree])

    row_table, row0 = _row_table(plan, forest)
    working = np.flatnonzero(items.work)
    item, position = ragged(items.rows[working])
    item = working[item]
    row = row_table[(row0[items.group] + items.begin)[item] + position]
    shared, _ = _shared(item, row, len(items.rows), forest.num_rows)

    launch = tree[items.group] * tokens.shape[1] + items.tile
    of_run, masked = launch[runs.owner], _masked(runs, items.rows)
    tile_tokens, block = tokens.ravel()[of_run], _block_tokens(runs, launch, tokens.ravel())[of_run]
    pieces = runs.length // tile_tokens - -(runs.length % tile_tokens) // block
    pieces = np.where((np.bincount(of_run, masked, tokens.size) > 0)[of_run], pieces, 0)
    return Counts(
        np.bincount(tree[items.group], np.where(shared, items.rows, 0), trees).astype(np.int64),
        np.bincount(tree[items.group][runs.owner], pieces, trees).astype(np.int64),
    )


def _cut(plan: Plan, runs: _Runs, heights: Longs) -> tuple[_Items, _Runs]:
    """Every group's row tiles and their runs. heights: per group the rows of a tile in every class, larger first."""
    group, step = ragged(-(-plan.group_rows // heights[:, 0]))
    begin = step * heights[group, 0]
    rows = np.minimum(plan.group_rows[group] - begin, heights[group, 0]).astype(np.int64)
    tile = (rows[:, None] <= heights[group, 1:]).sum(1)
    runs = _runs_of_items(runs, len(plan), group, begin, rows)
    work = np.bincount(runs.owner, runs.length, len(rows)).astype(np.int64)
    return _Items(group, begin, rows, tile, work), runs


def _shared(item: Longs, row: Ints, items: int, rows: int) -> tuple[npt.NDArray[np.bool_], Longs]:
    """Whether some row of an item is in another item too, and every row's items; of all (item, row) pairs."""
    items_of_row = np.bincount(row, minlength=rows)
    return np.bincount(item, items_of_row[row] > 1, items) > 0, items_of_row


def _masked(runs: _Runs, rows: Longs) -> npt.NDArray[np.bool_]:
    """Whether some of the owner's `rows` rows do not see a run."""
    return (runs.lo > 0) | (runs.hi < rows[runs.owner])


def _tile_sizes(plan: Plan, shape: Shape, target: Target, most_rows: int) -> list[TileClass]:
    """The tile classes that the plan wants, larger rows first, or the one that suits groups of `most_rows` rows."""
    if plan.tiles:
        return [wanted_class(rows, tokens, shape, target, masked=False) for rows, tokens in plan.tiles]
    return [tile_class(shape, target, max(1, most_rows), masked=False)]


def _tabulate_classes(
    runs: _Runs, sizes: list[TileClass], class_indptr: Longs, rows: Longs
) -> tuple[tuple[TileClass, ...], _Tables]:
    """The tables of all classes one behind the other, and the classes with the mask and blocks that their runs need."""
    masked = _masked(runs, rows)
    first_run = np.searchsorted(runs.owner, class_indptr)
    classes, tables = [], []
    tiles_before = blocks_before = 0
    for c, tile in enumerate(sizes):
        chosen = slice(first_run[c], first_run[c + 1])
        own = _Runs(runs.owner[chosen] - class_indptr[c], *(column[chosen] for column in runs[1:]))
        items = class_indptr[c + 1] - class_indptr[c]
        block = int(_block_tokens(own, np.zeros(items, np.int64), np.array([tile.tokens]))[0])
        tile = replace(tile, masked=bool(masked[chosen].any()), block=block)
        made = _tabulate(own, items, tile.tokens, tile.block)
        classes.append(tile)
        tables.append(made._replace(tile0=made.tile0 + tiles_before, block0=made.block0 + blocks_before))
        tiles_before += len(made.tiles)
        blocks_before += len(made.blocks)
    return tuple(classes), _Tables(*(np.concatenate(column) for column in zip(*tables, strict=True)))


def _runs_of_groups(plan: Plan, tree: Tree) -> _Runs:
    """Every segment cut at the borders of its node's KV runs."""
    ends = offsets(tree.kv.length)  # token coordinates through all nodes; runs cover them without gaps
    begin = offsets(tree.tokens)[plan.node] + plan.start
    end = begin + plan.read_tokens
    first = np.searchsorted(ends, begin, side="right") - 1
    counts = np.searchsorted(ends, end) - first
    segment = np.repeat(np.arange(len(begin)), counts)
    run = ragged_ranges(first, counts)
    from_token = np.maximum(begin[segment], ends[run])
    to_token = np.minimum(end[segment], ends[run + 1])
    return _Runs(
        plan.segment_group[segment],
        tree.kv.start[run] + from_token - ends[run],
        to_token - from_token,
        plan.seen_lo[segment].astype(np.int64),
        plan.seen_hi[segment].astype(np.int64),
    )


def _runs_of_items(runs: _Runs, groups: int, item_group: Longs, begin: Longs, rows: Longs) -> _Runs:
    """Each group's runs handed to its row tiles, without those that none of a tile's rows sees.

    Runs that nobody in the group sees stay: the strategy reads them on purpose.
    """
    indptr = np.searchsorted(runs.owner, np.arange(groups + 1))
    counts = np.diff(indptr)[item_group]
    item = np.repeat(np.arange(len(item_group)), counts)
    run = ragged_ranges(indptr[item_group], counts)
    lo = np.maximum(runs.lo[run] - begin[item], 0)
    hi = np.minimum(runs.hi[run] - begin[item], rows[item])
    unseen = runs.lo[run] == runs.hi[run]
    kept = (hi > lo) | unseen
    lo, hi = np.where(unseen, 0, lo), np.where(unseen, 0, hi)
    return _Runs(item[kept], runs.slot[run][kept], runs.length[run][kept], lo[kept], hi[kept])


def _block_tokens(runs: _Runs, launch: Longs, tile_tokens: Longs) -> Longs:
    """Per launch 16, or 1 (a slot per token) where packing in blocks of 16 makes a quarter more tiles, full ones
    counted. launch: of every item; tile_tokens: of every launch.
    """
    per_item, launches = tile_tokens[launch], len(tile_tokens)
    per_run = per_item[runs.owner]
    full = np.bincount(launch[runs.owner], runs.length // per_run, launches)
    rest = runs.length % per_run
    blocks = np.bincount(runs.owner, -(-rest // BLOCK_TOKENS), len(launch))
    tokens = np.bincount(runs.owner, rest, len(launch))
    by_block = full + np.bincount(launch, np.ceil(blocks * BLOCK_TOKENS / per_item), launches)
    by_token = full + np.bincount(launch, np.ceil(tokens / per_item), launches)
    return np.where(by_block > 1.25 * by_token, 1, BLOCK_TOKENS)


def _tabulate(runs: _Runs, items: int, tokens: int, block: int) -> _Tables:
    """Cuts every run into full tiles and a rest in blocks; an item's blocks are packed into tiles one after another."""
    full = runs.length // tokens
    run, step = ragged(full)
    tiles = _table(runs.slot[run] + step * tokens, tokens, runs.lo[run], runs.hi[run])
    tile_count = np.bincount(runs.owner, full, items).astype(np.int64)

    rest = runs.length - full * tokens
    run, step = ragged(-(-rest // block))
    item = runs.owner[run]
    block_count = np.bincount(item, minlength=items)
    per_tile = tokens // block
    block_tiles = -(-block_count // per_tile)
    block0 = offsets(block_tiles * per_tile)
    blocks = np.zeros((block0[-1], len(RUN_FIELDS)), np.int32)
    if len(run):
        slot = runs.slot[run] + full[run] * tokens + step * block
        length = np.minimum(rest[run] - step * block, block)
        place = np.arange(len(item)) + (block0[:-1] - offsets(block_count)[:-1])[item]
        blocks[place] = _table(slot, length, runs.lo[run], runs.hi[run])
    return _Tables(tiles, blocks, offsets(tile_count)[:-1], tile_count, block0[:-1], block_tiles)


def _table(first: Longs, *others: Longs | int) -> Ints:
    """An int32 table of these columns."""
    table = np.empty((len(first), 1 + len(others)), np.int32)
    for column, values in enumerate((first, *others)):
        table[:, column] = values
    return table


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
