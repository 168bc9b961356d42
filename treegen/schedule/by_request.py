"""Lowering by request: a plan of a tree whose tokens are named by request becomes entries that a step kernel expands.

No Python loop over items or requests, and nothing here grows with the length of a context.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, offsets, ragged_ranges
from treegen.ir.errors import InputError
from treegen.ir.plan import Plan
from treegen.ir.request_schedule import CLAIM_FIELDS, ENTRY_FIELDS, NO_EPOCH, RequestSchedule
from treegen.ir.schedule import RUN_FIELDS, Schedule, TileClass
from treegen.ir.tree.requests import RequestKV
from treegen.schedule.lower import Arranged, Frame, arrange, scheduled
from treegen.schedule.pack_runs import PackedTables
from treegen.target.problem import Problem
from treegen.target.tile_config import BLOCK_TOKENS

_NO_RUNS = frozen(np.empty((0, len(RUN_FIELDS))))


class ItemRoom(NamedTuple):
    """What items have room for. reserve: tokens that a request may gain until there is another plan."""

    tile: TileClass
    page_size: int
    reserve: int


def block_of(page_size: int) -> int:
    """Tokens of the blocks that tails are packed in: within a page they are neighbours."""
    return BLOCK_TOKENS if page_size >= BLOCK_TOKENS else 1


def lower_by_request(plan: Plan, problem: Problem, room: ItemRoom) -> RequestSchedule:
    """The schedule of a plan of a tree by request, in one tile class and one stage.

    Where the plan cuts a node's tokens, entries are cut at the tile or page before, counted from the node's beginning.
    Raises InputError for a tree that is not by request.
    """
    tree = problem.tree
    if tree.requests is None:
        raise InputError("tree", str(tree), "does not say which request its tokens belong to", "use Tree.from_requests")
    arranged = arrange(plan, problem, Frame((room.tile,), 1))
    entries, most_tokens = _entries(arranged, problem, tree.requests, room)
    tables, tile_room, block_room = _regions(arranged, most_tokens, room)
    made = scheduled(plan, problem, arranged, (room.tile,), tables, framed=True)
    return _with_seats(made, tree.requests, entries, arranged, tile_room, block_room, room.reserve)


def _entries(arranged: Arranged, problem: Problem, requests: RequestKV, room: ItemRoom) -> tuple[Ints, Longs]:
    """The entries of all items, one for each of their runs, and the most tokens that each may come to have."""
    tree, runs, unit = problem.tree, arranged.runs.table, max(room.tile.tokens, room.page_size)
    node = tree.kv.start.searchsorted(runs[:, 0], "right") - 1
    first = runs[:, 0] - tree.kv.start.take(node)
    end, tokens, base = first + runs[:, 1], tree.tokens.take(node), requests.first.take(node)
    to_end = end == tokens
    first -= first % unit
    entries = np.empty((len(runs), len(ENTRY_FIELDS)), np.int32)
    entries[:, 0] = requests.owner.take(node)
    entries[:, 1] = base + first
    entries[:, 3:] = runs[:, 2:4]
    end = np.where(to_end, end, end - end % unit)
    opened = to_end & requests.open.take(node)
    entries[:, 2] = np.where(opened, 0, base + end)
    entries[(end == first) & ~opened, 1:3] = unit  # nothing, wherever it was: an end of 0 would be an open one
    return frozen(entries), (end - first + opened * room.reserve).astype(np.int64)


def _regions(arranged: Arranged, most_tokens: Longs, room: ItemRoom) -> tuple[PackedTables, int, int]:
    """Where every item's room for tiles and blocks begins, and how much all have."""
    tokens, block = room.tile.tokens, block_of(room.page_size)
    packed = tokens // block
    rest = np.minimum(most_tokens, tokens - 1)  # a request may have fewer tokens by now than when this was planned
    first = arranged.runs.indptr[:-1]
    tiles = offsets(np.add.reduceat(most_tokens // tokens, first))
    blocks = np.add.reduceat(-(-rest // block), first)
    blocks = offsets(-(-blocks // packed) * packed)
    nothing = np.zeros(len(first), np.int64)
    walk = (tiles[:-1], nothing, blocks[:-1], nothing)
    return PackedTables(_NO_RUNS, _NO_RUNS, walk), int(tiles[-1]), int(blocks[-1])


def _with_seats(
    made: Schedule,
    requests: RequestKV,
    entries: Ints,
    arranged: Arranged,
    tile_room: int,
    block_room: int,
    reserve: int,
) -> RequestSchedule:
    """The schedule with seats in place of rows, and what is known of every seat."""
    seats = int(requests.seat.max(initial=-1)) + 1
    epoch, most, counts = np.full(seats, NO_EPOCH, np.int32), np.zeros(seats, np.int32), np.zeros(seats, np.int64)
    epoch[requests.seat], most[requests.seat] = requests.epoch, requests.length + reserve
    indptr, *claims = requests.claims()
    counts[requests.seat] = indptr[1:] - indptr[:-1]
    if (requests.seat[1:] < requests.seat[:-1]).any():  # claims are listed by row
        order = requests.seat.argsort()
        claimed = ragged_ranges(indptr[order], indptr[order + 1] - indptr[order])
        claims = [column[claimed] for column in claims]
    table = np.empty((len(claims[0]), len(CLAIM_FIELDS)), np.int32)
    for column, values in enumerate(claims):
        table[:, column] = values
    of_seats = made.changed(
        rows=frozen(requests.seat.take(made.rows)), merge_rows=frozen(requests.seat.take(made.merge_rows))
    )
    return RequestSchedule(
        of_seats,
        entries,
        frozen(arranged.runs.indptr),
        tile_room,
        block_room,
        frozen(epoch),
        frozen(most),
        frozen(offsets(counts)),
        frozen(table),
    )
