"""A schedule by request: work items say which tokens of which requests they read; where these are, and how many the
requests have by now, a step kernel looks up on the device before every step.

    entries ──▶ step kernel ──▶ tiles and blocks, rows, merged rows ──▶ attention kernels
    of a plan    page table, lengths         of this step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from treegen.ir.arena import ALIGNMENT, SURPLUS_MERGE
from treegen.ir.arrays import Ints
from treegen.ir.schedule import ITEM_FIELDS, Schedule

ENTRY_FIELDS = ("seat", "first", "end", "lo", "hi")
"""Columns of `RequestSchedule.entries`: tokens `first:end` of the request in a seat, seen by the item's rows `lo:hi`.
An end of 0 stands for the present length of the request. `first` is a multiple of the page size."""
CLAIM_FIELDS = ("owner", "first_page", "end_page")
"""Columns of `RequestSchedule.claims`: pages that a request has in common with the one in the seat `owner`."""
NO_EPOCH = -1
"""The epoch of a seat that a plan does not know."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestSchedule:
    """Work items over requests, whatever their lengths are.

    schedule: items, merge lists and the row table, with seats in place of rows. It has no tiles and blocks: columns
    `tile0` and `block0` say where the item's room for them begins, `tiles` and `block_tiles` are 0. entries [entries,
    ENTRY_FIELDS]: item i reads `entries[entry_indptr[i]:entry_indptr[i + 1]]`. tile_room, block_room: entries of the
    tables of tiles and blocks that all items together have room for.

    By seat: epoch, the one that the plan was made for (NO_EPOCH where it knows no request there); most, the tokens up
    to which the items have room; claims, `claims[claim_indptr[s]:claim_indptr[s + 1]]`, what the plan takes for granted
    and a step kernel checks.
    """

    schedule: Schedule
    entries: Ints
    entry_indptr: Ints
    tile_room: int
    block_room: int
    epoch: Ints
    most: Ints
    claim_indptr: Ints
    claims: Ints


@dataclass(frozen=True, slots=True)
class RequestRoom:
    """What a kernel for batches that live has room for; grids and addresses follow from it.

    seats: requests at a time. items: of a plan. rows: entries of its row table. entries, claims: see RequestSchedule.
    slots, merge_slots: of partial results, and entries of merge lists. tiles, blocks: entries of the tables that the
    plan's items read. lone_items: items for requests that are walked alone, lone_rows of them each; lone_tiles,
    lone_blocks: entries that each of these items has room for. tile_width, run_width: words of an entry of tiles and of
    blocks.
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

    def holds(self, made: RequestSchedule) -> bool:
        """Whether there is room for a schedule."""
        schedule = made.schedule
        return (
            len(made.epoch) <= self.seats
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

    Up to `copied` the host writes them, once per plan; `items` ends there, and the items of lone rows follow on it. The
    others a step kernel writes. read_rows and read_merges are the seats that it makes `rows` and `merge_rows` of.
    """

    entries: int
    entry_indptr: int
    read_rows: int
    read_merges: int
    merge_indptr: int
    merge_slots: int
    epoch: int
    most: int
    claim_indptr: int
    claims: int
    items: int
    copied: int
    rows: int
    merge_rows: int
    states: int
    counters: int
    positions: int
    tiles: int
    blocks: int
    words: int

    @classmethod
    def of(cls, room: RequestRoom) -> RequestTables:
        """The places of all tables, each at a multiple of 64 bytes."""
        width, most_runs = len(ITEM_FIELDS), room.run_width * 16
        words = {
            "entries": room.entries * len(ENTRY_FIELDS),
            "entry_indptr": room.items + 1,
            "read_rows": room.rows,
            "read_merges": room.seats,
            "merge_indptr": room.seats + 1,
            "merge_slots": room.merge_slots + 1,
            "epoch": room.seats,
            "most": room.seats,
            "claim_indptr": room.seats + 1,
            "claims": room.claims * len(CLAIM_FIELDS),
        }
        places, end = {}, 0
        for name, count in words.items():
            places[name] = end
            end += (count + ALIGNMENT - 1) & -ALIGNMENT
        places["items"], end = end, end + room.items * width
        places["copied"], end = end, end + (room.lone_items * width + ALIGNMENT - 1) & -ALIGNMENT
        on_device = {
            "rows": room.rows + room.lone_items * room.lone_rows,
            "merge_rows": room.seats,
            "states": room.seats * 2,
            "counters": ALIGNMENT,
            "positions": room.seats,
            "tiles": (room.tiles + room.lone_items * room.lone_tiles + 1) * room.tile_width,
            "blocks": (room.blocks + room.lone_items * room.lone_blocks) * room.run_width + most_runs,
        }
        for name, count in on_device.items():
            places[name] = end
            end += (count + ALIGNMENT - 1) & -ALIGNMENT
        return cls(**places, words=end)

    def write(self, made: RequestSchedule, room: RequestRoom, array: Ints) -> None:
        """Writes what the host says of a plan, which the room holds, into the first `copied` words of an array."""
        schedule = made.schedule
        for place, count, fill, table in (
            (self.entry_indptr, room.items + 1, 0, made.entry_indptr),
            (self.read_rows, room.rows, -1, schedule.rows),
            (self.read_merges, room.seats, SURPLUS_MERGE, schedule.merge_rows),
            (self.merge_indptr, room.seats + 1, 0, schedule.merge_indptr),
            (self.epoch, room.seats, NO_EPOCH, made.epoch),
            (self.claim_indptr, room.seats + 1, len(made.claims), made.claim_indptr),
            (self.items, room.items * len(ITEM_FIELDS), 0, schedule.items.ravel()),
        ):
            array[place : place + len(table)] = table
            array[place + len(table) : place + count] = fill
        first = array[self.items + len(ITEM_FIELDS) - 1 : self.copied : len(ITEM_FIELDS)]
        first[:] = -1  # rows are listed
        for place, table in (
            (self.entries, made.entries.ravel()),
            (self.merge_slots, schedule.merge_slots),
            (self.most, made.most),
            (self.claims, made.claims.ravel()),
        ):
            array[place : place + len(table)] = table
