"""Expansion on the host: does the work of step kernels in NumPy.

The torch backend runs the resulting schedules, which tests plans by request without a GPU. Loops go over requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import INT32_MAX, Ints, Longs, frozen, offsets
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.request_schedule import NO_EPOCH, RequestSchedule
from treegen.ir.schedule import Schedule

FREE, PLANNED, NEW, OUTGROWN, REFUTED, INVALID = range(6)


class RunningRequests(NamedTuple):
    """The running requests, on the host.

    seats: `[RUNNING_FIELDS, seats]`, see treegen.ir.request_tables. length: tokens of each
    row of the batch. pages: page ids of each row of the batch. num_pages: pages of the cache, above all page ids.
    most_tokens: the most tokens of a request. page_size: tokens of a page. queries: `[rows + 1]`, offsets of the query
    rows of each row of the batch; None where each has one. most_queries: the most query rows of all requests.
    """

    seats: Ints
    length: Ints
    pages: list[Ints]
    num_pages: int
    most_tokens: int
    page_size: int
    queries: Ints | None = None
    most_queries: int = 0

    def query_rows(self, row: int) -> range:
        """Returns the query rows of a row of the batch, or none where `queries` is impossible."""
        if self.queries is None:
            return range(row, row + 1)
        begin, end = int(self.queries[row]), int(self.queries[row + 1])
        return range(begin, end) if 0 <= begin <= end <= self.most_queries else range(0)

    def seen(self, row: int, number: int) -> int:
        """Counts the tokens that query row `number` of a row of the batch sees."""
        return max(int(self.length[row]) - len(self.query_rows(row)) + number + 1, 0)

    def reading_row(self, seat: int, end_page: int) -> int:
        """Returns the row in which a plan reads pages up to `end_page` of a seat: that in the seat, or its heir's."""
        row, _, heir_row, common = self.seats[:, seat].tolist()
        return int(heir_row if end_page <= common else row)

    def own_pages(self, row: int) -> Ints:
        """Returns the pages that hold a row's tokens."""
        count = -(-int(self.length[row]) // self.page_size)
        return self.pages[row][: max(count, 0)]

    def valid(self, row: int) -> bool:
        """Says whether a row's length, page ids and query rows are possible."""
        length = int(self.length[row])
        if not 0 <= length <= min(self.most_tokens, len(self.pages[row]) * self.page_size):
            return False
        if self.queries is not None and not 0 <= self.queries[row] <= self.queries[row + 1] <= self.most_queries:
            return False
        own = self.own_pages(row)
        return not len(own) or (int(own.min()) >= 0 and int(own.max()) < self.num_pages)

    def places(self, row: int, first: int, end: int) -> tuple[Longs, Longs, Longs]:
        """Cuts tokens `first:end` of a row at pages; returns the first KV slot, length and position of each run."""
        begin = np.arange(first, max(end, first), self.page_size)
        page = self.pages[row][begin // self.page_size].astype(np.int64)
        return page * self.page_size + begin % self.page_size, np.minimum(end - begin, self.page_size), begin


def states_of(made: RequestSchedule, requests: RunningRequests) -> Ints:
    """Finds the state of every seat, as treegen.backends.claim_checks.state_of_request does."""
    rows, epochs, _, common = requests.seats
    states = np.zeros(len(rows), np.int32)
    for seat in np.flatnonzero((rows >= 0) & (rows < len(requests.length))).tolist():
        row = int(rows[seat])
        known = seat < len(made.epoch) and made.epoch[seat] != NO_EPOCH and made.epoch[seat] == epochs[seat]
        planned = 1 if made.queries is None or not known else made.queries.rows[seat]
        known = known and planned == len(requests.query_rows(row))
        if not requests.valid(row):
            states[seat] = INVALID
        elif not known:
            states[seat] = NEW
        elif not _is_long_enough(made, seat, requests) or not all(
            _holds(claim, row, requests) for claim in _claims(made, seat, common)
        ):
            states[seat] = REFUTED
        else:
            states[seat] = OUTGROWN if requests.length[row] > made.most[seat] else PLANNED
    return states


def _is_long_enough(made: RequestSchedule, seat: int, requests: RunningRequests) -> bool:
    """Says whether a request has the least length for which the plan is right."""
    return bool(requests.length[requests.seats[0, seat]] >= made.least[seat])


def _claims(made: RequestSchedule, seat: int, common: Ints) -> list[list[int]]:
    """Lists the claims of a seat, with that on the heir of the planned request."""
    claims: list[list[int]] = made.claims_of(seat).tolist()
    return [*claims, [seat, 0, int(common[seat])]] if common[seat] else claims


def _holds(claim: list[int], row: int, requests: RunningRequests) -> bool:
    """Says whether a row and the claim's owner have the same pages, where the plan claims so."""
    owner, first, end = claim
    if owner < requests.seats.shape[1] and 0 < requests.seats[3, owner] < end:  # the first pages are read from the heir
        return False
    above = requests.reading_row(owner, end) if owner < requests.seats.shape[1] else -1
    if not 0 <= above < len(requests.length) or end > len(requests.pages[above]):
        return False
    if min(requests.length[row], requests.length[above]) < end * requests.page_size:
        return False
    return bool((requests.pages[row][first:end] == requests.pages[above][first:end]).all())


class _ExpandedItem(NamedTuple):
    """A work item.

    rows: its query rows, -1 for one that it does not write. slot: the partial slot of its first row, -1 for none. runs:
    of each run that it reads a row of the batch, the first token and the end, and the rows `lo:hi` of the item that see
    it.
    """

    rows: list[int]
    slot: int
    runs: list[tuple[int, int, int, int, int]]

    @classmethod
    def of_row(cls, row: int, slot: int, tokens: tuple[int, int, int]) -> _ExpandedItem:
        """Makes an item of one query row."""
        return cls([row], slot, [(*tokens, 0, 1)])


def _planned_work(
    made: RequestSchedule, states: Ints, requests: RunningRequests, window_left: int
) -> Iterator[_ExpandedItem]:
    """Lists the plan's items, with the rows that the plan serves and what these see."""
    plan, row = made.schedule, requests.seats[0].tolist()
    served = {seat: requests.query_rows(row[seat]) for seat in np.flatnonzero(states == PLANNED).tolist()}
    for item, (row0, count, _, _, _, _, partial0, _) in enumerate(plan.items.tolist()):
        written, begins = [-1] * count, [0 if window_left < 0 else INT32_MAX] * count
        for i, seat in enumerate(plan.rows[row0 : row0 + count].tolist()):
            if seat in served:
                number = made.row_number(row0 + i)
                written[i] = served[seat][number]
                if window_left >= 0:
                    begins[i] = _window(requests.seen(row[seat], number), window_left, requests.page_size)
        entries = made.entries[made.entry_indptr[item] : made.entry_indptr[item + 1]].tolist()
        runs = [
            (*_clamped(entry, requests, min(begins[entry[3] : entry[4]])), *entry[3:])
            for entry in entries
            if max(written[entry[3] : entry[4]]) >= 0
        ]
        if max(written) >= 0:
            yield _ExpandedItem(written, partial0, runs)


def _lone_work(states: Ints, requests: RunningRequests, window_left: int) -> Iterator[_ExpandedItem]:
    """Lists the items of rows whose requests are served alone."""
    for seat in np.flatnonzero(states >= NEW).tolist():
        row = int(requests.seats[0, seat])
        for number, place in enumerate(requests.query_rows(row)):
            length = requests.seen(row, number) if states[seat] != INVALID else 0
            yield _ExpandedItem.of_row(place, -1, (row, _window(length, window_left, requests.page_size), length))


def _merged_rows(made: RequestSchedule, states: Ints, requests: RunningRequests) -> dict[int, list[int]]:
    """Lists the partial slots of each query row that the plan serves and merges."""
    plan = made.schedule
    return {
        requests.query_rows(int(requests.seats[0, seat]))[made.merge_number(j)]: (
            plan.merge_partials[plan.merge_indptr[j] : plan.merge_indptr[j + 1]].tolist()
        )
        for j, seat in enumerate(plan.merge_rows.tolist())
        if states[seat] == PLANNED
    }


def _chunk_work(
    states: Ints, requests: RunningRequests, window_left: int, chunk: int
) -> tuple[list[_ExpandedItem], dict[int, list[int]]]:
    """Lists, for batch-invariant mode, an item for each chunk that a row sees, and the partial slots of each row.

    Here it makes no difference which chunks requests read together.
    """
    items: list[_ExpandedItem] = []
    merged: dict[int, list[int]] = {}
    for seat in np.flatnonzero(states > FREE).tolist():
        row = int(requests.seats[0, seat])
        length = int(requests.length[row]) if states[seat] != INVALID else 0
        begin = _window(length, window_left, requests.page_size)
        chunks = range(begin // chunk, -(-length // chunk))
        if not chunks:
            items.append(_ExpandedItem([row], -1, []))
            continue
        merged[row] = list(range(len(items), len(items) + len(chunks)))
        for number in chunks:
            tokens = row, max(number * chunk, begin), min((number + 1) * chunk, length)
            items.append(_ExpandedItem.of_row(row, len(items), tokens))
    return items, merged


def expanded(
    made: RequestSchedule,
    config: KernelConfig,
    requests: RunningRequests,
    window_left: int = -1,
    chunk: int = 0,
    *,
    positions: bool = False,
) -> tuple[Schedule, Ints]:
    """Makes the schedule of one step: the plan's items, and one for each query row that is alone.

    Args:
        made: The plan's schedule by request.
        config: The kernel config.
        requests: The running requests.
        window_left: Tokens before its own that a row sees, -1 for all.
        chunk: Tokens of a chunk in batch-invariant mode, else 0.
        positions: Whether kernels need positions of rows and tokens.

    Returns:
        The schedule, and the state of each seat.
    """
    states = states_of(made, requests)
    if chunk:
        items, merged = _chunk_work(states, requests, window_left, chunk)
    else:
        items = [*_planned_work(made, states, requests, window_left), *_lone_work(states, requests, window_left)]
        merged = _merged_rows(made, states, requests)
    runs = [_runs(work, requests) for work in items]
    counts, heights = (np.array([len(part) for part in parts], np.int64) for parts in (runs, [w.rows for w in items]))
    packed = np.concatenate([np.zeros((0, 5), np.int64), *runs])
    table = np.zeros((len(items), 8), np.int64)
    table[:, 0], table[:, 1] = offsets(heights)[:-1], heights
    table[:, 4], table[:, 5], table[:, 6] = offsets(counts)[:-1], counts, [work.slot for work in items]
    packed = packed if positions else packed[:, :4]
    row_positions = _row_positions(requests) if positions else np.empty(0)
    schedule = Schedule(
        configs=(replace(config, run_tokens=config.tokens, has_full_tiles=False),),
        config_indptr=frozen(np.array([0, len(items)])),
        items=frozen(table),
        rows=frozen(np.array([row for work in items for row in work.rows], np.int64)),
        tiles=frozen(packed[:0]),
        packed_runs=frozen(packed),
        merge_rows=frozen(np.array([*merged], np.int64)),
        merge_indptr=frozen(offsets(np.array([len(slots) for slots in merged.values()], np.int64))),
        merge_partials=frozen(np.array([slot for slots in merged.values() for slot in slots], np.int64)),
        row_positions=frozen(row_positions),
        fixed=chunk > 0,
    )
    return schedule, states


def _row_positions(requests: RunningRequests) -> Ints:
    """Returns the position of each query row."""
    if requests.queries is None:
        return frozen(np.maximum(requests.length - 1, 0))
    found = np.zeros(requests.most_queries, np.int32)
    for row in requests.seats[0][requests.seats[0] >= 0].tolist():
        for query, place in enumerate(requests.query_rows(row)):
            found[place] = requests.seen(row, query) - 1  # -1, where it sees nothing
    return frozen(found)


def _runs(work: _ExpandedItem, requests: RunningRequests) -> Longs:
    """Cuts the runs of an item at pages; returns KV slot, length, `lo`, `hi` and position of each piece."""
    found = [np.zeros((0, 5), np.int64)]
    for row, first, end, lo, hi in work.runs:
        slot, length, position = requests.places(row, first, end)
        found.append(np.stack([slot, length, np.full_like(slot, lo), np.full_like(slot, hi), position], axis=1))
    return np.concatenate(found)


def _clamped(entry: list[int], requests: RunningRequests, window_begin: int) -> tuple[int, int, int]:
    """Finds the row of the batch that an entry names, and the tokens for its present length."""
    seat, first, end, _, _ = entry
    row = requests.reading_row(seat, -(-end // requests.page_size) if end > 0 else INT32_MAX)
    length = int(requests.length[row])
    end = min(end, length) if end > 0 else max(length + end, 0)
    return row, max(length + first, 0) if first < 0 else max(first, window_begin), end


def _window(length: int, window_left: int, page_size: int) -> int:
    """Returns the first token of the page in which the window of a row of this length begins."""
    return 0 if window_left < 0 else max(int(length) - 1 - window_left, 0) // page_size * page_size
