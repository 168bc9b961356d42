"""Runs of KV slots: a plan's segments on the KV cache, handed to work items and cut into tiles. No Python loop over
items or tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints, Longs, frozen, largest, offsets, positions, ragged_ranges
from treegen.ir.errors import PlanError
from treegen.ir.kv import KVRuns
from treegen.ir.plan import Plan
from treegen.ir.positions import Positions
from treegen.ir.schedule import POSITIONED_RUN_FIELDS, RUN_FIELDS
from treegen.ir.tree import Tree

MOST_SPREAD = 1.25
"""Runs are packed slot by slot where packing in blocks would make more than so many times as many tiles."""

# Of more pieces, most of them whole runs, as of pages in any order, only those of runs that are cut are gone through.
_MANY_PIECES = 4096

Each: TypeAlias = "int | Longs"
"""One number for all, or an array of one for each: most schedules have one tile size."""
Sizes: TypeAlias = tuple[int, ...]
"""Tokens of the tiles, or of the blocks, of every launch."""


class Runs(NamedTuple):
    """Runs of KV slots by owner (a group, later an item): owner i has the rows `indptr[i]:indptr[i + 1]` of `table`,
    whose columns are RUN_FIELDS, or POSITIONED_RUN_FIELDS.
    """

    indptr: Longs
    table: Ints

    @property
    def counts(self) -> Longs:
        """Runs of every owner."""
        return self.indptr[1:] - self.indptr[:-1]

    def of(self, owners: Longs) -> Runs:
        """The runs of these owners, in this order."""
        counts = self.counts[owners]
        places = offsets(counts)
        return Runs(places, self.table.take(ragged_ranges(self.indptr[owners], counts, places), axis=0))


class Pieces(NamedTuple):
    """Runs cut into full tiles and a rest in blocks. block: tokens of a block, by launch.

    full, blocks [runs]: full tiles and blocks of every run, full None where no run has any; rest [runs]: tokens behind
    full tiles. of_items: full tiles and blocks of every item; block_tiles [items]: the tiles that its blocks are packed
    into. padded: some blocks are behind the end of their run, and empty.
    """

    block: Sizes
    full: Longs | None
    blocks: Longs
    rest: Longs
    of_items: tuple[Longs, Longs]
    block_tiles: Longs
    padded: bool = False

    @property
    def of_runs(self) -> Longs:
        """Full tiles and blocks of every run."""
        return self.blocks if self.full is None else self.full + self.blocks


class Tables(NamedTuple):
    """Tile and block tables, and per item where its part begins and how many tiles it has."""

    tiles: Ints
    blocks: Ints
    tile0: Longs
    tile_count: Longs
    block0: Longs
    block_tiles: Longs


def runs_of_groups(plan: Plan, tree: Tree, positions: Positions | None = None) -> Runs:
    """Every segment cut at the borders of its node's KV runs. Those that nobody in the group sees are seen by 0:0."""
    kv, indptr, length = tree.kv, plan.segment_indptr.astype(np.int64), plan.stop - plan.start
    table = np.empty((len(length), len(RUN_FIELDS if positions is None else POSITIONED_RUN_FIELDS)), np.int32)
    table[:, 1], table[:, 2], table[:, 3] = length, plan.seen_lo, plan.seen_hi
    if positions is not None:
        table[:, 4] = positions.node[plan.node] + plan.start
    seen = plan.seen_hi > plan.seen_lo
    if np.count_nonzero(seen) < len(seen):
        table[~seen, 2:4] = 0
    if len(kv.start) == np.count_nonzero(tree.tokens):  # every node that has tokens is one run
        run = plan.node if len(kv.start) == len(tree.tokens) else kv.indptr.take(plan.node)
        np.add(kv.start.take(run), plan.start, out=table[:, 0])
        return Runs(indptr, table)
    node, first = plan.node.astype(np.int64), kv.indptr.astype(np.int64)
    first_run = first.take(node)
    if np.count_nonzero(plan.start) or np.count_nonzero(plan.stop != tree.tokens.take(node)):
        return _cut_runs(Runs(indptr, table), kv, first_run, plan.start)
    counts = first[1:].take(node) - first_run
    places = offsets(counts)
    return Runs(places[indptr], _on_runs(table, kv, first_run, counts, places))


