"""Tile paths: every row's path cut into tiles at multiples of a tile's tokens, and groups of rows that share tiles.

Paths are in the same tile as long as they have all its tokens in common, so that a token's place in its tile is the
same in every tree that has the path. Where paths part, the tile's beginning is read for each of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Longs, offsets, ragged, ragged_ranges, stacked
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree

_MOST_NEW = (0, 1, 2, 4, 1 << 30)
"""So many tiles of its own, at most, a row brings to the group of the row before it: what is tried."""


class Machine(NamedTuple):
    """Query rows of a work item, at most, and how many work items the target has an SM each for."""

    rows: int
    items: float


class _Tiles(NamedTuple):
    """Distinct tiles, number `number` of the paths of the ranks `lo:hi`: up to the first `stop` tokens of `node`. Ranks
    from `whole` on see all of a tile; of those before each ends inside, none later than the next.
    """

    lo: Longs
    hi: Longs
    whole: Longs
    node: Longs
    stop: Longs
    number: Longs

    def at(self, places: Longs) -> _Tiles:
        """These of the tiles, in this order."""
        return _Tiles(*(column[places] for column in self))


class _Pieces(NamedTuple):
    """Tokens `start:stop` of `node`, in one chunk and in tiles of the ranks up to `hi`, and seen by those from `lo`."""

    chunk: Longs
    node: Longs
    start: Longs
    stop: Longs
    lo: Longs
    hi: Longs

    def at(self, places: Longs | Bools) -> _Pieces:
        """These of the pieces, in this order."""
        return _Pieces(*(column[places] for column in self))


class _Walks(NamedTuple):
    """Every chunk of every rank's path, by kind and rank. kind: 0 for the first chunk of ranks that end in it, 1 for
    that of others, and c + 1 for chunk c; tiles: of the chunk; shared: how many of these, the first ones, are also in
    the walk before.
    """

    rank: Longs
    kind: Longs
    tiles: Longs
    shared: Longs


class _Rows(NamedTuple):
    """Of every rank, the tokens that it sees, and the node of the last of them, -1 where it sees none.

    above: for every node the nearest one above it that has tokens, -1 if none has.
    """

    length: Longs
    end: Longs
    above: Longs


def by_tile_path(tree: Tree, chunk: int, tokens: int, block: int, machine: Machine, *, isolated: bool = False) -> Plan:
    """Groups of up to `machine.rows` rows that share tiles of `tokens` tokens in a chunk of `chunk` tokens of their
    paths, for every chunk; see BatchInvariant. Groups of earlier chunks come first, and every row's tiles are in order.
    Rows that end inside a tile share it with longer ones if that is at a multiple of `block`. isolated: a group's rows
    all see the same tokens.
    """
    rows = _rows_of(tree)
    tiles = _tiles_of(tree, rows, tokens, block)
    walks = _walks_of(tree, rows, tiles, chunk, tokens)
    pieces = _pieces_of(tree, rows, tiles, chunk, tokens)
    alone = _sees_other_tokens(rows, walks, chunk) if isolated else walks.shared == 0
    begins = _group_begins(walks, machine, alone)
    first = np.flatnonzero(begins)
    ends = np.append(first[1:], len(walks.rank))
    group = np.cumsum(begins) - 1

    # Pieces by groups: of a piece's kinds, the walks of its ranks follow one another.
    key = walks.kind * (tree.num_rows + 1) + walks.rank
    kinds = np.where(pieces.chunk > 0, pieces.chunk + 1, 0)
    in_first = np.flatnonzero(pieces.chunk == 0)
    kinds, place = np.append(kinds, kinds[in_first] + 1), np.append(np.arange(len(kinds)), in_first)
    from_walk = key.searchsorted(kinds * (tree.num_rows + 1) + pieces.lo[place])
    to_walk = key.searchsorted(kinds * (tree.num_rows + 1) + pieces.hi[place])
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
    read = pieces.at(place)
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


def _sees_other_tokens(rows: _Rows, walks: _Walks, chunk: int) -> Bools:
    """Which walks see other tokens of their chunk than the walk before."""
    end = np.minimum(rows.length[walks.rank], np.maximum(walks.kind, 1) * chunk)
    other = np.ones(len(end), np.bool_)
    before = slice(None, -1)
    other[1:] = (walks.shared < walks.tiles)[1:] | (walks.tiles[1:] != walks.tiles[before]) | (end[1:] != end[before])
    return other


def _group_begins(walks: _Walks, machine: Machine, alone: Bools) -> Bools:
    """Which walks begin a group, where those that follow join it. A group has `machine.rows` rows at most. Walks that
    are `alone` join none, as those are that share no tiles with the walk before. How many tiles of their own walks may
    bring is what makes the estimated time least: that of all tiles on all SMs, and of the longest group, taken as one
    behind the other.
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


