"""Runs of KV slots: a plan's segments on the KV cache, handed to work items and cut into tiles. No Python loop over
items or tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints, Longs, offsets, ragged, ragged_ranges
from treegen.ir.plan import Plan
from treegen.ir.schedule import RUN_FIELDS
from treegen.ir.tree import Tree

MOST_SPREAD = 1.25
"""Runs are packed slot by slot where packing in blocks would make more than so many times as many tiles."""


class Runs(NamedTuple):
    """Runs of KV slots with an owner (a group, later an item) and the owner's rows that see them; grouped by owner."""

    owner: Longs
    slot: Longs
    length: Longs
    lo: Longs
    hi: Longs


class Tables(NamedTuple):
    """Tile and block tables, and per item where its part begins and how many tiles it has."""

    tiles: Ints
    blocks: Ints
    tile0: Longs
    tile_count: Longs
    block0: Longs
    block_tiles: Longs


def runs_of_groups(plan: Plan, tree: Tree) -> Runs:
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
    return Runs(
        plan.segment_group[segment],
        tree.kv.start[run] + from_token - ends[run],
        to_token - from_token,
        plan.seen_lo[segment].astype(np.int64),
        plan.seen_hi[segment].astype(np.int64),
    )


def runs_of_items(runs: Runs, groups: int, item_group: Longs, begin: Longs, rows: Longs) -> Runs:
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
    return Runs(item[kept], runs.slot[run][kept], runs.length[run][kept], lo[kept], hi[kept])


def masked_runs(runs: Runs, rows: Longs) -> npt.NDArray[np.bool_]:
    """Whether some of the owner's `rows` rows do not see a run."""
    return (runs.lo > 0) | (runs.hi < rows[runs.owner])


def bit_words(lo: Longs, hi: Longs) -> tuple[Longs, Longs]:
    """The lower and the upper half, as int32 values, of 64-bit words with bits `lo:hi` set."""
    below = [
        np.where(end > 0, np.uint64(2**64 - 1) >> (64 - np.maximum(end, 1)).astype(np.uint64), np.uint64(0))
        for end in (lo, hi)
    ]
    halves = (below[0] ^ below[1]).view(np.int32).reshape(-1, 2)
    return halves[:, 0].astype(np.int64), halves[:, 1].astype(np.int64)


def block_tokens(runs: Runs, launch: Longs, tile_tokens: Longs, usual: int) -> Longs:
    """Per launch `usual`, or 1 (a slot per token) where packing in blocks of that size makes a quarter more tiles, full
    ones counted. launch: of every item; tile_tokens: of every launch.
    """
    per_item, launches = tile_tokens[launch], len(tile_tokens)
    block = np.minimum(usual, tile_tokens)
    per_run, of_run = per_item[runs.owner], block[launch][runs.owner]
    full = np.bincount(launch[runs.owner], runs.length // per_run, launches)
    rest = runs.length % per_run
    blocks = np.bincount(runs.owner, -(-rest // of_run), len(launch))
    tokens = np.bincount(runs.owner, rest, len(launch))
    by_block = full + np.bincount(launch, np.ceil(blocks * block[launch] / per_item), launches)
    by_token = full + np.bincount(launch, np.ceil(tokens / per_item), launches)
    return np.where(by_block > MOST_SPREAD * by_token, 1, block)


def tabulate(runs: Runs, items: int, tokens: int, block: int) -> Tables:
    """Cuts every run into full tiles and a rest in blocks; an item's blocks are packed into tiles one after another."""
    full = runs.length // tokens
    run, step = ragged(full)
    tiles = table(runs.slot[run] + step * tokens, tokens, runs.lo[run], runs.hi[run])
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
        blocks[place] = table(slot, length, runs.lo[run], runs.hi[run])
    return Tables(tiles, blocks, offsets(tile_count)[:-1], tile_count, block0[:-1], block_tiles)


def table(first: Longs, *others: Longs | int) -> Ints:
    """An int32 table of these columns."""
    table = np.empty((len(first), 1 + len(others)), np.int32)
    for column, values in enumerate((first, *others)):
        table[:, column] = values
    return table