def _cut_runs(segments: Runs, kv: KVRuns, first_run: Longs, start: Ints) -> Runs:
    """The runs of segments that may begin and end inside of runs, `start` tokens behind the one that their node begins
    with.
    """
    ends = offsets(kv.length)  # token coordinates through all nodes; runs cover them without gaps
    begin = ends[first_run] + start
    end = begin + segments.table[:, 1]
    first = ends.searchsorted(begin, "right") - 1
    last = ends.searchsorted(end)
    places = offsets(last - first)
    table = _on_runs(segments.table, kv, first, last - first, places)
    before = begin - ends[first]
    table[places[:-1], 0] += before
    table[places[:-1], 1] -= before
    if table.shape[1] > len(RUN_FIELDS):  # of later runs than a segment's first
        table[:, 4] -= before.repeat(last - first).astype(np.int32)
        table[places[:-1], 4] += before
    table[places[1:] - 1, 1] -= ends[last] - end
    return Runs(places[segments.indptr], table)


def _on_runs(segments: Ints, kv: KVRuns, first: Longs, counts: Longs, places: Longs) -> Ints:
    """A table of segments as one of so many whole runs each, from run `first` on. places: the `offsets` of counts."""
    run = ragged_ranges(first, counts, places)
    table = segments.repeat(counts, axis=0)
    table[:, 0] = kv.start.take(run)
    table[:, 1] = kv.length.take(run)
    if table.shape[1] > len(RUN_FIELDS):
        ends = offsets(kv.length)
        table[:, 4] += (ends[run] - ends[first].repeat(counts)).astype(np.int32)
    return table


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


def bit_words(lo: Ints, hi: Ints) -> tuple[Longs, Longs]:
    """The lower and the upper half, as int32 values, of 64-bit words with bits `lo:hi` set."""
    below = [
        np.where(end > 0, np.uint64(2**64 - 1) >> (64 - np.maximum(end, 1)).astype(np.uint64), np.uint64(0))
        for end in (lo, hi)
    ]
    halves = (below[0] ^ below[1]).view(np.int32).reshape(-1, 2)
    return halves[:, 0].astype(np.int64), halves[:, 1].astype(np.int64)


def masked_launches(runs: Runs, rows: Longs, bounds: list[int]) -> list[bool]:
    """Whether a launch has a run that some of its owner's `rows` rows do not see. bounds: where the runs of every
    launch begin, and where the last ones end.
    """
    later = runs.table[:, 2]  # seldom is none of a launch's runs seen by later rows than the first alone
    found = [bool(np.count_nonzero(later[begin:end])) for begin, end in pairwise(bounds)]
    if all(found):
        return found
    masked = masked_runs(runs, rows)
    return [bool(np.count_nonzero(masked[begin:end])) for begin, end in pairwise(bounds)]


def pieces_of(runs: Runs, launch: Longs, tile_tokens: Sizes, block: Sizes) -> Pieces:
    """The runs cut into tiles and blocks of these tokens. launch: of every item. No item is without runs."""
    rest, first_run, full = runs.table[:, 1].astype(np.int64), runs.indptr[:-1], None
    if not len(rest) or largest(rest) < min(tile_tokens):
        full_of_items = np.zeros(len(launch), np.int64)
    else:
        tokens = _each(tile_tokens, launch, runs)
        if isinstance(tokens, int):
            full = rest >> (tokens.bit_length() - 1)
            rest &= tokens - 1
        else:
            full, rest = np.divmod(rest, tokens)
        full_of_items = np.add.reduceat(full, first_run)
    blocks = _ceiled(rest, _each(block, launch, runs))
    of_items = full_of_items, np.add.reduceat(blocks, first_run)
    block_tiles = _ceiled(of_items[1], _blocks_per_tile(tile_tokens, block, launch))
    return Pieces(block, full, blocks, rest, of_items, block_tiles)


