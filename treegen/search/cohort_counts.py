"""The cohorts of many walks, counted at once by sums over ranks: what treegen.search.weigh weighs policies by.

A walk divides a tree's rows into cohorts of neighbouring ranks that read in one tile class. Its cohorts are one chunk
where they read whole paths. Where paths are cut at a threshold on rows, a walk has two chunks: the cohorts that read
what lies above the cuts (upper) and those that read what lies below (lower).

    spans [spans]                          tokens, blocks and full tiles of every span
      -> sums [parts, quantities, ranks]   what begins before a rank, and what ends at or before it
      -> cohorts                           what begins before a cohort's end, less what ends before it begins

Tiles of whole cohorts are counted as `lower` makes them (treegen.schedule.pack_runs).
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Longs, offsets, ragged, ramp
from treegen.ir.errors import ShapeError
from treegen.ir.schedule import TileClass
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.schedule.pack_runs import MOST_SPREAD
from treegen.strategies.cohort import Cohort
from treegen.target.cost_terms import ITEMS, facts_of
from treegen.target.targets import Target
from treegen.target.tile_config import (
    BLOCK_TOKENS,
    SMALL_ROWS,
    lanes_of,
    rows_per_tile,
    tile_class,
    tile_work,
    wanted_class,
)

Floats = npt.NDArray[np.float64]

WHOLE = (
    (64, False, True),
    (64, False, False),
    (32, False, True),
    (16, False, True),
    (16, True, True),
    (1, False, True),
)
"""Query head rows of the cohorts that read whole paths; whether these take the large tile in any case; and whether
their rows are rounded down to a power of two, so that they end where subtrees do more often. 1 head row stands for one
query row, which is plain per-row decoding.
"""
CUT = 64
"""Query head rows of cohorts where paths are cut. With smaller cohorts, too, choices would be less than 1 % better."""
MOST_CUTS = 2
"""Thresholds at which paths are cut."""
MOST_KEPT = 1 << 14
"""Rows up to which layouts are kept for other trees of as many rows. A layout takes some 20 bytes a row."""

_BIN_BITS, _BINS = 19, 512  # dropping 19 bits of a float32 leaves 16 bins per power of two; 32 powers fit
_FIRST_BIN = 127 << 4  # the bin of 1.0
_TIES = float(1 << 26)  # more packed tiles than a cohort has


class Cut(NamedTuple):
    """Paths cut at a threshold on rows. lo, hi [cuts]: the ranks below each. upper: the spans above all of them."""

    apart: int
    lo: Longs
    hi: Longs
    upper: Longs


def thresholds_of(tree: Tree) -> list[int]:
    """Thresholds on rows of which each cuts some paths: the rows of nodes that have more than one below them."""
    seen, parent = tree.topology.rank_hi - tree.topology.rank_lo, tree.parent
    above = np.where(parent >= 0, seen[parent], 0)
    found: list[int] = np.unique(above[(seen < above) & (seen > 0)]).tolist()
    return found


def cuts_of(tree: Tree) -> list[Cut]:
    """Cuts paths at the lowest and at the highest threshold that cuts any; once if both cut alike."""
    topology, spans, parent = tree.topology, tree.topology.spans, tree.parent
    seen = topology.rank_hi - topology.rank_lo
    above = np.where(parent >= 0, seen[parent], 0)
    nodes = ((seen < above) & (seen > 0)).nonzero()[0]
    if not len(nodes):
        return []
    # A tree of fewer rows than the threshold is not cut. Trees have the ranks of their rows one after another.
    roots = parent < 0
    ends, of_root = topology.rank_hi[roots], seen[roots]
    of_tree = of_root[ends.searchsorted(spans.lo, "right")]
    seen_below, seen_above, of_span = seen[nodes], above[nodes], seen[spans.node]
    cuts: list[Cut] = []
    for apart in sorted({int(seen_below.min()) + 1, int(seen_above.max())}):
        node = nodes[(seen_above >= apart) & (seen_below < apart)]
        lo, hi = (ranks[node].astype(np.int64) for ranks in (topology.rank_lo, topology.rank_hi))
        if not cuts or not (np.array_equal(lo, cuts[-1].lo) and np.array_equal(hi, cuts[-1].hi)):
            cuts.append(Cut(apart, lo, hi, ((of_span >= apart) | (of_tree < apart)).nonzero()[0]))
    return cuts


class Tiles(NamedTuple):
    """Per walk: tokens and head rows of a tile, its operations and bytes, thread blocks of a work item, and
    microseconds of a tile alone on an SM and on a full one. size: the tile's tokens as an index of WalkLayout.sizes.
    """

    size: Longs
    tokens: Floats
    rows: Floats
    flops: Floats
    loaded: Floats
    lanes: Floats
    lone_us: Floats
    full_us: Floats


class WalkLayout(NamedTuple):
    """What follows from the shape, the target, and the numbers of rows and cuts.

    walks: a policy for each, without split and threshold. rows [walks]: rows of a cohort. tiles: per walk; sizes: the
    different tokens of tiles. Chunk i is the first of walk i; lower chunks, of the last walks, come behind these.
    walk [chunks]: the chunk's walk. part [chunks]: what it reads: 0 all spans, 1 + 2 * c those above cut c, 2 + 2 * c
    those below. begin, end, counts: the ranks and the numbers of cohorts of all but lower chunks.
    """

    walks: tuple[Cohort, ...]
    rows: tuple[int, ...]
    tiles: Tiles
    sizes: tuple[int, ...]
    walk: Longs
    part: Longs
    begin: Longs
    end: Longs
    counts: tuple[int, ...]


def named_class(shape: Shape, target: Target) -> TileClass | None:
    """The large tile that policies name for cohorts that fit into the small one; None where no cohort does, or where
    no class has just this tile.
    """
    large = tile_class(shape, target, SMALL_ROWS + 1)
    if shape.group > SMALL_ROWS:
        return None
    try:
        return wanted_class(large.rows, large.tokens, shape, target)
    except ShapeError:
        return None


@lru_cache(64)
def layout_of(shape: Shape, target: Target, num_rows: int, cuts: int, only: TileClass | None = None) -> WalkLayout:
    """The layout for so many rows and cuts. only: the tile class of all walks, where there is but one. Raises
    ShapeError when no tile class fits the shape.
    """
    large, facts = tile_class(shape, target, SMALL_ROWS + 1), facts_of(target)
    kinds: dict[tuple[Any, ...], tuple[Cohort, int]] = {}
    cut = [(1 + 2 * index, CUT, False, True) for index in range(cuts)]
    for part, head_rows, in_large, even in [*((0, *kind) for kind in WHOLE), *cut]:
        rows = rows_per_tile(min(head_rows, large.rows), shape.group) if num_rows > 1 else 1
        rows = 1 << rows.bit_length() - 1 if even else rows
        tile, most = None, min(rows, num_rows)
        made = only or tile_class(shape, target, most)
        if in_large and only is None:
            named = named_class(shape, target)
            if named is None:
                continue
            made, tile = named, (named.rows, named.tokens)
        kinds.setdefault((part, most, made), (Cohort(rows * shape.group if rows > 1 else 1, tile=tile), rows))
    classes = [made for _, _, made in kinds]
    sizes = tuple(sorted({made.tokens for made in classes}))
    columns = [
        (sizes.index(made.tokens), made.tokens, made.rows, *tile_work(made, shape), lanes_of(made, shape))
        for made in classes
    ]
    size, tokens, tile_rows, flops, loaded, lanes = np.array(columns, np.float64).T
    of_tile = SimpleNamespace(tile_flops=flops, tile_bytes=loaded, **facts)
    lone_us, full_us = (ITEMS.terms[name](of_tile) for name in ("lone_tile", "full_tile"))
    walks, rows_of = zip(*kinds.values(), strict=True)
    begins = [np.arange(0, num_rows, rows) for rows in rows_of]
    part_of = [part for part, _, _ in kinds]
    return WalkLayout(
        walks,
        rows_of,
        Tiles(size.astype(np.int64), tokens, tile_rows, flops, loaded, lanes, lone_us, full_us),
        sizes,
        np.append(np.arange(len(kinds)), np.arange(len(kinds) - cuts, len(kinds))),
        np.array(part_of + [part + 1 for part in part_of if part]),
        np.concatenate(begins),
        np.concatenate([np.minimum(begin + rows, num_rows) for begin, rows in zip(begins, rows_of, strict=True)]),
        tuple(len(begin) for begin in begins),
    )


class Cohorts(NamedTuple):
    """All cohorts, chunk by chunk; some are empty.

    columns [5, cohorts]: tokens, rows, full tiles, and tiles packed in blocks or token by token. first, counts
    [chunks]: where each chunk begins, and how many cohorts it has. walk [chunks].
    """

    columns: Floats
    first: Longs
    counts: Longs
    walk: Longs

    @property
    def tokens(self) -> Floats:
        """Tokens of every cohort."""
        column: Floats = self.columns[0]
        return column

    @property
    def rows(self) -> Floats:
        """Rows of every cohort."""
        column: Floats = self.columns[1]
        return column

    def items(self, walk: int, split: float) -> int:
        """Work items of a walk that is split every `split` tokens."""
        items = 0
        for chunk in (self.walk == walk).nonzero()[0].tolist():
            first, count = self.first.item(chunk), self.counts.item(chunk)
            items += int(np.ceil(self.tokens[first : first + count] / split).sum())
        return items


def cohorts_of(tree: Tree, layout: WalkLayout, cuts: list[Cut]) -> Cohorts:
    """The cohorts of all walks."""
    lower = [_lower(cut, layout.rows[len(layout.walks) - len(cuts) + index]) for index, cut in enumerate(cuts)]
    begin = np.concatenate([layout.begin, *(lo for lo, _ in lower)])
    end = np.concatenate([layout.end, *(hi for _, hi in lower)])
    counts = np.array([*layout.counts, *(len(lo) for lo, _ in lower)])
    columns = np.empty((5, len(begin)))
    tokens, rows, full, by_block, by_token = columns
    np.subtract(end, begin, out=rows)
    begun, ended = _sums_by_rank(tree, layout.sizes, cuts)
    quantities, ranks = begun.shape[1:]
    place = (layout.part * (quantities * ranks)).repeat(counts)
    begin += place
    end += place
    of_size = layout.tiles.size[layout.walk] + 1  # from blocks on
    for quantity, step in ((tokens, 0), (by_block, ranks), (full, (of_size * ranks).repeat(counts))):
        begin += step
        end += step
        begun.take(end, out=quantity, mode="clip")
        quantity -= ended.take(begin)
    tile_tokens = layout.tiles.tokens[layout.walk].repeat(counts)
    np.divide(tokens, tile_tokens, out=by_token)
    by_block *= BLOCK_TOKENS / tile_tokens
    for packed in (by_block, by_token):
        packed -= full
        np.ceil(packed, out=packed)
    return Cohorts(columns, offsets(counts)[:-1], counts, layout.walk)


def _lower(cut: Cut, rows: int) -> tuple[Longs, Longs]:
    """The ranks of cohorts of `rows` rows below cuts: where they begin, and where they end."""
    below = cut.hi - cut.lo
    if int(below.max()) <= rows:
        return cut.lo, cut.hi
    fragment, step = ragged(-(-below // rows))
    lo = cut.lo[fragment] + step * rows
    return lo, np.minimum(lo + rows, cut.hi[fragment])


def _sums_by_rank(tree: Tree, sizes: tuple[int, ...], cuts: list[Cut]) -> tuple[Floats, Floats]:
    """Sums over the spans that begin before every rank, and over those that end at or before it.

    Returns:
        Two arrays [parts, quantities, ranks + 1]. Parts: see WalkLayout. Quantities: tokens, blocks, and full tiles of
        every size.
    """
    spans, ranks = tree.topology.spans, tree.num_rows + 1
    values = _quantities(tree, sizes)
    lines = (ranks * np.arange(len(values)))[:, None]
    sums = np.empty((2, 1 + 2 * len(cuts), len(values), ranks))
    places = (spans.lo + 1, spans.hi)
    for side, place in enumerate(places):
        _sum_by_rank(values, place + lines, sums[side, 0])
    for index, cut in enumerate(cuts):
        upper, lower = 1 + 2 * index, 2 + 2 * index
        above = values.take(cut.upper, axis=1)
        for side, place in enumerate(places):
            _sum_by_rank(above, place.take(cut.upper) + lines, sums[side, upper])
        np.subtract(sums[:, 0], sums[:, upper], out=sums[:, lower])
    return sums[0], sums[1]


def _sum_by_rank(values: Floats, cell: Longs, out: Floats) -> None:
    """Adds up values [quantities, spans] by their cells of `out` [quantities, ranks + 1], and then along its ranks."""
    of_ranks = np.bincount(cell.ravel(), values.ravel(), out.size).reshape(out.shape)
    np.add.accumulate(of_ranks, axis=1, out=out)


def _quantities(tree: Tree, sizes: tuple[int, ...]) -> Floats:
    """Tokens, blocks, and full tiles of every size, of every span: [2 + sizes, spans].

    The KV runs of a node that has several are taken to be equally long, and whole blocks if they are longer than one.
    """
    spans, kv = tree.topology.spans, tree.kv
    length = spans.lengths
    values = np.empty((2 + len(sizes), len(length)))
    values[0] = length
    values[1] = (length + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
    run: Any = length
    runs_of_node = kv.indptr[1:] - kv.indptr[:-1]
    if int(runs_of_node.max()) > 1:
        runs = np.maximum(runs_of_node[spans.node] * length // tree.tokens[spans.node], 1)
        np.maximum(values[1], runs, out=values[1])
        run = np.maximum(np.rint(length / (runs * BLOCK_TOKENS)) * BLOCK_TOKENS, 1.0)
        run = np.where(runs > 1, run, length)
    for row, size in enumerate(sizes, 2):
        np.multiply(length // run, run // size, out=values[row])
    return values


def fold(of_chunks: Floats, walks: int, join: np.ufunc) -> Floats:
    """Values [..., chunks] as values [..., walks]: those of a walk's two chunks are joined, in place."""
    lower = of_chunks.shape[-1] - walks
    of_walks = of_chunks[..., :walks]
    if lower:
        last = of_walks[..., walks - lower :]
        join(last, of_chunks[..., walks:], out=last)
    return of_walks


