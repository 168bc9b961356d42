"""Pieces of runs: what work items read, cut into full tiles and blocks, and the tables of these. No Python loop over
items or tokens.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, largest, number, offsets, positions, ragged_ranges, ramp, zeros
from treegen.ir.errors import PlanError
from treegen.ir.plan import Plan
from treegen.ir.schedule import RUN_FIELDS
from treegen.ir.tree import Tree
from treegen.schedule.segment_runs import Runs
from treegen.target.tile_config import BLOCK_TOKENS, DEALT_BLOCK_TOKENS

MOST_SPREAD = 1.25
"""Runs are packed slot by slot where packing in blocks would make more than so many times as many tiles."""

# Of more pieces, most of them whole runs, as of pages in any order, only those of runs that are cut are gone through.
_MANY_PIECES = 1024

Each: TypeAlias = "int | Longs"
"""One number for all, or an array of one for each: most schedules have one tile size."""
Sizes: TypeAlias = tuple[int, ...]
"""Tokens of the tiles, or of the blocks, of every launch."""


class Pieces(NamedTuple):
    """Runs cut into full tiles and a rest in blocks. block: tokens of a block, by launch.

    full, blocks [runs]: full tiles and blocks of every run, full None where no run has any, and blocks None where every
    run is one. of_items: full tiles and blocks of every item; block_tiles [items]: the tiles that its blocks are packed
    into. padded: some blocks are behind the end of their run, and empty.
    """

    block: Sizes
    full: Longs | None
    blocks: Longs | None
    of_items: tuple[Longs, Longs]
    block_tiles: Longs
    padded: bool = False


class PackedTables(NamedTuple):
    """Tile and block tables, and of every item where its part of the first begins, how many tiles it has there, and the
    same of the second.
    """

    tiles: Ints
    blocks: Ints
    walk: tuple[Longs, Longs, Longs, Longs]


def usual_block(plan: Plan) -> int:
    """Tokens of the runs that tiles of a plan are packed of."""
    return DEALT_BLOCK_TOKENS if plan.blocks else BLOCK_TOKENS


def pieces_of(runs: Runs, launch: Longs, tile_tokens: Sizes, block: Sizes) -> Pieces:
    """The runs cut into tiles and blocks of these tokens. launch: of every item. No item is without runs."""
    rest, first_run, full, full_of_items = runs.length, runs.indptr[:-1], None, zeros(len(launch))
    longest, packed = largest(rest) if len(rest) else 0, _blocks_per_tile(tile_tokens, block, launch)
    if longest >= min(tile_tokens):
        tokens = _each(tile_tokens, launch, runs)
        if isinstance(tokens, int):
            full, rest = rest >> number(tokens.bit_length() - 1), rest & number(tokens - 1)
        else:
            full, rest = np.divmod(rest, tokens)
        full_of_items = np.add.reduceat(full, first_run)
    elif longest <= min(block):
        counts = runs.counts
        return Pieces(block, None, None, (full_of_items, counts), _ceiled(counts, packed))
    blocks = _ceiled(rest, _each(block, launch, runs))
    block_of_items = np.add.reduceat(blocks, first_run)
    return Pieces(block, full, blocks, (full_of_items, block_of_items), _ceiled(block_of_items, packed))


def packed_pieces_of(runs: Runs, work: Longs, launch: Longs, tile_tokens: Sizes, usual: int) -> Pieces:
    """The same in blocks of `usual` tokens, or of 1 (a slot per token) in launches where packing in blocks of that size
    makes a quarter more tiles, full ones counted. work: tokens of every item.
    """
    block = tuple([min(usual, tokens) for tokens in tile_tokens])
    pieces = pieces_of(runs, launch, tile_tokens, block)
    by_block, by_token = pieces.of_items[0] + pieces.block_tiles, _ceiled(work, _each(tile_tokens, launch))
    if not np.count_nonzero(by_block != by_token):
        return pieces
    tiles = [np.bincount(launch, of_items, len(block)) for of_items in (by_block, by_token)]
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
    length = runs.length
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
    return Pieces((block,), None, blocks, (none, of_items), of_items * block // tile_tokens, padded=True)


def places_along_paths(plan: Plan, tree: Tree, group: Longs, runs: Runs) -> Longs:
    """Where every run's first token lies along the paths of rows that see it: the tokens above it. group: of every
    owner, that reads all of its group's segments.
    """
    segment = ragged_ranges(plan.segment_indptr[group], plan.segment_indptr[group + 1] - plan.segment_indptr[group])
    first = tree.topology.prefix[plan.node[segment]] + plan.start[segment]
    segments, ends = offsets(plan.read_tokens[segment]), offsets(runs.length)[:-1]
    of = segments.searchsorted(ends, "right") - 1
    places: Longs = first[of] + ends - segments[of]
    return places


def tabulate(runs: Runs, pieces: Pieces, launch: Longs, tile_tokens: Sizes) -> PackedTables:
    """The tables of runs cut into pieces; an item's blocks are packed into tiles one after another, which zeros fill
    up. Arguments as of `pieces_of`.
    """
    (tile_count, block_count), blocks = pieces.of_items, pieces.blocks
    places = pieces.block_tiles * _blocks_per_tile(tile_tokens, pieces.block, launch)
    block0, unfilled, tile0, num_tiles = offsets(places), places - block_count, tile_count, 0
    padded = np.count_nonzero(unfilled) > 0
    if padded:  # with what an item's last run would go on with, if it did
        blocks = np.ones(len(runs.table), np.int64) if blocks is None else blocks.copy()
        blocks[runs.indptr[1:] - 1] += unfilled
    if blocks is None:
        made = runs.table
    elif pieces.blocks is None:
        made = runs.table.repeat(blocks, 0)
    elif pieces.full is None:
        made = _cut_table(runs.table, blocks, _each(pieces.block, launch, runs, blocks))
    else:
        ends, sizes = offsets(tile_count), (_each(tile_tokens, launch, runs), _each(pieces.block, launch, runs))
        tile0, num_tiles = ends[:-1], ends.item(-1)
        made = _tiles_and_blocks(runs.table, pieces.full, blocks, num_tiles, *sizes)
    if pieces.padded:
        made[made[:, 1] <= 0] = 0
    elif padded:
        made[num_tiles + ragged_ranges(block0[:-1] + block_count, unfilled)] = 0
    made = frozen(made)
    return PackedTables(made[:num_tiles], made[num_tiles:], (tile0, tile_count, block0[:-1], pieces.block_tiles))


def _tiles_and_blocks(table: Ints, full: Longs, blocks: Longs, num_tiles: int, tokens: Each, block: Each) -> Ints:
    """So many full tiles of every run of a table, `num_tiles` in all, and behind all of them its blocks, which begin
    where its tiles end. tokens, block: of a tile and of a block, by run.
    """
    counts, made = np.concatenate((full, blocks)), np.concatenate((table.repeat(full, 0), table.repeat(blocks, 0)))
    first = offsets(counts)[:-1]
    first[len(full) :] -= full * (tokens // block)  # tiles are so many blocks
    if not isinstance(tokens, int):
        tokens = tokens.repeat(full)
    if not isinstance(block, int):
        block = block.repeat(blocks)
    before = first.repeat(counts)
    np.subtract(ramp(len(before)), before, before)
    of_tiles, of_blocks = before[:num_tiles], before[num_tiles:]
    of_tiles *= tokens
    of_blocks *= block
    _go_on(made, before.astype(np.int32))
    rest = made[num_tiles:, 1]
    made[:num_tiles, 1] = tokens
    np.minimum(rest, block, out=rest)
    return made


def _go_on(table: Ints, tokens: Ints) -> None:
    """Lets runs of a table begin so many tokens later."""
    start, length = table[:, 0], table[:, 1]
    start += tokens
    length -= tokens
    if table.shape[1] > len(RUN_FIELDS):
        position = table[:, 4]
        position += tokens


def _cut_table(table: Ints, counts: Longs, size: int | Ints | Longs) -> Ints:
    """So many pieces of every run of a table, one after another: each of `size` tokens, or of what the run has left.
    size: one for all pieces, or of each.
    """
    made, ends = table.repeat(counts, 0), offsets(counts)
    cut, part = made, None
    if len(made) > _MANY_PIECES and np.count_nonzero(counts == 1) > len(made) // 2:
        few = (counts > 1).nonzero()[0]
        counts = counts[few]
        part, ends = ragged_ranges(ends[few], counts), offsets(counts)
        cut, size = made[part], size if isinstance(size, int) else size[part]
    before = positions(ends, counts).astype(np.int32)
    before *= size
    _go_on(cut, before)
    length = cut[:, 1]
    np.minimum(length, size, out=length)
    if part is not None:
        made[part] = cut
    return made


def _blocks_per_tile(tile_tokens: Sizes, block: Sizes, launch: Longs) -> Each:
    """Blocks that a tile of every item holds."""
    if len(block) == 1:
        return tile_tokens[0] // block[0]
    return _each(tuple([of_tile // size for of_tile, size in zip(tile_tokens, block, strict=True)]), launch)


def _each(values: Sizes, owner: Longs, runs: Runs | None = None, pieces: Longs | None = None) -> Each:
    """`values[owner]`, or the only one of them; with `runs`, which owners have, by run, and with `pieces`, which runs
    have, by piece.
    """
    if len(values) == 1 or len(set(values)) == 1:
        return values[0]
    of_owners = np.array(values)[owner]
    of_runs = of_owners if runs is None else of_owners.repeat(runs.counts)
    return of_runs if pieces is None else of_runs.repeat(pieces)


def _ceiled(values: Longs, by: Each) -> Longs:
    """Values divided by powers of two, rounded up."""
    if not isinstance(by, int):
        return -(-values // by)
    if by == 1:
        return values
    ceiled = values + number(by - 1)
    ceiled >>= number(by.bit_length() - 1)
    return ceiled


def table(first: Longs, *others: Each) -> Ints:
    """A read-only int32 table of these columns."""
    made = np.empty((len(first), 1 + len(others)), np.int32)
    for index, column in enumerate((first, *others)):
        made[:, index] = column
    return frozen(made)
