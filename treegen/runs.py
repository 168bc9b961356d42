"""Runs of KV slots: a plan's segments on the KV cache, handed to work items and cut into tiles. No Python loop over
items or tokens.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints, Longs, frozen, offsets, positions, ragged_ranges
from treegen.ir.plan import Plan
from treegen.ir.schedule import RUN_FIELDS
from treegen.ir.tree import Tree

MOST_SPREAD = 1.25
"""Runs are packed slot by slot where packing in blocks would make more than so many times as many tiles."""

Each: TypeAlias = "int | Longs"
"""One number for all, or an array of one for each: most schedules have one tile size."""


class Runs(NamedTuple):
    """Runs of KV slots by owner (a group, later an item): owner i has the rows `indptr[i]:indptr[i + 1]` of `table`,
    whose columns are RUN_FIELDS.
    """

    indptr: Longs
    table: Longs

    @property
    def counts(self) -> Longs:
        """Runs of every owner."""
        return self.indptr[1:] - self.indptr[:-1]

    def of(self, owners: Longs) -> Runs:
        """The runs of these owners, in this order."""
        counts = self.counts[owners]
        return Runs(offsets(counts), self.table[ragged_ranges(self.indptr[owners], counts)])


class Pieces(NamedTuple):
    """Runs cut into tiles of `tokens` tokens: how many full ones there are, and how many tokens remain."""

    tokens: Each
    full: Longs
    rest: Longs


class Tables(NamedTuple):
    """Tile and block tables, and per item where its part begins and how many tiles it has."""

    tiles: Ints
    blocks: Ints
    tile0: Longs
    tile_count: Longs
    block0: Longs
    block_tiles: Longs


def runs_of_groups(plan: Plan, tree: Tree) -> Runs:
    """Every segment cut at the borders of its node's KV runs. Segments that nobody in the group sees are seen by 0:0."""
    kv, indptr = tree.kv, plan.segment_indptr.astype(np.int64)
    table = np.empty((len(plan.node), len(RUN_FIELDS)), np.int64)
    slot, length, lo, hi = table.T
    length[:], lo[:], hi[:] = plan.stop - plan.start, plan.seen_lo, plan.seen_hi
    unseen = lo == hi
    if unseen.any():
        table[unseen, 2:] = 0
    first_run = kv.indptr[plan.node]
    if len(kv.start) == np.count_nonzero(tree.tokens):  # every node that has tokens is one run
        slot[:] = kv.start[first_run] + plan.start
        return Runs(indptr, table)
    ends = offsets(kv.length)  # token coordinates through all nodes; runs cover them without gaps
    begin = ends[first_run] + plan.start
    end = begin + length
    first = ends.searchsorted(begin, "right") - 1
    counts = ends.searchsorted(end) - first
    run = ragged_ranges(first, counts)
    from_token = np.maximum(begin.repeat(counts), ends[run])
    table = table.repeat(counts, axis=0)
    table[:, 0] = kv.start[run] + from_token - ends[run]
    table[:, 1] = np.minimum(end.repeat(counts), ends[run + 1]) - from_token
    return Runs(offsets(counts)[indptr], table)


def runs_of_items(runs: Runs, group: Longs, begin: Longs, rows: Longs) -> Runs:
    """Each group's runs handed to its row tiles, without those that none of a tile's rows sees.

    Runs that nobody in the group sees stay: the strategy reads them on purpose.
    """
    counts = runs.counts[group]
    table = runs.table[ragged_ranges(runs.indptr[group], counts)]
    lo, hi = table[:, 2], table[:, 3]
    unseen = lo == hi
    first = begin.repeat(counts)
    lo, hi = np.maximum(lo - first, 0), np.minimum(hi - first, rows.repeat(counts))
    table[:, 2], table[:, 3] = np.where(unseen, 0, lo), np.where(unseen, 0, hi)
    kept = (hi > lo) | unseen
    return Runs(offsets(kept)[offsets(counts)], table[kept])


