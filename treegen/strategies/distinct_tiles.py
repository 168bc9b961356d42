"""The tiles of all rows' paths: distinct tiles, the ranks that see them, and the parts of nodes that they hold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Longs, ragged
from treegen.ir.tree import Tree


class PathTiles(NamedTuple):
    """Distinct tiles, and the ranks `lo:hi` that see them.

    A tile is number `number` of the paths of these ranks, and ends after the first `stop` tokens of `node`. Ranks from
    `whole` on see all of it. The earlier ones end inside of it, each no later than the next.
    """

    lo: Longs
    hi: Longs
    whole: Longs
    node: Longs
    stop: Longs
    number: Longs

    def at(self, places: Longs) -> PathTiles:
        """Returns these of the tiles, in this order."""
        return PathTiles(*(column[places] for column in self))


class NodeParts(NamedTuple):
    """Tokens `start:stop` of `node`, in a chunk and in tiles of the ranks up to `hi`.

    The ranks from `lo` on see them.
    """

    chunk: Longs
    node: Longs
    start: Longs
    stop: Longs
    lo: Longs
    hi: Longs

    def at(self, places: Longs | Bools) -> NodeParts:
        """Returns these of the parts, in this order."""
        return NodeParts(*(column[places] for column in self))


class PathRows(NamedTuple):
    """For each rank the tokens that it sees, and the node of the last one, -1 for none.

    above: for each node the nearest one above it that has tokens, -1 for none.
    """

    length: Longs
    end: Longs
    above: Longs


def tiles_of(tree: Tree, rows: PathRows, tokens: int, block: int) -> PathTiles:
    """Returns the distinct tiles, in depth-first order and so in each rank's order.

    They are the tiles that some rank sees whole, and the tiles in which all ranks that see them end.
    """
    spans = tree.topology.spans
    prefix = tree.topology.prefix[spans.node]
    before = (prefix + spans.start) // tokens
    span, step = ragged((prefix + spans.stop) // tokens - before)
    number, lo = before[span] + step, spans.lo[span].astype(np.int64)
    stop = (number + 1) * tokens - prefix[span]

    # Ranks that end inside a tile; each sees everything that the one before it sees.
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
    tiles = PathTiles(
        np.append(begin, first),
        np.append(spans.hi[span].astype(np.int64), at + 1),
        np.append(lo, at),
        np.append(spans.node[span].astype(np.int64), end[at]),
        np.append(stop, length[at] - tree.topology.prefix[end[at]]),
        np.append(number, of[at]),
    )
    return tiles.at(np.lexsort((tiles.number, tiles.lo)))


def rows_of(tree: Tree) -> PathRows:
    """Returns the rows of a tree."""
    topology, nodes = tree.topology, len(tree.tokens)
    # The nearest node with tokens, at or above each node, by pointer doubling; the last entry stands for no node.
    filled = np.append(np.where(tree.tokens > 0, np.arange(nodes), tree.parent), -1).astype(np.int64)
    while np.count_nonzero((further := filled[filled]) != filled):
        filled = further
    above = filled[tree.parent]
    node = tree.row_node[topology.row_of_rank].astype(np.int64)
    sees = tree.row_sees[topology.row_of_rank]
    return PathRows(topology.prefix[node] + sees, np.where(sees > 0, node, above[node]), above)


def node_parts_of(tree: Tree, rows: PathRows, tiles: PathTiles, chunk: int, tokens: int) -> NodeParts:
    """Returns the contents of tiles, in the tiles' order within each chunk, and root first.

    They are cut where nodes and chunks begin, and where ranks end.
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

    # Places are counted along the path. Tiles are also cut where ranks end inside of them.
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

    parts = NodeParts(begin[tile] // chunk, node, place - prefix[node], behind - prefix[node], seen, tiles.hi[tile])
    parts = parts.at(parts.chunk.argsort(kind="stable"))
    goes_on = parts.start[1:] == parts.stop[:-1]
    for column in (parts.chunk, parts.node, parts.lo, parts.hi):
        goes_on &= column[1:] == column[:-1]
    last = parts.stop[np.append(~goes_on, True)[: len(parts.stop)]]
    return parts.at(np.append(True, ~goes_on)[: len(parts.stop)])._replace(stop=last)