def _walks_of(tree: Tree, rows: _Rows, tiles: _Tiles, chunk: int, tokens: int) -> _Walks:
    """See _Walks."""
    per_chunk, ranks = chunk // tokens, tree.num_rows
    rank, number = ragged(-(-rows.length // chunk))
    order = number.argsort(kind="stable")
    rank, number = rank[order], number[order]
    counts = np.minimum(-(-(rows.length[rank] - number * chunk) // tokens), per_chunk)

    # Ranks that a tile is shared by follow one another.
    key, of = number * (ranks + 1) + rank, tiles.number // per_chunk
    begin = key.searchsorted(of * (ranks + 1) + tiles.lo)
    end = begin + tiles.hi - tiles.lo
    more, less = (np.bincount(places, minlength=len(rank) + 1) for places in (begin + 1, end))
    # A tile of one rank begins and ends its sharing in the same place.
    shared = np.cumsum(more - less)[: len(rank)]

    # The first chunk's ranks by kind: what two share is the least that those between them share, one after another.
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


def _tiles_of(tree: Tree, rows: _Rows, tokens: int, block: int) -> _Tiles:
    """The distinct tiles, in depth-first order and so in every rank's order: those that some rank sees whole, and
    those in which all that see them end.
    """
    spans = tree.topology.spans
    prefix = tree.topology.prefix[spans.node]
    before = (prefix + spans.start) // tokens
    span, step = ragged((prefix + spans.stop) // tokens - before)
    number, lo = before[span] + step, spans.lo[span].astype(np.int64)
    stop = (number + 1) * tokens - prefix[span]

    # Ranks that end inside a tile, each of which sees what the one before it sees.
    length, end = rows.length, rows.end
    of = length // tokens
    rank = np.flatnonzero(length % tokens)
    follower = np.minimum(rank + 1, len(length) - 1)
    linked = rank + 1 < tree.topology.rank_hi[end[rank]]
    linked &= (length[rank] % block == 0) | (length[rank] == length[follower])
    last = ~(linked & (of[follower] == of[rank]) & (length[follower] % tokens > 0))
    first, at, linked = rank[np.append(True, last[:-1])[: len(last)]], rank[last], linked[last]
    begin = lo.copy()
    if linked.any():  # they see part of a tile that the next rank sees whole
        key = number * (tree.num_rows + 1) + lo
        order = key.argsort()
        wanted = (of[at] * (tree.num_rows + 1) + at + 1)[linked]
        begin[order[key[order].searchsorted(wanted)]] = first[linked]
    first, at = first[~linked], at[~linked]
    tiles = _Tiles(
        np.append(begin, first),
        np.append(spans.hi[span].astype(np.int64), at + 1),
        np.append(lo, at),
        np.append(spans.node[span].astype(np.int64), end[at]),
        np.append(stop, length[at] - tree.topology.prefix[end[at]]),
        np.append(number, of[at]),
    )
    return tiles.at(np.lexsort((tiles.number, tiles.lo)))


def _rows_of(tree: Tree) -> _Rows:
    """See _Rows."""
    topology, nodes = tree.topology, len(tree.tokens)
    # The nearest node at or above with tokens, sought in ever longer steps; the last entry is beyond roots.
    filled = np.append(np.where(tree.tokens > 0, np.arange(nodes), tree.parent), -1).astype(np.int64)
    while np.count_nonzero((further := filled[filled]) != filled):
        filled = further
    above = filled[tree.parent]
    node = tree.row_node[topology.row_of_rank].astype(np.int64)
    sees = tree.row_sees[topology.row_of_rank]
    return _Rows(topology.prefix[node] + sees, np.where(sees > 0, node, above[node]), above)


def _pieces_of(tree: Tree, rows: _Rows, tiles: _Tiles, chunk: int, tokens: int) -> _Pieces:
    """What tiles hold, in their order within each chunk and root first, cut where nodes and chunks begin and where
    ranks end.
    """
    prefix = tree.topology.prefix
    begin = tiles.number * tokens
    tile, node = np.arange(len(begin)), tiles.node
    path = [(tile[:0], node[:0])]
    while len(tile):
        path.append((tile, node))
        goes_up = prefix[node] > begin[tile]
        tile, node = tile[goes_up], rows.above[node[goes_up]]
    tile, node = (np.concatenate(column[::-1]) for column in zip(*path, strict=True))
    order = tile.argsort(kind="stable")
    tile, node = tile[order], node[order]
    place = np.maximum(prefix[node], begin[tile])
    seen = tiles.lo[tile]

    # Places are counted along the path. Ranks that end inside divide what they see from what they do not.
    end = prefix[tiles.node] + tiles.stop
    owner, number = ragged(tiles.whole - tiles.lo)
    ended = rows.length[tiles.lo[owner] + number]
    inside = ended < end[owner]
    if inside.any():
        owner, number, ended = owner[inside], number[inside], ended[inside]
        known = np.append(np.arange(len(tile)), np.zeros(len(owner), np.int64))
        tile, place = np.append(tile, owner), np.append(place, ended)
        seen = np.append(seen, tiles.lo[owner] + number + 1)
        order = np.lexsort((place, tile))
        tile, place, base = tile[order], place[order], tile[order] * (tree.num_rows + 1)
        node = node[np.maximum.accumulate(known[order])]
        seen = np.maximum.accumulate(base + seen[order]) - base
        kept = np.append((tile[1:] != tile[:-1]) | (place[1:] != place[:-1]), True)
        tile, node, place, seen = tile[kept], node[kept], place[kept], seen[kept]
    behind = end[tile]
    follows = np.flatnonzero(tile[1:] == tile[:-1])
    behind[follows] = place[follows + 1]

    pieces = _Pieces(begin[tile] // chunk, node, place - prefix[node], behind - prefix[node], seen, tiles.hi[tile])
    pieces = pieces.at(pieces.chunk.argsort(kind="stable"))
    goes_on = pieces.start[1:] == pieces.stop[:-1]
    for column in (pieces.chunk, pieces.node, pieces.lo, pieces.hi):
        goes_on &= column[1:] == column[:-1]
    last = pieces.stop[np.append(~goes_on, True)[: len(pieces.stop)]]
    return pieces.at(np.append(True, ~goes_on)[: len(pieces.stop)])._replace(stop=last)
