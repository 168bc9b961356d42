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
        return Runs(offsets(counts), self.table.take(ragged_ranges(self.indptr[owners], counts), axis=0))


class Pieces(NamedTuple):
    """Runs cut into full tiles and a rest in blocks. tokens: of a tile, by run; block: tokens of a block, by launch.

    Run i has `full[i]` full tiles, numbered from `tile_ends[i]`, and a rest of `rest[i]` tokens in `blocks[i]` blocks,
    numbered from `block_ends[i]`.
    """

    tokens: Each
    block: Longs
    full: Longs
    rest: Longs
    blocks: Longs
    tile_ends: Longs
    block_ends: Longs


class Tables(NamedTuple):
    """Tile and block tables, and per item where its part begins and how many tiles it has."""

    tiles: Ints
    blocks: Ints
    tile0: Longs
    tile_count: Longs
    block0: Longs
    block_tiles: Longs


def runs_of_groups(plan: Plan, tree: Tree) -> Runs:
    """Every segment cut at the borders of its node's KV runs. Those that nobody in the group sees are seen by 0:0."""
    kv, indptr, length = tree.kv, plan.segment_indptr.astype(np.int64), plan.stop - plan.start
    table = np.empty((len(length), len(RUN_FIELDS)), np.int64)
    table[:, 1], table[:, 2], table[:, 3] = length, plan.seen_lo, plan.seen_hi
    seen = plan.seen_hi > plan.seen_lo
    if np.count_nonzero(seen) < len(seen):
        table[~seen, 2:] = 0
    first_run = kv.indptr[plan.node]
    if len(kv.start) == np.count_nonzero(tree.tokens):  # every node that has tokens is one run
        table[:, 0] = kv.start[first_run] + plan.start
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
    table = runs.table.take(ragged_ranges(runs.indptr[group], counts), axis=0)
    lo, hi = table[:, 2], table[:, 3]
    unseen = lo == hi
    first = begin.repeat(counts)
    lo, hi = np.maximum(lo - first, 0), np.minimum(hi - first, rows.repeat(counts))
    kept = (hi > lo) | unseen
    lo[unseen] = hi[unseen] = 0
    table[:, 2], table[:, 3] = lo, hi
    if np.count_nonzero(kept) == len(kept):
        return Runs(offsets(counts), table)
    return Runs(offsets(kept)[offsets(counts)], table.compress(kept, axis=0))


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


def pieces_of(runs: Runs, launch: Longs, tile_tokens: Longs, block: Longs) -> Pieces:
    """The runs cut into tiles and blocks of these tokens, by launch. launch: of every item."""
    tokens, length = each(tile_tokens, launch, runs), runs.table[:, 1]
    full = length // tokens
    rest = length - full * tokens
    blocks = _ceiled(rest, each(block, launch, runs))
    return Pieces(tokens, block, full, rest, blocks, offsets(full), offsets(blocks))


def packed_pieces_of(runs: Runs, launch: Longs, tile_tokens: Longs, usual: int) -> Pieces:
    """The same in blocks of `usual` tokens, or of 1 (a slot per token) in launches where packing in blocks of that size
    makes a quarter more tiles, full ones counted. No item is without runs.
    """
    block = np.minimum(usual, tile_tokens)
    pieces = pieces_of(runs, launch, tile_tokens, block)
    of_item, first = each(tile_tokens, launch), pieces.block_ends[runs.indptr]
    by_block = _ceiled((first[1:] - first[:-1]) * each(block, launch), of_item)
    by_token = _ceiled(np.add.reduceat(pieces.rest, runs.indptr[:-1]), of_item)
    if not np.count_nonzero(by_block != by_token):
        return pieces
    first = pieces.tile_ends[runs.indptr]
    full = first[1:] - first[:-1]
    tiles = [np.bincount(launch, full + packed, len(block)) for packed in (by_block, by_token)]
    spread = tiles[0] > MOST_SPREAD * tiles[1]
    return pieces_of(runs, launch, tile_tokens, np.where(spread, 1, block)) if spread.any() else pieces


def tabulate(runs: Runs, pieces: Pieces, launch: Longs, tile_tokens: Longs) -> Tables:
    """The tables of runs cut into pieces; an item's blocks are packed into tiles one after another. Arguments as of
    `pieces_of`.
    """
    block, per_tile = each(pieces.block, launch, runs), each(tile_tokens // pieces.block, launch)
    tokens, full, rest, blocks = pieces.tokens, pieces.full, runs.table.copy(), pieces.blocks
    tiles, size = rest.repeat(full, axis=0), tokens if isinstance(tokens, int) else tokens.repeat(full)
    tiles[:, 0] += positions(pieces.tile_ends, full) * size
    tiles[:, 1] = size
    tile0 = pieces.tile_ends[runs.indptr]

    first_block = pieces.block_ends[runs.indptr]
    block_count = first_block[1:] - first_block[:-1]
    block_tiles = _ceiled(block_count, per_tile)
    block0 = offsets(block_tiles * per_tile)
    rest[:, 0] += full * tokens
    rest[:, 1] = pieces.rest
    packed, size = rest.repeat(blocks, axis=0), block if isinstance(block, int) else block.repeat(blocks)
    before = positions(pieces.block_ends, blocks) * size
    packed[:, 0] += before
    packed[:, 1] = np.minimum(packed[:, 1] - before, size)
    if block0[-1] > len(packed):
        padded = np.zeros((block0[-1], len(RUN_FIELDS)), np.int32)
        padded[np.arange(len(packed)) + (block0 - first_block)[:-1].repeat(block_count)] = packed
        packed = padded
    return Tables(frozen(tiles), frozen(packed), tile0[:-1], tile0[1:] - tile0[:-1], block0[:-1], block_tiles)


def each(values: Longs, owner: Longs, runs: Runs | None = None) -> Each:
    """`values[owner]`, or the only one of them; with `runs`, which owners have, by run."""
    first = values.item(0)
    if len(values) == 1 or (values == first).all():
        return first
    return values[owner] if runs is None else values[owner].repeat(runs.counts)


def _ceiled(values: Longs, by: Each) -> Longs:
    """Values divided by powers of two, rounded up."""
    return values + (by - 1) >> by.bit_length() - 1 if isinstance(by, int) else -(-values // by)


def table(*columns: Longs) -> Ints:
    """A read-only int32 table of these columns."""
    made = np.empty((len(columns[0]), len(columns)), np.int32)
    for index, column in enumerate(columns):
        made[:, index] = column
    return frozen(made)