class Tally(NamedTuple):
    """What whole cohorts add up to, per walk.

    tokens, cohorts: in all, without empty cohorts. full, packed: tiles. longest: tokens of the cohort with most tokens.
    longest_full, longest_packed: tiles of the cohort with most tiles.
    """

    tokens: Floats
    cohorts: Floats
    full: Floats
    packed: Floats
    longest: Floats
    longest_full: Floats
    longest_packed: Floats


def tally(cohorts: Cohorts, walks: int) -> Tally:
    """Adds up the cohorts of every walk. Runs are packed in blocks or token by token, as `lower` packs a launch."""
    first, columns = cohorts.first, cohorts.columns
    tokens, _, full, by_block, by_token = fold(np.add.reduceat(columns, first, axis=1), walks, np.add)
    alive = fold(np.add.reduceat(cohorts.tokens > 0, first, dtype=np.float64), walks, np.add)
    spread = full + by_block > MOST_SPREAD * (full + by_token)
    packed = columns[3]
    if np.count_nonzero(spread):
        packed = np.where(spread[cohorts.walk].repeat(cohorts.counts), columns[4], packed)
    tiles = columns[2] + packed
    tiles *= _TIES
    tiles += packed
    longest = fold(np.maximum.reduceat(cohorts.tokens, first), walks, np.maximum)
    most_tiles = fold(np.maximum.reduceat(tiles, first), walks, np.maximum)
    longest_tiles, longest_packed = np.divmod(most_tiles, _TIES)
    packed = np.where(spread, by_token, by_block)
    return Tally(tokens, alive, full, packed, longest, longest_tiles - longest_packed, longest_packed)


