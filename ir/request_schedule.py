"""A schedule by request: work items name the tokens that they read by request and position.

A step kernel looks up on the device, before every step, in which pages these tokens are and how long the requests are.

    entries ──▶ step kernel ──▶ tiles and packed runs, rows, merged rows ──▶ attention kernels
    of a plan   page table,     of this step
                lengths
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen
from treegen.ir.schedule import Schedule

ENTRY_FIELDS = ("seat", "first", "end", "lo", "hi")
"""Columns of `RequestSchedule.entries`: tokens `first:end` of the request in a seat, seen by the item's rows `lo:hi`.

An `end` of 0 or less counts from the request's present length, so that 0 stands for the length itself. So does a
`first` below 0; the entry is then a single token. Any other `first` is a multiple of the page size.

    first, end     request of 100 tokens
    16, 48         [ 16 .. 47 ]
    64,  0         [ 64 .. 99 ]            up to the present length
    -1,  0         [ 99 ]                  its last token
"""
CLAIM_FIELDS = ("owner", "first_page", "end_page")
"""Columns of `RequestSchedule.claims`: pages that a request has in common with the request in the seat `owner`."""
SEAT_FIELDS = ("epoch", "most", "least", "row", "merge", "owner", "first_page", "end_page", "claim0", "claim1")
"""What a step kernel reads for each seat.

epoch: the epoch that the plan was made for, NO_EPOCH for none. most: the tokens up to which the items have room. least:
the request's least tokens for which the plan is right. row, merge: its places in the row table and among merged rows,
-1 for none. owner, first_page, end_page: its first claim, with owner -1 for none. claim0, claim1: its other claims,
`claims[claim0:claim1]`.
"""
QUERY_FIELDS = ("rows", "merges")
"""What a step kernel also reads for each seat where requests may have several query rows.

rows: the request's rows. merges: its rows that the plan merges, which are neighbours among the merged rows.
"""
NO_EPOCH = -1
"""The epoch of a seat that the plan does not know."""
UNKNOWN = frozen(np.array([NO_EPOCH, 0, 0, -1, -1, -1, 0, 0, 0, 0]))
"""The SEAT_FIELDS of a seat that the plan does not know."""


class Queries(NamedTuple):
    """The part of a schedule that says which query rows requests have, where they have several.

    Attributes:
        rows: `[seats]`; the number of rows.
        row_number: For each entry of `rows`, which of its request's rows it is. A request's entries are neighbours, in
            order.
        merge_number: The same for each entry of `merge_rows`.
    """

    rows: Ints
    row_number: Ints
    merge_number: Ints


class SharedChunks(NamedTuple):
    """The partial results of chunks that requests read together, in batch-invariant mode.

    Chunk c of the request in seat s has its partial in the partial slot `slots[first[s] + c]`, if `c < counts[s]` and
    that entry is not -1. The request reads all its other chunks by itself.
    """

    first: Ints
    counts: Ints
    slots: Ints


class ScheduleSizes(NamedTuple):
    """The entries of a schedule by request that kernels need room for, as in RequestRoom."""

    seats: int
    items: int
    rows: int
    entries: int
    claims: int
    slots: int
    merge_partials: int
    tiles: int
    packed_runs: int


@dataclass(frozen=True, slots=True, eq=False)
class RequestSchedule:
    """Work items over requests, whatever their lengths are.

    Attributes:
        schedule: Items, merge lists and the row table, with seats in place of rows. It has no tiles and no packed runs:
            the columns `tile0` and `run0` say where the item's room for them begins; `tiles` and `packed_tiles` are 0.
        entries: `[entries, ENTRY_FIELDS]`; item i reads `entries[entry_indptr[i]:entry_indptr[i + 1]]`.
        entry_indptr: `[items + 1]`; offsets of entries.
        tile_room: Entries of the table of tiles that all items together have room for.
        run_room: Entries of the table of packed runs that all items together have room for.
        seats: `[SEAT_FIELDS, seats]`; UNKNOWN where the plan knows no request.
        claims: `[claims, CLAIM_FIELDS]`; the plan's assumptions, which a step kernel checks. They are in the order of
            the seats, and those of a seat in the order of their pages.
        queries: None where each request has one row.
        chunks: None except in batch-invariant mode. The schedule then has items only for chunks that requests read
            together, and no merges.
    """

    schedule: Schedule
    entries: Ints
    entry_indptr: Ints
    tile_room: int
    run_room: int
    seats: Ints
    claims: Ints
    queries: Queries | None = None
    chunks: SharedChunks | None = None

    @property
    def sizes(self) -> ScheduleSizes:
        """The entries that kernels need room for."""
        made = self.schedule
        return ScheduleSizes(
            *(self.seats.shape[1], len(made.items), len(made.rows), len(self.entries), len(self.claims)),
            *(made.num_partials, len(made.merge_partials), self.tile_room, self.run_room),
        )

    def row_number(self, entry: int) -> int:
        """Returns which of its request's rows an entry of the row table is."""
        return 0 if self.queries is None else int(self.queries.row_number[entry])

    def merge_number(self, entry: int) -> int:
        """Returns which of its request's rows a merged row is."""
        return 0 if self.queries is None else int(self.queries.merge_number[entry])

    @property
    def epoch(self) -> Ints:
        """The epoch that the plan was made for, by seat; NO_EPOCH where it knows no request."""
        column: Ints = self.seats[0]
        return column

    @property
    def most(self) -> Ints:
        """The tokens up to which the items have room, by seat."""
        column: Ints = self.seats[1]
        return column

    @property
    def least(self) -> Ints:
        """The least tokens for which the plan is right, by seat."""
        column: Ints = self.seats[2]
        return column

    def claiming(self) -> Longs:
        """Returns the seat of each claim."""
        further, end = self.seats[8:]
        seats = (self.seats[5] >= 0).nonzero()[0]
        made: Longs = seats.repeat(end.take(seats) - further.take(seats) + 1)
        return made

    def claims_of(self, seat: int) -> Ints:
        """Returns the claims of a seat."""
        numbers = self.claim_numbers(seat)
        listed: Ints = self.claims[numbers.start : numbers.stop]
        return listed

    def claim_numbers(self, seat: int) -> range:
        """Returns the numbers of the claims of a seat."""
        owner, _, _, further, end = self.seats[5:, seat].tolist()
        return range(further - 1, end) if owner >= 0 else range(0)
