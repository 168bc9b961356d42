"""The tables of a kernel for running batches: how many entries each has room for, and its place in one int32 array."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter, le
from typing import NamedTuple

import numpy as np

from treegen.ir.arena import ALIGNMENT
from treegen.ir.arrays import Ints, frozen
from treegen.ir.request_schedule import (
    CLAIM_FIELDS,
    ENTRY_FIELDS,
    QUERY_FIELDS,
    SEAT_FIELDS,
    UNKNOWN,
    RequestSchedule,
    ScheduleSizes,
    SharedChunks,
)
from treegen.ir.work_items import ITEM_FIELDS

RUNNING_FIELDS = ("row", "epoch", "heir_row", "common_pages")
"""What a kernel knows of the running request in each seat, apart from the plan.

row: its row of the batch, -1 for none. epoch: its epoch; that of the plan where the plan serves another request than it
was made for. heir_row, common_pages: where the planned request has ended, the row of its heir, and the number of first
pages that both have in common; -1 and 0 for none. The plan reads these pages in the row of the heir.
"""
NO_REQUEST = frozen(np.array([[-1], [-1], [-1], [0]]))
"""The RUNNING_FIELDS of a free seat, as a column."""
LONE_PARTS = 128
"""The most work items that share a request that is served alone.

On an H200 one of 120,000 tokens beside 32 others makes a layer with 8:1 heads 24 us longer in 128 parts, and 38 us in
64. With one of 40,000 tokens beside 64 others a layer takes 2 us more in 128 parts than in 64.
"""

_ROOM_FOR = attrgetter(*ScheduleSizes._fields)


@dataclass(frozen=True, slots=True)
class RequestRoom:
    """The entries that a kernel for running batches has room for; its grids and addresses follow from them.

    Lone items serve requests alone that the plan does not cover. Where few requests are alone, several lone items
    share one. Each then has a partial slot after those of the plan, and `lone_merges` rows are merged after those of
    the plan. In batch-invariant mode each lone item reads `lone_rows` chunks, and has a partial slot for each of them.

    Thread blocks take turns: `at_once` items at a time, and then the next ones. Behind the items of the plan, and
    behind lone items, there is room for this many without rows, which end the list. The last of them in the first list
    has in its first word the thread block that the second list begins with.

    Attributes:
        seats: Requests at a time.
        items: Items of a plan.
        at_once: Items that the thread blocks of a launch take at a time.
        rows: Entries of its row table; where requests have several query rows, the rows of all requests.
        entries: Entries of its items, as in RequestSchedule.
        claims: Claims, as in RequestSchedule.
        slots: Partial slots.
        merge_partials: Entries of its merge lists.
        tiles: Entries of the table of tiles for the plan's items.
        packed_runs: Entries of the table of packed runs for the plan's items.
        lone_items: Items for requests that are served alone.
        lone_rows: Rows of each of these items.
        lone_tiles: Tiles of each of these items.
        lone_runs: Packed runs of each of these items.
        tile_width: int32 words of an entry of the table of tiles.
        run_width: int32 words of an entry of the table of packed runs.
        queries: Whether requests may have several query rows.
        chunk: Tokens of a chunk in batch-invariant mode, else 0.
    """

    seats: int
    items: int
    at_once: int
    rows: int
    entries: int
    claims: int
    slots: int
    merge_partials: int
    tiles: int
    packed_runs: int
    lone_items: int
    lone_rows: int
    lone_tiles: int
    lone_runs: int
    tile_width: int
    run_width: int
    queries: bool = False
    chunk: int = 0

    @property
    def lone_merges(self) -> int:
        """The most requests that several lone items share."""
        return 0 if self.chunk else self.lone_items // 2

    @property
    def lone_partials(self) -> int:
        """Partial slots of all lone items."""
        return self.lone_items * (self.lone_rows if self.chunk else 1)

    @property
    def lone_parts(self) -> int:
        """The most lone items that share a request."""
        return max(1, min(LONE_PARTS, self.lone_items))

    @property
    def merges(self) -> int:
        """The most rows that a launch merges: rows of the plan, one that stays free, and rows of lone items."""
        return self.rows + 1 + self.lone_merges

    def holds(self, made: RequestSchedule) -> bool:
        """Tells whether there is room for a schedule."""
        of_queries = self.queries or made.queries is None
        return of_queries and (self.chunk > 0) == (made.chunks is not None) and self.has_room(made.sizes)

    def has_room(self, sizes: ScheduleSizes) -> bool:
        """Tells whether there is room for a schedule of these sizes."""
        return all(map(le, sizes, _ROOM_FOR(self)))


class RequestTables(NamedTuple):
    """The places of the tables of a kernel for running batches, in int32 words of one array.

        ┌───────────────────┬────────────┬───────────────────────┬──────────────┬───────────────┬──────────────────┐
        │ items of the plan │ lone items │ running, entries, ...,│ merge_indptr │ merge_indptr  │ rows, merge_rows │
        │                   │            │ claims, merge_partials│ of the plan  │ of lone items │ ..., packed_runs │
        └───────────────────┴────────────┴───────────────────────┴──────────────┴───────────────┴──────────────────┘
        ▲                   ▲                                                   ▲
        items, planned      alone                                               copied
        └──── the host writes these once per plan, with no lone items ──────────┘

    Lone items come last, so that in most steps, where they are empty, no other thread block waits for them. In
    batch-invariant mode they do most of the work, and come first.

    Step kernels write the rest: the lone items, and the tables after `copied`.

    running: RUNNING_FIELDS, each of all seats; the host also writes it without a plan.
    read_rows: the seats of the entries of `rows`. queries (QUERY_FIELDS by seat), row_number, merge_number: empty where
    each request has one row. merge_indptr: -1 behind the end of the plan's last merge. lone_partials: the lone items'
    lists of partial slots, as in merge_partials; in batch-invariant mode those of all rows. shared (first and counts,
    by seat) and shared_partials: see SharedChunks; empty in other modes. age: the steps since the plan.
    """

    items: int
    planned: int
    alone: int
    running: int
    entries: int
    entry_indptr: int
    read_rows: int
    seats: int
    claims: int
    queries: int
    row_number: int
    merge_number: int
    shared: int
    shared_partials: int
    age: int
    merge_partials: int
    merge_indptr: int
    copied: int
    rows: int
    merge_rows: int
    lone_partials: int
    states: int
    counters: int
    flags: int
    positions: int
    tiles: int
    packed_runs: int
    words: int

    @classmethod
    def of(cls, room: RequestRoom) -> RequestTables:
        """Returns the places of all tables, at multiples of 64 bytes unless a table goes on where another ends."""
        width, most_runs = len(ITEM_FIELDS), room.run_width * 16
        second = ((room.lone_items if room.chunk else room.items) + room.at_once) * width
        planned, alone = (second, 0) if room.chunk else (0, second)
        places = {"items": 0, "planned": planned, "alone": alone}
        end = _aligned((room.items + room.lone_items + 2 * room.at_once) * width)
        words = {
            "running": len(RUNNING_FIELDS) * room.seats,
            "entries": room.entries * len(ENTRY_FIELDS),
            "entry_indptr": room.items + 1,
            "read_rows": room.rows,
            "seats": room.seats * len(SEAT_FIELDS),
            "claims": room.claims * len(CLAIM_FIELDS),
            "queries": room.queries * room.seats * len(QUERY_FIELDS),
            "row_number": room.queries * room.rows,
            "merge_number": room.queries * room.rows,
            "shared": 2 * room.seats if room.chunk else 0,
            "shared_partials": room.lone_partials if room.chunk else 0,
            "age": 1,
            "merge_partials": room.merge_partials + 1,
        }
        for name, count in words.items():
            places[name], end = end, _aligned(end + count)
        places["merge_indptr"], places["copied"] = end, end + room.rows + 1
        end = _aligned(end + room.merges + 1)
        on_device = {
            "rows": room.rows + room.lone_items * room.lone_rows,
            "merge_rows": room.merges,
            "lone_partials": room.lone_partials,
            "states": room.seats * (1 + room.queries),
            "counters": 2 * 6,
            "flags": 3,
            "positions": room.rows,
            "tiles": (room.tiles + room.lone_items * room.lone_tiles + 1) * room.tile_width,
            "packed_runs": (room.packed_runs + room.lone_items * room.lone_runs) * room.run_width + most_runs,
        }
        for name, count in on_device.items():
            places[name], end = end, _aligned(end + count)
        return cls(**places, words=end)

    def write(self, made: RequestSchedule, room: RequestRoom, head: Ints) -> None:
        """Writes the host's part of a plan, which the room holds, into the words up to `copied`."""
        schedule = made.schedule
        lines = head[self.seats : self.claims][: room.seats * len(SEAT_FIELDS)]
        lines = lines.reshape(room.seats, len(SEAT_FIELDS))
        known = made.seats.shape[1]
        lines[:known], lines[known:] = made.seats.T, UNKNOWN
        if room.queries:
            self._write_queries(made, room, head)
        if made.chunks is not None:
            self._write_chunks(made.chunks, room, head)
        for place, table in (
            (self.entries, made.entries.ravel()),
            (self.entry_indptr, made.entry_indptr),
            (self.read_rows, schedule.rows),
            (self.claims, made.claims.ravel()),
            (self.merge_partials, schedule.merge_partials),
            (self.merge_indptr, schedule.merge_indptr),
        ):
            head[place : place + len(table)] = table
        head[self.merge_indptr + len(schedule.merge_indptr) : self.copied] = -1  # behind the last merge
        head[self.items : self.running] = head[self.age] = 0
        head[self.planned :][: schedule.items.size] = schedule.items.ravel()
        head[max(self.planned, self.alone) - len(ITEM_FIELDS)] = _first_free(len(schedule.items), room)

    def write_running(self, requests: Ints, room: RequestRoom, words: Ints) -> None:
        """Writes the running requests, `[RUNNING_FIELDS, seats]`, into the words from `running` on."""
        lines = words[: len(RUNNING_FIELDS) * room.seats].reshape(-1, room.seats)
        count = min(requests.shape[1], room.seats)
        lines[:, count:] = NO_REQUEST
        lines[:, :count] = requests[:, :count]

    def _write_queries(self, made: RequestSchedule, room: RequestRoom, head: Ints) -> None:
        """Writes the tables of query rows."""
        schedule, seats = made.schedule, len(made.epoch)
        lines = head[self.queries :][: room.seats * len(QUERY_FIELDS)]
        lines = lines.reshape(room.seats, len(QUERY_FIELDS))
        lines[:] = 1, 0
        lines[:seats, 1] = np.bincount(schedule.merge_rows, minlength=seats)
        numbers = [np.zeros_like(schedule.rows), np.zeros_like(schedule.merge_rows)]
        if made.queries is not None:
            lines[:seats, 0], *numbers = made.queries
        for place, table in zip((self.row_number, self.merge_number), numbers, strict=True):
            head[place : place + len(table)] = table

    def _write_chunks(self, chunks: SharedChunks, room: RequestRoom, head: Ints) -> None:
        """Writes which chunks requests read together."""
        seats = len(chunks.first)
        lines = head[self.shared :][: 2 * room.seats].reshape(room.seats, 2)
        lines[:seats, 0], lines[:seats, 1], lines[seats:] = chunks.first, chunks.counts, 0
        head[self.shared_partials :][: len(chunks.slots)] = chunks.slots


def _first_free(items: int, room: RequestRoom) -> int:
    """Returns the first thread block that has fewer of the plan's items than those before it; `at_once` if all have as
    many, or if the plan's are not the first.
    """
    if room.chunk:
        return room.at_once
    return (items - 1) % room.at_once + 1 if items else 0


def _aligned(words: int) -> int:
    return (words + ALIGNMENT - 1) & -ALIGNMENT