def masked_runs(runs: Runs, rows: Longs) -> npt.NDArray[np.bool_]:
    """Whether some of the owner's `rows` rows do not see a run."""
    masked: npt.NDArray[np.bool_] = runs.table[:, 3] - runs.table[:, 2] != rows.repeat(runs.counts)
    return masked


def bit_words(lo: Longs, hi: Longs) -> tuple[Longs, Longs]:
    """The lower and the upper half, as int32 values, of 64-bit words with bits `lo:hi` set."""
    below = [
        np.where(end > 0, np.uint64(2**64 - 1) >> (64 - np.maximum(end, 1)).astype(np.uint64), np.uint64(0))
        for end in (lo, hi)
    ]
    halves = (below[0] ^ below[1]).view(np.int32).reshape(-1, 2)
    return halves[:, 0].astype(np.int64), halves[:, 1].astype(np.int64)


def pieces_of(runs: Runs, tokens: Each) -> Pieces:
    """The runs cut into tiles of `tokens` tokens."""
    length = runs.table[:, 1]
    full = length // tokens
    return Pieces(tokens, full, length - full * tokens)


def block_tokens(runs: Runs, pieces: Pieces, launch: Longs, tile_tokens: Longs, usual: int) -> Longs:
    """Per launch `usual`, or 1 (a slot per token) where packing in blocks of that size makes a quarter more tiles, full
    ones counted. launch: of every item, of which none is without runs; tile_tokens: of every launch.
    """
    block = np.minimum(usual, tile_tokens)
    per_item, of_item = each(tile_tokens, launch), each(block, launch)
    of_run = of_item if isinstance(of_item, int) else of_item.repeat(runs.counts)
    counted = np.array((pieces.full, pieces.rest, -(-pieces.rest // of_run)))
    full, rest, blocks = np.add.reduceat(counted, runs.indptr[:-1], axis=1)
    by_block, by_token = -(-blocks * of_item // per_item), -(-rest // per_item)
    if (by_block == by_token).all():
        return block
    tiles = [np.bincount(launch, full + packed, len(block)) for packed in (by_block, by_token)]
    return np.where(tiles[0] > MOST_SPREAD * tiles[1], 1, block)


def tabulate(runs: Runs, pieces: Pieces, block: Each, per_tile: Each) -> Tables:
    """Cuts every run into full tiles and a rest in blocks; an item's blocks are packed into tiles one after another.

    block: tokens of a block, of every run; per_tile: blocks of a tile, of every item.
    """
    full, rest, table = pieces.full, pieces.rest, runs.table
    ends = offsets(full)
    tiles = table.repeat(full, axis=0)
    step, tokens = positions(ends, full), pieces.tokens
    size = tokens if isinstance(tokens, int) else tokens.repeat(full)
    tiles[:, 0] += step * size
    tiles[:, 1] = size
    tile0 = ends[runs.indptr]

    counts = -(-rest // block)
    ends = offsets(counts)
    first_block = ends[runs.indptr]
    block_count = first_block[1:] - first_block[:-1]
    block_tiles = -(-block_count // per_tile)
    block0 = offsets(block_tiles * per_tile)
    table = table.copy()
    table[:, 0] += full * tokens
    table[:, 1] = rest
    blocks = table.repeat(counts, axis=0)
    size = block if isinstance(block, int) else block.repeat(counts)
    before = positions(ends, counts) * size
    blocks[:, 0] += before
    blocks[:, 1] = np.minimum(blocks[:, 1] - before, size)
    if block0[-1] > len(blocks):
        padded = np.zeros((block0[-1], len(RUN_FIELDS)), np.int32)
        padded[np.arange(len(blocks)) + (block0 - first_block)[:-1].repeat(block_count)] = blocks
        blocks = padded
    return Tables(frozen(tiles), frozen(blocks), tile0[:-1], tile0[1:] - tile0[:-1], block0[:-1], block_tiles)


def each(values: Longs, owner: Longs) -> Each:
    """`values[owner]`, or the only one of them."""
    first = int(values[0])
    return first if len(values) == 1 or (values == first).all() else values[owner]