class Bins(NamedTuple):
    """Cohorts of one chunk with about equally many tokens: how many, the rows of all, and the tokens of one on average.

    first, counts [chunks]: where each chunk begins, and how many bins it has. walk [bins].
    """

    cohorts: Floats
    rows: Floats
    tokens: Floats
    first: Longs
    counts: Longs
    walk: Longs

    def parts(self, splits: Floats) -> Floats:
        """Work items that splits [splits, walks] make of a cohort: [splits, bins]."""
        parts: Floats = np.ceil(self.tokens / splits.take(self.walk, axis=1))
        return parts

    def sums(self, values: Floats, walks: int) -> Floats:
        """Values [..., bins] added up for every walk: [..., walks]."""
        return fold(np.add.reduceat(values, self.first, axis=-1), walks, np.add)


def bins_of(cohorts: Cohorts) -> Bins:
    """The bins of all chunks: a bin per cohort in small chunks, else 16 per power of two of tokens."""
    chunks, counts = len(cohorts.counts), cohorts.counts
    if int(counts.max()) <= _BINS:
        ones = np.ones(len(cohorts.tokens))
        return Bins(ones, cohorts.rows, cohorts.tokens, cohorts.first, counts, cohorts.walk.repeat(counts))
    cell = cohorts.tokens.astype(np.float32).view(np.int32) >> _BIN_BITS
    cell -= _FIRST_BIN - 1
    np.maximum(cell, 0, out=cell)
    place = ramp(len(cell)) - cohorts.first.repeat(counts)
    cells = np.where((counts <= _BINS).repeat(counts), place, cell)
    cells += (_BINS * ramp(chunks)).repeat(counts)
    found = np.bincount(cells)
    bins = found.nonzero()[0]
    number = found[bins].astype(np.float64)
    rows, tokens = (np.bincount(cells, column)[bins].astype(np.float64) for column in (cohorts.rows, cohorts.tokens))
    first = (bins // _BINS).searchsorted(np.arange(chunks + 1))
    of_chunks = first[1:] - first[:-1]
    return Bins(number, rows, tokens / number, first[:-1], of_chunks, cohorts.walk.repeat(of_chunks))
