"""A schedule by request: work items say which tokens of which requests they read; where these are, and how many the
requests have by now, a step kernel looks up on the device before every step.

    entries ──▶ step kernel ──▶ tiles and blocks, rows, merged rows ──▶ attention kernels
    of a plan    page table, lengths         of this step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treegen.ir.arena import ALIGNMENT
from treegen.ir.arrays import Ints, frozen
from treegen.ir.schedule import ITEM_FIELDS, Schedule

ENTRY_FIELDS = ("seat", "first", "end", "lo", "hi")
"""Columns of `RequestSchedule.entries`: tokens `first:end` of the request in a seat, seen by the item's rows `lo:hi`.

An end of 0 or less counts from the request's present length on, so that 0 stands for the length itself. So does a
`first` below 0; the entry is then a single token. Any other `first` is a multiple of the page size.
"""
CLAIM_FIELDS = ("owner", "first_page", "end_page")
"""Columns of `RequestSchedule.claims`: pages that a request has in common with the one in the seat `owner`."""
SEAT_FIELDS = ("epoch", "most", "row", "merge", "owner", "first_page", "end_page", "claim0", "claim1")
"""What a step kernel reads of a seat: the epoch that the plan was made for, and the tokens up to which it has room; its
places in the row table and among merged rows, -1 for none; its first claim, of owner -1 where there is none; and
`claims[claim0:claim1]`, the others."""
QUERY_FIELDS = ("rows", "least", "merges")
"""What a step kernel reads of a seat besides, where requests may have several query rows: how many it has, the tokens
from which on the plan is right, and how many of its rows the plan merges, one behind another."""
LONE_PARTS = 8
"""Work items that a request that is walked alone is divided among, at most."""
NO_EPOCH = -1
"""The epoch of a seat that a plan does not know."""
UNKNOWN = frozen(np.array([NO_EPOCH, 0, -1, -1, -1, 0, 0, 0, 0]))
"""What is known of such a seat."""


class Queries(NamedTuple):
    """What a schedule says where requests have several query rows.

    By seat: rows, their number; least, the tokens from which on the plan is right. row_number, merge_number: which of
    its request's rows each entry of `rows` and of `merge_rows` is; a request's entries are neighbours, and in order.
    """

    rows: Ints
    least: Ints
    row_number: Ints
    merge_number: Ints


class SharedChunks(NamedTuple):
    """Where a plan in batch-invariant mode has the partial results of chunks that requests read together.

    Chunk c of the request in seat s is in the partial slot `slots[first[s] + c]`, where `c < counts[s]` and that is not
    -1; the request walks all its other chunks by itself.
    """

    first: Ints
    counts: Ints
    slots: Ints


@dataclass(frozen=True, slots=True, eq=False)
class RequestSchedule:
    """Work items over requests, whatever their lengths are.

    schedule: items, merge lists and the row table, with seats in place of rows. It has no tiles and blocks: columns
    `tile0` and `block0` say where the item's room for them begins, `tiles` and `block_tiles` are 0. entries [entries,
    ENTRY_FIELDS]: item i reads `entries[entry_indptr[i]:entry_indptr[i + 1]]`. tile_room, block_room: entries of the
    tables of tiles and blocks that all items together have room for.

    seats [SEAT_FIELDS, seats]: what is known of each seat, UNKNOWN where the plan knows no request. claims [claims,
    CLAIM_FIELDS]: what the plan takes for granted and a step kernel checks, those of a seat one after another. queries:
    None where each request has one row. chunks: None but in batch-invariant mode, where the schedule has items only for
    chunks that requests read together, and no merges.
    """

    schedule: Schedule
    entries: Ints
    entry_indptr: Ints
    tile_room: int
    block_room: int
    seats: Ints
    claims: Ints
    queries: Queries | None = None
    chunks: SharedChunks | None = None

    def row_number(self, entry: int) -> int:
        """Which of its request's rows an entry of the row table is."""
        return 0 if self.queries is None else int(self.queries.row_number[entry])

    def merge_number(self, entry: int) -> int:
        """Which of its request's rows a merged row is."""
        return 0 if self.queries is None else int(self.queries.merge_number[entry])

    @property
    def epoch(self) -> Ints:
        """By seat the epoch that the plan was made for, NO_EPOCH where it knows no request."""
        column: Ints = self.seats[0]
        return column

    @property
    def most(self) -> Ints:
        """By seat the tokens up to which the items have room."""
        column: Ints = self.seats[1]
        return column

    def claims_of(self, seat: int) -> Ints:
        """The claims of a seat."""
        owner, _, _, further, end = self.seats[4:, seat].tolist()
        listed: Ints = self.claims[further - 1 : end] if owner >= 0 else self.claims[:0]
        return listed


