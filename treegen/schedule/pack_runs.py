"""Packing: cuts the KV runs of work items into full tiles and packed runs, and makes the tables of both.

    item           run of 150 tokens                    run of 20 tokens      tiles of 64, packed runs of 16
    cut runs       [ 64 | 64 | 16 | 6 ]                 [ 16 | 4 ]
    tiles          [ 64 ][ 64 ]                         a full tile is one run of consecutive KV slots
    packed_runs    [ 16 | 6 | 16 | 4 ]                  four packed runs fill one tile

`full` counts the full tiles of a run, `packed_runs` its packed runs. A packed run shorter than 16 leaves its place in
the tile partly empty, and zeros fill up an item's last packed tile. No Python loop over items or tokens.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, largest, number, offsets, positions, ragged_ranges, ramp, zeros
from treegen.ir.errors import PlanError
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree
from treegen.ir.work_items import RUN_FIELDS
from treegen.schedule.segment_runs import Runs
from treegen.target.tile_config import RUN_TOKENS, WORK_LIST_RUN_TOKENS

MOST_SPREAD = 1.25
"""Runs are packed slot by slot where packed runs of several slots would take more than 1.25 times as many tiles."""

# With more cut runs than this, mostly whole ones (as pages in any order are), only the runs that are cut are computed.
MANY_RUNS = 1024

Each: TypeAlias = "int | Longs"
"""One number for all, or an array with a number for each. Most schedules have one tile size."""
Sizes: TypeAlias = tuple[int, ...]
"""Tokens of a tile, or of a packed run, in each launch."""


class CutRuns(NamedTuple):
    """The full tiles and packed runs that runs are cut into.

    run_tokens: tokens of a packed run in each launch. full: full tiles of each run, None where no run has one.
    packed_runs: packed runs of each run, None where each has one. of_items: full tiles and packed runs of each item.
    packed_tiles: tiles that hold the packed runs of each item. padded: whether some packed runs begin after the end of
    their run, and are empty.
    """

    run_tokens: Sizes
    full: Longs | None
    packed_runs: Longs | None
    of_items: tuple[Longs, Longs]
    packed_tiles: Longs
    padded: bool = False


class PackedTables(NamedTuple):
    """The tables of full tiles and of packed runs.

    walk: for each item its first full tile, its full tiles, its first packed run, and its packed tiles.
    """

    tiles: Ints
    packed_runs: Ints
    walk: tuple[Longs, Longs, Longs, Longs]


def usual_run_tokens(plan: Plan) -> int:
    """Tokens of a packed run in tiles of a plan."""
    return WORK_LIST_RUN_TOKENS if plan.blocks else RUN_TOKENS


def cut_runs(runs: Runs, launch: Longs, tile_tokens: Sizes, run_tokens: Sizes) -> CutRuns:
    """Cuts runs into full tiles, and the rest into packed runs.

    Args:
        runs: The runs of each item; every item has one.
        launch: The launch of each item.
        tile_tokens: Tokens of a tile in each launch, powers of two.
        run_tokens: Tokens of a packed run in each launch, powers of two.
    """
    rest, first_run, full, full_of_items = runs.length, runs.indptr[:-1], None, zeros(len(launch))
    longest, packed = largest(rest) if len(rest) else 0, _runs_per_tile(tile_tokens, run_tokens, launch)
    if longest >= min(tile_tokens):
        tokens = _each(tile_tokens, launch, runs)
        if isinstance(tokens, int):
            full, rest = rest >> number(tokens.bit_length() - 1), rest & number(tokens - 1)
        else:
            full, rest = np.divmod(rest, tokens)
        full_of_items = np.add.reduceat(full, first_run)
    elif longest <= min(run_tokens):
        counts = runs.counts
        return CutRuns(run_tokens, None, None, (full_of_items, counts), _ceiled(counts, packed))
    packed_runs = _ceiled(rest, _each(run_tokens, launch, runs))
    packed_of_items = np.add.reduceat(packed_runs, first_run)
    return CutRuns(run_tokens, full, packed_runs, (full_of_items, packed_of_items), _ceiled(packed_of_items, packed))


def cut_runs_to_pack(runs: Runs, work: Longs, launch: Longs, tile_tokens: Sizes, usual: int) -> CutRuns:
    """Cuts runs as cut_runs does, into packed runs of `usual` tokens, or of one KV slot where that saves tiles.

    A launch packs single slots where packed runs of `usual` tokens would take more than MOST_SPREAD times their tiles.
    work: KV tokens of each item.
    """
    run_tokens = tuple([min(usual, tokens) for tokens in tile_tokens])
    cut = cut_runs(runs, launch, tile_tokens, run_tokens)
    by_run, by_token = cut.of_items[0] + cut.packed_tiles, _ceiled(work, _each(tile_tokens, launch))
    if not np.count_nonzero(by_run != by_token):
        return cut
    tiles = [np.bincount(launch, of_items, len(run_tokens)) for of_items in (by_run, by_token)]
    spread = (tiles[0] > MOST_SPREAD * tiles[1]).tolist()
    if not any(spread):
        return cut
    single = tuple([1 if spreads else tokens for tokens, spreads in zip(run_tokens, spread, strict=True)])
    return cut_runs(runs, launch, tile_tokens, single)


def cut_runs_at_places(runs: Runs, place: Longs, tile_tokens: int, run_tokens: int) -> CutRuns:
    """Cuts runs into packed runs whose places in their tiles follow from the token's place along the path.

    Runs that continue one another along a path are neighbours in a tile. Any other run begins a tile.

    Args:
        runs: The runs of each item.
        place: The number of tokens on the path before each run.
        tile_tokens: Tokens of a tile.
        run_tokens: Tokens of a packed run.

    Raises:
        PlanError: A run that another one continues does not fill its last packed run, or a run that continues none does
            not begin at a multiple of a tile.
    """
    length = runs.length
    end, follows = place + length, np.zeros(len(length) + 1, np.bool_)
    np.equal(place[1:], end[:-1], out=follows[1:-1])
    follows[runs.indptr] = False
    partial = follows[1:] & (end % run_tokens > 0)
    if partial.any():
        reason = (
            f"a path goes on after its token {end[partial.argmax()]}, in another node or another place in the cache"
        )
        raise PlanError(
            "block", run_tokens, reason, f"use block=1, or share and place KV in multiples of {run_tokens} tokens"
        )
    if (place[~follows[:-1]] % tile_tokens).any():
        raise PlanError("invariant_block", run_tokens, "some run begins inside a tile", "give whole tiles of paths")
    packed_runs = _ceiled(length, run_tokens) + np.where(follows[1:], 0, -end % tile_tokens // run_tokens)
    of_items = np.add.reduceat(packed_runs, runs.indptr[:-1])
    none = np.zeros(len(of_items), np.int64)
    packed_tiles = of_items * run_tokens // tile_tokens
    return CutRuns((run_tokens,), None, packed_runs, (none, of_items), packed_tiles, padded=True)


def places_along_paths(plan: Plan, tree: Tree, group: Longs, runs: Runs) -> Longs:
    """Counts the tokens on the path before each run.

    group: the group of each owner of runs, which reads all segments of its group.
    """
    segment = ragged_ranges(plan.segment_indptr[group], plan.segment_indptr[group + 1] - plan.segment_indptr[group])
    first = tree.topology.prefix[plan.node[segment]] + plan.start[segment]
    segments, ends = offsets(plan.read_tokens[segment]), offsets(runs.length)[:-1]
    of = segments.searchsorted(ends, "right") - 1
    places: Longs = first[of] + ends - segments[of]
    return places


def tabulate(runs: Runs, cut: CutRuns, launch: Longs, tile_tokens: Sizes) -> PackedTables:
    """Makes the tables of full tiles and packed runs. Arguments: see cut_runs.

    The packed runs of an item fill its tiles one after another, and zeros fill up the last one.
    """
    (tile_count, packed_count), packed_runs = cut.of_items, cut.packed_runs
    places = cut.packed_tiles * _runs_per_tile(tile_tokens, cut.run_tokens, launch)
    run0, unfilled, tile0, num_tiles = offsets(places), places - packed_count, tile_count, 0
    padded = np.count_nonzero(unfilled) > 0
    if padded:  # the item's last run gets further packed runs here, which become zeros below
        packed_runs = np.ones(len(runs.table), np.int64) if packed_runs is None else packed_runs.copy()
        packed_runs[runs.indptr[1:] - 1] += unfilled
    if packed_runs is None:
        made = runs.table
    elif cut.packed_runs is None:
        made = runs.table.repeat(packed_runs, 0)
    elif cut.full is None:
        made = _cut_table(runs.table, packed_runs, _each(cut.run_tokens, launch, runs, packed_runs))
    else:
        ends, sizes = offsets(tile_count), (_each(tile_tokens, launch, runs), _each(cut.run_tokens, launch, runs))
        tile0, num_tiles = ends[:-1], ends.item(-1)
        made = _tiles_and_packed_runs(runs.table, cut.full, packed_runs, num_tiles, *sizes)
    if cut.padded:
        made[made[:, 1] <= 0] = 0
    elif padded:
        made[num_tiles + ragged_ranges(run0[:-1] + packed_count, unfilled)] = 0
    made = frozen(made)
    return PackedTables(made[:num_tiles], made[num_tiles:], (tile0, tile_count, run0[:-1], cut.packed_tiles))


def _tiles_and_packed_runs(
    table: Ints, full: Longs, packed_runs: Longs, num_tiles: int, tokens: Each, run_tokens: Each
) -> Ints:
    """Makes one table of the full tiles of all runs and, after these, of their packed runs.

    The packed runs of a run begin where its full tiles end.

    Args:
        table: The runs.
        full: Full tiles of each run.
        packed_runs: Packed runs of each run.
        num_tiles: Full tiles of all runs.
        tokens: Tokens of a tile, for each run or for all.
        run_tokens: Tokens of a packed run, for each run or for all.
    """
    counts, made = (
        np.concatenate((full, packed_runs)),
        np.concatenate((table.repeat(full, 0), table.repeat(packed_runs, 0))),
    )
    first = offsets(counts)[:-1]
    first[len(full) :] -= full * (tokens // run_tokens)  # the tiles take the place of this number of packed runs
    if not isinstance(tokens, int):
        tokens = tokens.repeat(full)
    if not isinstance(run_tokens, int):
        run_tokens = run_tokens.repeat(packed_runs)
    before = first.repeat(counts)
    np.subtract(ramp(len(before)), before, before)
    of_tiles, of_packed = before[:num_tiles], before[num_tiles:]
    of_tiles *= tokens
    of_packed *= run_tokens
    _go_on(made, before.astype(np.int32))
    rest = made[num_tiles:, 1]
    made[:num_tiles, 1] = tokens
    np.minimum(rest, run_tokens, out=rest)
    return made


def _go_on(table: Ints, tokens: Ints) -> None:
    """Moves the beginning of each run of a table by `tokens`, and shortens it."""
    start, length = table[:, 0], table[:, 1]
    start += tokens
    length -= tokens
    if table.shape[1] > len(RUN_FIELDS):
        position = table[:, 4]
        position += tokens


def _cut_table(table: Ints, counts: Longs, size: int | Ints | Longs) -> Ints:
    """Cuts each run of a table into `counts` parts of `size` tokens, the last one shorter where the run ends.

    size: one number for all parts, or one for each.
    """
    made, ends = table.repeat(counts, 0), offsets(counts)
    cut, part = made, None
    if len(made) > MANY_RUNS and np.count_nonzero(counts == 1) > len(made) // 2:
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


def _runs_per_tile(tile_tokens: Sizes, run_tokens: Sizes, launch: Longs) -> Each:
    """The number of packed runs that a tile of each item holds."""
    if len(run_tokens) == 1:
        return tile_tokens[0] // run_tokens[0]
    return _each(tuple([of_tile // size for of_tile, size in zip(tile_tokens, run_tokens, strict=True)]), launch)


def _each(values: Sizes, owner: Longs, runs: Runs | None = None, parts: Longs | None = None) -> Each:
    """Looks up `values[owner]`, or one number where all values are equal.

    With `runs`, the result is repeated for each owner's runs, and with `parts` for each run's parts.
    """
    if len(values) == 1 or len(set(values)) == 1:
        return values[0]
    of_owners = np.array(values)[owner]
    of_runs = of_owners if runs is None else of_owners.repeat(runs.counts)
    return of_runs if parts is None else of_runs.repeat(parts)


def _ceiled(values: Longs, by: Each) -> Longs:
    """Divides by powers of two, and rounds up."""
    if not isinstance(by, int):
        return -(-values // by)
    if by == 1:
        return values
    ceiled = values + number(by - 1)
    ceiled >>= number(by.bit_length() - 1)
    return ceiled


def table(first: Longs, *others: Each) -> Ints:
    """Makes a read-only int32 table of columns."""
    made = np.empty((len(first), 1 + len(others)), np.int32)
    for index, column in enumerate((first, *others)):
        made[:, index] = column
    return frozen(made)
