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
Sizes: TypeAlias = tuple[int, ...]
"""Tokens of the tiles, or of the blocks, of every launch."""


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

    counts [2, runs]: full tiles and blocks; ends: where every run's tiles begin when all are numbered, and behind them
    its blocks; of_items [2, items] and first [2, items]: the same two of items. rest [runs]: tokens.
    """

    tokens: Each
    block: Sizes
    counts: Longs
    rest: Longs
    ends: Longs
    of_items: Longs
    first: Longs


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


def pieces_of(runs: Runs, launch: Longs, tile_tokens: Sizes, block: Sizes) -> Pieces:
    """The runs cut into tiles and blocks of these tokens. launch: of every item."""
    tokens, length = _each(tile_tokens, launch, runs), runs.table[:, 1].copy()
    full = length >> tokens.bit_length() - 1 if isinstance(tokens, int) else length // tokens
    rest = length - full * tokens
    counts = np.array((full, _ceiled(rest, _each(block, launch, runs))))
    ends = offsets(counts.reshape(-1))
    first = ends[np.array((runs.indptr, runs.indptr + len(length)))]
    return Pieces(tokens, block, counts, rest, ends, first[:, 1:] - first[:, :-1], first[:, :-1])


def packed_pieces_of(runs: Runs, launch: Longs, tile_tokens: Sizes, usual: int) -> Pieces:
    """The same in blocks of `usual` tokens, or of 1 (a slot per token) in launches where packing in blocks of that size
    makes a quarter more tiles, full ones counted. No item is without runs.
    """
    block = tuple([min(usual, tokens) for tokens in tile_tokens])
    pieces = pieces_of(runs, launch, tile_tokens, block)
    of_item, (full, blocks) = _each(tile_tokens, launch), pieces.of_items
    by_block = _ceiled(blocks * _each(block, launch), of_item)
    by_token = _ceiled(np.add.reduceat(pieces.rest, runs.indptr[:-1]), of_item)
    if not np.count_nonzero(by_block != by_token):
        return pieces
    tiles = [np.bincount(launch, full + packed, len(block)) for packed in (by_block, by_token)]
    spread = (tiles[0] > MOST_SPREAD * tiles[1]).tolist()
    if not any(spread):
        return pieces
    single = tuple([1 if spreads else tokens for tokens, spreads in zip(block, spread, strict=True)])
    return pieces_of(runs, launch, tile_tokens, single)


def tabulate(runs: Runs, pieces: Pieces, launch: Longs, tile_tokens: Sizes) -> Tables:
    """The tables of runs cut into pieces; an item's blocks are packed into tiles one after another. Arguments as of
    `pieces_of`.
    """
    count, tokens, (full, blocks) = len(runs.table), pieces.tokens, pieces.counts
    block = _each(pieces.block, launch, runs)
    # All tiles and then all blocks: piece number `step` of a part that begins in a slot and has so many tokens.
    parts = np.empty((2, *runs.table.shape), np.int64)
    parts[:] = runs.table
    parts[0, :, 1] = full * tokens
    parts[1, :, 0] += parts[0, :, 1]
    parts[1, :, 1] = pieces.rest
    numbers, num_tiles = pieces.counts.reshape(-1), int(pieces.ends[count])
    table = parts.reshape(-1, len(RUN_FIELDS)).repeat(numbers, axis=0)
    size = np.empty(len(table), np.int64)
    size[:num_tiles] = tokens if isinstance(tokens, int) else tokens.repeat(full)
    size[num_tiles:] = block if isinstance(block, int) else block.repeat(blocks)
    before = positions(pieces.ends, numbers) * size
    table[:, 0] += before
    table[:, 1] = np.minimum(table[:, 1] - before, size)
    made = frozen(table)
    tiles, packed = made[:num_tiles], made[num_tiles:]

    tile_count, block_count = pieces.of_items
    per_tile = _each(tuple([of_tile // size for of_tile, size in zip(tile_tokens, pieces.block, strict=True)]), launch)
    block_tiles = _ceiled(block_count, per_tile)
    block0 = offsets(block_tiles * per_tile)
    if block0[-1] > len(packed):
        # Gathered, with nothing where there is no block: NumPy gathers rows faster than it scatters them.
        shift = block0[:-1] - (pieces.first[1] - num_tiles)
        source = np.full(block0[-1], -1)
        source[np.arange(len(packed)) + shift.repeat(block_count)] = np.arange(len(packed))
        packed = packed.take(source, axis=0)
        packed[source < 0] = 0
        packed = frozen(packed)
    return Tables(tiles, packed, pieces.first[0], tile_count, block0[:-1], block_tiles)


def _each(values: Sizes, owner: Longs, runs: Runs | None = None) -> Each:
    """`values[owner]`, or the only one of them; with `runs`, which owners have, by run."""
    if len(values) == 1 or len(set(values)) == 1:
        return values[0]
    of_owners = np.array(values)[owner]
    return of_owners if runs is None else of_owners.repeat(runs.counts)


def _ceiled(values: Longs, by: Each) -> Longs:
    """Values divided by powers of two, rounded up."""
    return values + (by - 1) >> by.bit_length() - 1 if isinstance(by, int) else -(-values // by)


def table(first: Longs, *others: Each) -> Ints:
    """A read-only int32 table of these columns."""
    made = np.empty((len(first), 1 + len(others)), np.int32)
    for index, column in enumerate((first, *others)):
        made[:, index] = column
    return frozen(made)