@dataclass(frozen=True, slots=True)
class RequestRoom:
    """What a kernel for batches that live has room for; grids and addresses follow from it.

    seats: requests at a time. items: of a plan. rows: entries of its row table. entries, claims: see RequestSchedule.
    slots, merge_slots: of partial results, and entries of merge lists. tiles, blocks: entries of the tables that the
    plan's items read. lone_items: items for requests that are walked alone, lone_rows of them each; lone_tiles,
    lone_blocks: entries that each of these items has room for. tile_width, run_width: words of an entry of tiles and of
    blocks. queries: whether requests may have several query rows; `rows` counts those of all requests then.

    Of launches, the lone items are the first. Where few requests are alone, several lone items share one: each has a
    slot for a partial result behind those of the plan, and `lone_merges` rows behind those of the plan are merged.

    chunk: tokens of a chunk in batch-invariant mode, else 0. In that mode lone items walk chunks, `lone_rows` of them
    each, and each has as many slots.
    """

    seats: int
    items: int
    rows: int
    entries: int
    claims: int
    slots: int
    merge_slots: int
    tiles: int
    blocks: int
    lone_items: int
    lone_rows: int
    lone_tiles: int
    lone_blocks: int
    tile_width: int
    run_width: int
    queries: bool = False
    chunk: int = 0

    @property
    def lone_merges(self) -> int:
        """Requests at most that several lone items share."""
        return 0 if self.chunk else self.lone_items // 2

    @property
    def lone_slots(self) -> int:
        """Partial slots of all lone items."""
        return self.lone_items * (self.lone_rows if self.chunk else 1)

    @property
    def lone_parts(self) -> int:
        """Lone items that share a request at most."""
        return max(1, min(LONE_PARTS, self.lone_items))

    @property
    def merges(self) -> int:
        """Rows that a launch merges at most: of the plan, one that stays free, and of lone items."""
        return self.rows + 1 + self.lone_merges

    def holds(self, made: RequestSchedule) -> bool:
        """Whether there is room for a schedule."""
        schedule = made.schedule
        return (
            made.seats.shape[1] <= self.seats
            and (self.queries or made.queries is None)
            and (self.chunk > 0) == (made.chunks is not None)
            and len(schedule.items) <= self.items
            and len(schedule.rows) <= self.rows
            and len(made.entries) <= self.entries
            and len(made.claims) <= self.claims
            and schedule.num_slots <= self.slots
            and len(schedule.merge_slots) <= self.merge_slots
            and made.tile_room <= self.tiles
            and made.block_room <= self.blocks
        )


