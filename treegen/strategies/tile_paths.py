"""Tile paths: each row's path cut into tiles at multiples of a tile's tokens, and groups of rows that share tiles.

Paths share a tile if they have all its tokens in common, so that a token's place in its tile is the same in every tree
that has the path. Where paths part, the beginning of the tile is read for each of them:

    position   0         64        128   150   192
    row 0      [ tile 0  ][ tile 1  ][ tile 2   ]       paths part at 150: each reads 128:150 in a tile of its own
    row 1      [ tile 0  ][ tile 1  ][ tile 2'  ]
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Longs, offsets, ragged, ragged_ranges, stacked
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree
from treegen.strategies.distinct_tiles import PathRows, PathTiles, node_parts_of, rows_of, tiles_of

_MOST_NEW = (0, 1, 2, 4, 1 << 30)
"""Values to try for the most tiles of its own that a row may bring to the group of the row before it."""


class Machine(NamedTuple):
    """The most query rows of a work item, and the number of work items for which the target has an SM each."""

    rows: int
    items: float


class _Walks(NamedTuple):
    """The chunks of all ranks' paths, by kind and rank.

    kind: 0 for the first chunk of ranks that end in it, 1 for the first chunk of others, and c + 1 for chunk c. tiles:
    the number of tiles of the chunk. shared: the number of these tiles, the first ones, that the walk before has, too.
    """

    rank: Longs
    kind: Longs
    tiles: Longs
    shared: Longs


def by_tile_path(tree: Tree, chunk: int, tokens: int, block: int, machine: Machine, *, isolated: bool = False) -> Plan:
    """Plans groups of rows that share tiles in a chunk of their paths, for every chunk; see BatchInvariant.

    Groups of earlier chunks come first, and each row's tiles are in order.

    Args:
        tree: The tree.
        chunk: Tokens of a chunk.
        tokens: Tokens of a tile.
        block: Rows that end inside a tile, at a multiple of `block`, share it with longer rows.
        machine: The most rows of a group, and the work items for which there is an SM each.
        isolated: Whether the rows of a group all see the same tokens.
    """
    rows = rows_of(tree)
    tiles = tiles_of(tree, rows, tokens, block)
    walks = _walks_of(tree, rows, tiles, chunk, tokens)
    parts = node_parts_of(tree, rows, tiles, chunk, tokens)
    alone = _sees_other_tokens(rows, walks, chunk) if isolated else walks.shared == 0
    begins = _group_begins(walks, machine, alone)
    first = np.flatnonzero(begins)
    ends = np.append(first[1:], len(walks.rank))
    group = np.cumsum(begins) - 1

    # Parts are listed by group. Of each kind of a part, the walks of its ranks are neighbours.
    key = walks.kind * (tree.num_rows + 1) + walks.rank
    kinds = np.where(parts.chunk > 0, parts.chunk + 1, 0)
    in_first = np.flatnonzero(parts.chunk == 0)
    kinds, place = np.append(kinds, kinds[in_first] + 1), np.append(np.arange(len(kinds)), in_first)
    from_walk = key.searchsorted(kinds * (tree.num_rows + 1) + parts.lo[place])
    to_walk = key.searchsorted(kinds * (tree.num_rows + 1) + parts.hi[place])
    some = to_walk > from_walk
    place, from_walk, to_walk = place[some], from_walk[some], to_walk[some]
    counts = group[to_walk - 1] - group[from_walk] + 1
    of = ragged_ranges(group[from_walk], counts)
    place, from_walk, to_walk = (column.repeat(counts) for column in (place, from_walk, to_walk))
    order = np.lexsort((place, of))
    of, place, from_walk, to_walk = of[order], place[order], from_walk[order], to_walk[order]

    opens = begins.copy()
    opens[1:] |= walks.rank[1:] != walks.rank[:-1] + 1
    interval = np.flatnonzero(opens)
    read = parts.at(place)
    return Plan.trusted(
        "by-tile-path",
        np.searchsorted(interval, np.append(first, len(walks.rank))),
        walks.rank[interval],
        walks.rank[np.append(interval[1:], len(walks.rank)) - 1] + 1 if len(interval) else walks.rank,
        offsets(np.bincount(of, minlength=len(first))),
        stacked(
            read.node,
            read.start,
            read.stop,
            np.maximum(from_walk, first[of]) - first[of],
            np.minimum(to_walk, ends[of]) - first[of],
        ),
        ends - first,
    )


def _sees_other_tokens(rows: PathRows, walks: _Walks, chunk: int) -> Bools:
    """Tells for each walk whether it sees other tokens of its chunk than the walk before."""
    end = np.minimum(rows.length[walks.rank], np.maximum(walks.kind, 1) * chunk)
    other = np.ones(len(end), np.bool_)
    before = slice(None, -1)
    other[1:] = (walks.shared < walks.tiles)[1:] | (walks.tiles[1:] != walks.tiles[before]) | (end[1:] != end[before])
    return other


def _group_begins(walks: _Walks, machine: Machine, alone: Bools) -> Bools:
    """Tells for each walk whether it begins a group; otherwise it joins the group of the walk before.

    A group has `machine.rows` rows at most. Walks that are `alone` join no group, nor do those that share no tiles with
    the walk before. The most tiles of its own that a joining walk may bring is the one with the least estimated time:
    that of all tiles on all SMs, plus that of the longest group.
    """
    count, best, least = np.arange(len(walks.rank)), np.ones(len(walks.rank), np.bool_), math.inf
    new = walks.tiles - walks.shared
    for most in _MOST_NEW if len(count) else ():
        begins = alone | (new > most)
        within = count - np.maximum.accumulate(np.where(begins, count, 0))
        begins |= within % machine.rows == 0
        of_groups = np.add.reduceat(np.where(begins, walks.tiles, new), np.flatnonzero(begins))
        time = of_groups.sum() / machine.items + of_groups.max()
        if time < least:
            best, least = begins, time
    return best


def _walks_of(tree: Tree, rows: PathRows, tiles: PathTiles, chunk: int, tokens: int) -> _Walks:
    """Returns the walks of all ranks."""
    per_chunk, ranks = chunk // tokens, tree.num_rows
    rank, number = ragged(-(-rows.length // chunk))
    order = number.argsort(kind="stable")
    rank, number = rank[order], number[order]
    counts = np.minimum(-(-(rows.length[rank] - number * chunk) // tokens), per_chunk)

    # The ranks that share a tile are neighbours.
    key, of = number * (ranks + 1) + rank, tiles.number // per_chunk
    begin = key.searchsorted(of * (ranks + 1) + tiles.lo)
    end = begin + tiles.hi - tiles.lo
    more, less = (np.bincount(places, minlength=len(rank) + 1) for places in (begin + 1, end))
    # A tile of one rank begins and ends its sharing in the same place.
    shared = np.cumsum(more - less)[: len(rank)]

    # The first chunk's ranks are sorted by kind. Two of them share the least number of tiles that neighbours between
    # them share.
    in_first = int(np.count_nonzero(number == 0))
    short = rows.length[rank[:in_first]] <= chunk
    order = np.arange(len(rank))
    order[:in_first] = np.argsort(~short, kind="stable")
    if short.any() and not short.all():
        with_last = shared[:in_first].copy()
        for of_kind in (np.flatnonzero(short), np.flatnonzero(~short)):
            shared[of_kind[0]] = 0
            if len(of_kind) > 1:
                shared[of_kind[1:]] = np.minimum.reduceat(with_last, of_kind[:-1] + 1)[: len(of_kind) - 1]
    kind = np.where(number > 0, number + 1, rows.length[rank] > chunk)
    return _Walks(rank[order], kind[order], counts[order], shared[order])
