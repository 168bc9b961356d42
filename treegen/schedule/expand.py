"""Expansion on the host: what step kernels do on the device, in NumPy and one work item per row.

The torch backend runs these schedules, so it proves plans by request without a GPU. Loops here go over requests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, offsets
from treegen.ir.request_schedule import NO_EPOCH, RequestSchedule
from treegen.ir.schedule import Schedule, TileClass

FREE, PLANNED, NEW, OUTGROWN, REFUTED, INVALID = range(6)


class RunningRequests(NamedTuple):
    """Who is running, on the host. seats [2, seats]: rows of the batch, -1 for free seats, and epochs. length, pages:
    by row of the batch, its tokens, and the entries of the page table that it has. num_pages, most_tokens: bounds of
    page ids and of lengths. page_size: tokens of a page.
    """

    seats: Ints
    length: Ints
    pages: list[Ints]
    num_pages: int
    most_tokens: int
    page_size: int

    def own_pages(self, row: int) -> Ints:
        """The pages that a row's tokens are in."""
        count = -(-int(self.length[row]) // self.page_size)
        return self.pages[row][: max(count, 0)]

    def valid(self, row: int) -> bool:
        """Whether the row's length and page ids lie within the table and the cache."""
        length = int(self.length[row])
        if not 0 <= length <= min(self.most_tokens, len(self.pages[row]) * self.page_size):
            return False
        own = self.own_pages(row)
        return not len(own) or (int(own.min()) >= 0 and int(own.max()) < self.num_pages)

    def places(self, row: int, first: int, end: int) -> tuple[Longs, Longs, Longs]:
        """Runs of tokens `first:end` of a row, cut at pages: first slots, lengths and positions."""
        begin = np.arange(first, max(end, first), self.page_size)
        page = self.pages[row][begin // self.page_size].astype(np.int64)
        return page * self.page_size + begin % self.page_size, np.minimum(end - begin, self.page_size), begin


def states_of(made: RequestSchedule, requests: RunningRequests) -> Ints:
    """The state of every seat, as treegen.backends.step_kernels.check gives it."""
    rows, epochs = requests.seats
    states = np.zeros(len(rows), np.int32)
    for seat in np.flatnonzero((rows >= 0) & (rows < len(requests.length))).tolist():
        row = int(rows[seat])
        known = seat < len(made.epoch) and made.epoch[seat] != NO_EPOCH and made.epoch[seat] == epochs[seat]
        if not requests.valid(row):
            states[seat] = INVALID
        elif not known:
            states[seat] = NEW
        elif not all(_holds(claim, row, requests) for claim in _claims(made, seat)):
            states[seat] = REFUTED
        else:
            states[seat] = OUTGROWN if requests.length[row] > made.most[seat] else PLANNED
    return states


def _claims(made: RequestSchedule, seat: int) -> list[list[int]]:
    claims: list[list[int]] = made.claims_of(seat).tolist()
    return claims


def _holds(claim: list[int], row: int, requests: RunningRequests) -> bool:
    """Whether a row has the pages of its owner that a plan takes for granted."""
    owner, first, end = claim
    above = int(requests.seats[0, owner]) if owner < requests.seats.shape[1] else -1
    if not 0 <= above < len(requests.length) or end > len(requests.pages[above]):
        return False
    if min(requests.length[row], requests.length[above]) < end * requests.page_size:
        return False
    return bool((requests.pages[row][first:end] == requests.pages[above][first:end]).all())


def expanded(
    made: RequestSchedule, tile: TileClass, requests: RunningRequests, window_left: int = -1, *, positions: bool = False
) -> tuple[Schedule, Ints]:
    """The schedule of this step, with an item for each row of every item of the plan, and the states of seats."""
    states, plan = states_of(made, requests), made.schedule
    rows = requests.seats[0]
    items: list[tuple[int, int, list[tuple[int, int, int]]]] = []  # row, partial slot, and tokens (row of table, a, b)
    for number, (row0, count, _, _, _, _, slot0, _) in enumerate(plan.items.tolist()):
        entries = made.entries[made.entry_indptr[number] : made.entry_indptr[number + 1]].tolist()
        seats = plan.rows[row0 : row0 + count].tolist()
        live = [int(rows[seat]) for seat in seats if states[seat] == PLANNED]
        begin = _window(min(requests.length[live], default=0), window_left, requests.page_size)
        for index, seat in enumerate(seats):
            if states[seat] == PLANNED:
                read = [_clamped(entry, requests, begin) for entry in entries if entry[3] <= index < entry[4]]
                items.append((int(rows[seat]), slot0 + index if slot0 >= 0 else -1, read))
    for seat in np.flatnonzero(states >= NEW).tolist():
        row, length = int(rows[seat]), 0
        if states[seat] != INVALID:
            length = int(requests.length[row])
        items.append((row, -1, [(row, _window(length, window_left, requests.page_size), length)]))

    merged = [(int(rows[seat]), j) for j, seat in enumerate(plan.merge_rows.tolist()) if states[seat] == PLANNED]
    slots = [plan.merge_slots[plan.merge_indptr[j] : plan.merge_indptr[j + 1]] for _, j in merged]
    runs = [_joined([requests.places(*tokens) for tokens in read]) for *_, read in items]
    counts = np.array([run.shape[1] for run in runs], np.int64)
    place, num = offsets(counts), len(items)
    flat = np.concatenate([np.zeros((3, 0), np.int64), *runs], axis=1)
    block = np.zeros((flat.shape[1], 5 if positions else 4), np.int64)
    block[:, 0], block[:, 1], block[:, 3] = flat[0], flat[1], 1
    if positions:
        block[:, 4] = flat[2]
    table = np.zeros((num, 8), np.int64)
    table[:, 0], table[:, 1] = np.arange(num), 1
    table[:, 4], table[:, 5], table[:, 6] = place[:-1], counts, [slot for _, slot, _ in items]
    row_positions = np.maximum(requests.length - 1, 0) if positions else np.empty(0)
    schedule = Schedule(
        classes=(replace(tile, block=tile.tokens, full=False),),
        class_indptr=frozen(np.array([0, num])),
        items=frozen(table),
        rows=frozen(np.array([row for row, *_ in items], np.int64)),
        tiles=frozen(block[:0]),
        blocks=frozen(block),
        merge_rows=frozen(np.array([row for row, _ in merged], np.int64)),
        merge_indptr=frozen(offsets(np.array([len(own) for own in slots], np.int64))),
        merge_slots=frozen(np.concatenate([np.empty(0, np.int32), *slots])),
        row_positions=frozen(row_positions),
    )
    return schedule, states


def _joined(runs: list[tuple[Longs, Longs, Longs]]) -> Longs:
    """Slots, lengths and positions of runs, one after another, as lines of a table."""
    return np.concatenate([np.zeros((3, 0), np.int64), *map(np.stack, runs)], axis=1)


def _clamped(entry: list[int], requests: RunningRequests, window_begin: int) -> tuple[int, int, int]:
    """The row whose tokens an entry names, and which they are now."""
    seat, first, end, _, _ = entry
    row = int(requests.seats[0, seat])
    length = int(requests.length[row])
    return row, max(first, window_begin), min(end, length) if end else length


def _window(length: int, window_left: int, page_size: int) -> int:
    """The page from which on a row of this length, or longer, sees tokens, as their number."""
    return 0 if window_left < 0 else max(int(length) - 1 - window_left, 0) // page_size * page_size