class RequestTables(NamedTuple):
    """Where the tables of a kernel for batches that live begin, in int32 words of one array.

        items      lone items, and from `planned` on those of the plan
        planned    ... entries, seats, claims, merge_slots, merge_indptr      the host writes these, once per plan
        copied     the rest of merge_indptr, for lone items; rows, ...        step kernels write these, and lone items

    read_rows are the seats of `rows`; queries (by seat, QUERY_FIELDS), row_number and merge_number are empty where each
    request has one row; counts holds how many rows the plan merges. lone_slots are lists of slots, as merge_slots; in
    batch-invariant mode those of all rows. shared (by seat, first and counts) and shared_slots: see SharedChunks; empty
    in other modes.
    """

    items: int
    planned: int
    entries: int
    entry_indptr: int
    read_rows: int
    seats: int
    claims: int
    queries: int
    row_number: int
    merge_number: int
    shared: int
    shared_slots: int
    counts: int
    merge_slots: int
    merge_indptr: int
    copied: int
    rows: int
    merge_rows: int
    lone_slots: int
    states: int
    counters: int
    flags: int
    positions: int
    tiles: int
    blocks: int
    words: int

    @classmethod
    def of(cls, room: RequestRoom) -> RequestTables:
        """The places of all tables; but for those that go on where another ends, each at a multiple of 64 bytes."""
        width, most_runs = len(ITEM_FIELDS), room.run_width * 16
        places = {"items": 0, "planned": room.lone_items * width}
        end = _aligned(places["planned"] + room.items * width)
        words = {
            "entries": room.entries * len(ENTRY_FIELDS),
            "entry_indptr": room.items + 1,
            "read_rows": room.rows,
            "seats": room.seats * len(SEAT_FIELDS),
            "claims": room.claims * len(CLAIM_FIELDS),
            "queries": room.queries * room.seats * len(QUERY_FIELDS),
            "row_number": room.queries * room.rows,
            "merge_number": room.queries * room.rows,
            "shared": 2 * room.seats if room.chunk else 0,
            "shared_slots": room.lone_slots if room.chunk else 0,
            "counts": 1,
            "merge_slots": room.merge_slots + 1,
        }
        for name, count in words.items():
            places[name], end = end, _aligned(end + count)
        places["merge_indptr"], places["copied"] = end, end + room.rows + 1
        end = _aligned(end + room.merges + 1)
        on_device = {
            "rows": room.rows + room.lone_items * room.lone_rows,
            "merge_rows": room.merges,
            "lone_slots": room.lone_slots,
            "states": room.seats * (1 + room.queries),
            "counters": 2 * 6,
            "flags": 3,
            "positions": room.rows,
            "tiles": (room.tiles + room.lone_items * room.lone_tiles + 1) * room.tile_width,
            "blocks": (room.blocks + room.lone_items * room.lone_blocks) * room.run_width + most_runs,
        }
        for name, count in on_device.items():
            places[name], end = end, _aligned(end + count)
        return cls(**places, words=end)

    def write(self, made: RequestSchedule, room: RequestRoom, head: Ints) -> None:
        """Writes what the host says of a plan, which the room holds, into the words from `planned` to `copied`."""
        schedule, begin = made.schedule, self.planned
        lines = head[self.seats - begin : self.claims - begin][: room.seats * len(SEAT_FIELDS)]
        lines = lines.reshape(room.seats, len(SEAT_FIELDS))
        known = made.seats.shape[1]
        lines[:known], lines[known:] = made.seats.T, UNKNOWN
        if room.queries:
            self._write_queries(made, room, head)
        if made.chunks is not None:
            self._write_chunks(made.chunks, room, head)
        head[self.counts - begin] = len(schedule.merge_rows)
        for place, table in (
            (self.planned, schedule.items.ravel()),
            (self.entries, made.entries.ravel()),
            (self.entry_indptr, made.entry_indptr),
            (self.read_rows, schedule.rows),
            (self.claims, made.claims.ravel()),
            (self.merge_slots, schedule.merge_slots),
            (self.merge_indptr, schedule.merge_indptr),
        ):
            head[place - begin : place - begin + len(table)] = table
        items = head[: room.items * len(ITEM_FIELDS)].reshape(room.items, len(ITEM_FIELDS))
        items[len(schedule.items) :] = 0
        items[:, -1] = -1  # rows are listed

    def _write_queries(self, made: RequestSchedule, room: RequestRoom, head: Ints) -> None:
        """Writes what a plan says of query rows, which the room has tables for."""
        schedule, seats, begin = made.schedule, len(made.epoch), self.planned
        lines = head[self.queries - begin :][: room.seats * len(QUERY_FIELDS)]
        lines = lines.reshape(room.seats, len(QUERY_FIELDS))
        lines[:] = 1, 0, 0
        lines[:seats, 2] = np.bincount(schedule.merge_rows, minlength=seats)
        numbers = [np.zeros_like(schedule.rows), np.zeros_like(schedule.merge_rows)]
        if made.queries is not None:
            lines[:seats, 0], lines[:seats, 1], *numbers = made.queries
        for place, table in zip((self.row_number, self.merge_number), numbers, strict=True):
            head[place - begin : place - begin + len(table)] = table

    def _write_chunks(self, chunks: SharedChunks, room: RequestRoom, head: Ints) -> None:
        """Writes which chunks requests read together."""
        begin, seats = self.planned, len(chunks.first)
        lines = head[self.shared - begin :][: 2 * room.seats].reshape(room.seats, 2)
        lines[:seats, 0], lines[:seats, 1], lines[seats:] = chunks.first, chunks.counts, 0
        head[self.shared_slots - begin :][: len(chunks.slots)] = chunks.slots


def _aligned(words: int) -> int:
    return (words + ALIGNMENT - 1) & -ALIGNMENT