def packed_pieces_of(runs: Runs, launch: Longs, tile_tokens: Sizes, usual: int) -> Pieces:
    """The same in blocks of `usual` tokens, or of 1 (a slot per token) in launches where packing in blocks of that size
    makes a quarter more tiles, full ones counted.
    """
    block = tuple([min(usual, tokens) for tokens in tile_tokens])
    pieces = pieces_of(runs, launch, tile_tokens, block)
    by_token = _ceiled(np.add.reduceat(pieces.rest, runs.indptr[:-1]), _each(tile_tokens, launch))
    if not np.count_nonzero(pieces.block_tiles != by_token):
        return pieces
    tiles = [np.bincount(launch, pieces.of_items[0] + packed, len(block)) for packed in (pieces.block_tiles, by_token)]
    spread = (tiles[0] > MOST_SPREAD * tiles[1]).tolist()
    if not any(spread):
        return pieces
    single = tuple([1 if spreads else tokens for tokens, spreads in zip(block, spread, strict=True)])
    return pieces_of(runs, launch, tile_tokens, single)


def fixed_pieces_of(runs: Runs, place: Longs, tile_tokens: int, block: int) -> Pieces:
    """The runs cut into blocks, each at its place: runs that follow one another along a path lie one behind the other,
    and any other run begins a tile. place: of every run's first token along its path.

    Raises PlanError unless runs that others follow on fill their blocks, and others begin at multiples of a tile.
    """
    length = runs.table[:, 1].astype(np.int64)
    end, follows = place + length, np.zeros(len(length) + 1, np.bool_)
    np.equal(place[1:], end[:-1], out=follows[1:-1])
    follows[runs.indptr] = False
    partial = follows[1:] & (end % block > 0)
    if partial.any():
        reason = (
            f"a path goes on behind its token {end[partial.argmax()]}, in another node or another place in the cache"
        )
        raise PlanError("block", block, reason, f"use block=1, or share and place KV in multiples of {block} tokens")
    if (place[~follows[:-1]] % tile_tokens).any():
        raise PlanError("fixed_block", block, "some run begins inside a tile", "give whole tiles of paths")
    blocks = _ceiled(length, block) + np.where(follows[1:], 0, -end % tile_tokens // block)
    of_items = np.add.reduceat(blocks, runs.indptr[:-1])
    none = np.zeros(len(of_items), np.int64)
    return Pieces((block,), None, blocks, length, (none, of_items), of_items * block // tile_tokens, padded=True)


def places_along_paths(plan: Plan, tree: Tree, group: Longs, runs: Runs) -> Longs:
    """Where every run's first token lies along the paths of rows that see it: the tokens above it. group: of every
    owner, that reads all of its group's segments.
    """
    segment = ragged_ranges(plan.segment_indptr[group], plan.segment_indptr[group + 1] - plan.segment_indptr[group])
    first = tree.topology.prefix[plan.node[segment]] + plan.start[segment]
    segments, ends = offsets(plan.read_tokens[segment]), offsets(runs.table[:, 1])[:-1]
    of = segments.searchsorted(ends, "right") - 1
    places: Longs = first[of] + ends - segments[of]
    return places


def tabulate(runs: Runs, pieces: Pieces, launch: Longs, tile_tokens: Sizes) -> Tables:
    """The tables of runs cut into pieces; an item's blocks are packed into tiles one after another, which zeros fill
    up. Arguments as of `pieces_of`.
    """
    (tile_count, block_count), blocks, block = pieces.of_items, pieces.blocks, _each(pieces.block, launch, runs)
    places = pieces.block_tiles * _blocks_per_tile(tile_tokens, pieces.block, launch)
    tile0, block0 = offsets(tile_count), offsets(places)
    num_tiles, unfilled = int(tile0[-1]), places - block_count
    padded = np.count_nonzero(unfilled) > 0
    if padded:  # with what an item's last run would go on with, if it did
        blocks = blocks.copy()
        blocks[runs.indptr[1:] - 1] += unfilled
    if pieces.full is None:
        made = _cut_table(runs.table, blocks, block if isinstance(block, int) else block.repeat(blocks))
    else:  # all tiles and then all blocks
        tokens, both = _each(tile_tokens, launch, runs), np.concatenate([runs.table, runs.table])
        of_tiles, of_blocks = both[: len(blocks)], both[len(blocks) :]
        of_tiles[:, 1] = in_tiles = pieces.full * tokens
        of_blocks[:, 0] = of_blocks[:, 0] + in_tiles
        of_blocks[:, 1] = pieces.rest
        if both.shape[1] > len(RUN_FIELDS):
            of_blocks[:, 4] = of_blocks[:, 4] + in_tiles
        size = np.empty(num_tiles + int(block0[-1]), np.int32)
        size[:num_tiles] = tokens if isinstance(tokens, int) else tokens.repeat(pieces.full)
        size[num_tiles:] = block if isinstance(block, int) else block.repeat(blocks)
        made = _cut_table(both, np.concatenate([pieces.full, blocks]), size)
    if pieces.padded:
        made[made[:, 1] <= 0] = 0
    elif padded:
        made[num_tiles + ragged_ranges(block0[:-1] + block_count, unfilled)] = 0
    made = frozen(made)
    return Tables(made[:num_tiles], made[num_tiles:], tile0[:-1], tile_count, block0[:-1], pieces.block_tiles)


def _cut_table(table: Ints, counts: Longs, size: int | Ints | Longs) -> Ints:
    """So many pieces of every run of a table, one after another: each of `size` tokens, or of what the run has left.
    size: one for all pieces, or of each.
    """
    made, ends = table.repeat(counts, axis=0), offsets(counts)
    cut, part = made, None
    if len(made) > _MANY_PIECES and np.count_nonzero(counts == 1) > len(made) // 2:
        few = (counts > 1).nonzero()[0]
        counts = counts[few]
        part, ends = ragged_ranges(ends[few], counts), offsets(counts)
        cut, size = made[part], size if isinstance(size, int) else size[part]
    before = (positions(ends, counts) * size).astype(np.int32)
    start, length = cut[:, 0], cut[:, 1]
    start += before
    length -= before
    np.minimum(length, size, out=length)
    if made.shape[1] > len(RUN_FIELDS):
        position = cut[:, 4]
        position += before
    if part is not None:
        made[part] = cut
    return made


def _blocks_per_tile(tile_tokens: Sizes, block: Sizes, launch: Longs) -> Each:
    """Blocks that a tile of every item holds."""
    if len(block) == 1:
        return tile_tokens[0] // block[0]
    return _each(tuple([of_tile // size for of_tile, size in zip(tile_tokens, block, strict=True)]), launch)


def _each(values: Sizes, owner: Longs, runs: Runs | None = None) -> Each:
    """`values[owner]`, or the only one of them; with `runs`, which owners have, by run."""
    if len(values) == 1 or len(set(values)) == 1:
        return values[0]
    of_owners = np.array(values)[owner]
    return of_owners if runs is None else of_owners.repeat(runs.counts)


def _ceiled(values: Longs, by: Each) -> Longs:
    """Values divided by powers of two, rounded up."""
    if not isinstance(by, int):
        return -(-values // by)
    if by == 1:
        return values
    ceiled = values + (by - 1)
    ceiled >>= by.bit_length() - 1
    return ceiled


def table(first: Longs, *others: Each) -> Ints:
    """A read-only int32 table of these columns."""
    made = np.empty((len(first), 1 + len(others)), np.int32)
    for index, column in enumerate((first, *others)):
        made[:, index] = column
    return frozen(made)
