"""Page tables of running batches on the host, as engines keep them: pages in random order, with owner counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treegen.ir.arrays import Ints, Longs
from treegen.ir.errors import InputError
from treegen.ir.live_batch import LiveBatch
from treegen.workloads.served_batch import BatchEvents, BatchRequest, ServedBatch


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The most that the course of a batch needs.

    Args:
        rows: Rows of the page table.
        width: Page ids per row of the table.
        pages: Pages of the cache.
        queries: Query rows of a step.
    """

    rows: int
    width: int
    pages: int
    queries: int

    @classmethod
    def of(cls, batch: ServedBatch, events: Sequence[BatchEvents]) -> BatchSizes:
        """Computes the sizes for a batch and its events."""
        everyone = [*batch.requests, *(request for each in events for request in each.arrived)]
        running = len(batch.requests) + np.cumsum([0] + [len(each.arrived) - len(each.finished) for each in events])
        page, last = batch.page_size, len(events) + 1
        longest = [request.tokens + request.grows * min(last, request.steps + 1) for request in everyone]
        made = sum(-(-end // page) - one.shared_tokens // page for end, one in zip(longest, everyone, strict=True))
        pages = BatchPages(batch, cls(int(running.max()), -(-max(longest) // page), made, 0))
        used, queries = pages.used_pages, int(pages.queries.sum())
        for each in events:
            pages.apply(each)
            used, queries = max(used, pages.used_pages), max(queries, int(pages.queries.sum()))
        return cls(pages.table.shape[0], pages.table.shape[1], used, queries)

    def joined(self, other: BatchSizes) -> BatchSizes:
        """Returns the larger of each size."""
        return BatchSizes(
            max(self.rows, other.rows),
            max(self.width, other.width),
            max(self.pages, other.pages),
            max(self.queries, other.queries),
        )


@dataclass(frozen=True, slots=True)
class BatchArrival:
    """A request that has joined in a row of the table.

    Args:
        row: The row of the request.
        request: The request.
        shared_row: The row of the request that it shares tokens with; None where it shares nothing.
    """

    row: int
    request: BatchRequest
    shared_row: int | None


def add_arrivals(live: LiveBatch, seats: dict[int, int], arrivals: Sequence[BatchArrival]) -> None:
    """Starts requests in a LiveBatch. seats: the seat of each row's request, which also gets the new ones."""
    for arrival in arrivals:
        request, shared_row = arrival.request, arrival.shared_row
        shared_with = None if shared_row is None else seats[shared_row]
        seats[arrival.row] = live.add(
            request.tokens, shared_with, request.shared_tokens, arrival.row, request.queries
        )  # fmt: skip


def live_batch_of(batch: ServedBatch) -> LiveBatch:
    """Returns the LiveBatch of a batch at its first step."""
    sizes = BatchSizes.of(batch, ())
    live = LiveBatch(page_size=batch.page_size, max_seats=sizes.rows)
    add_arrivals(live, {}, BatchPages(batch, sizes).change.arrived)
    return live


@dataclass(frozen=True, slots=True)
class StepChange:
    """The changes of a step, in this order.

    Args:
        finished: Rows whose requests finished.
        grown: Tokens gained, by row.
        arrived: Requests that joined.
        all_grown: Tokens gained by each request that was running and has not finished; None where they differ.
    """

    finished: tuple[int, ...]
    grown: dict[int, int]
    arrived: tuple[BatchArrival, ...]
    all_grown: int | None = None


class BatchPages:
    """The page table and lengths of a batch at a step, and its pool of pages.

    A request keeps its row until it finishes. Arrivals take the lowest free rows. Page ids beyond a row's length are
    left over from earlier requests.

        table [rows, width]   page ids of each row's tokens, in order
        lengths [rows]        tokens of each row, 0 for a free row
        queries [rows]        query rows of each row, 0 for a free row
        owners [pages]        number of rows that each page is in
        free_pages            ids of the pages that are in no row; the last one is taken next

    Args:
        batch: The batch, whose first step is set up.
        sizes: The sizes of the table and the cache.
        seed: Decides the order of pages.

    Raises:
        InputError: The batch does not fit into these sizes.
    """

    def __init__(self, batch: ServedBatch, sizes: BatchSizes, seed: int = 0) -> None:
        self.batch, self.page_size = batch, batch.page_size
        self.table: Ints = np.zeros((sizes.rows, sizes.width), np.int32)
        self.lengths: Ints = np.zeros(sizes.rows, np.int32)
        self.queries: Ints = np.zeros(sizes.rows, np.int32)
        self.owners: Ints = np.zeros(sizes.pages, np.int32)
        self._grows: Ints = np.zeros(sizes.rows, np.int32)
        self.free_pages: list[int] = np.random.default_rng(seed).permutation(sizes.pages).tolist()
        self._free_rows = list(range(sizes.rows))
        self._row_of: dict[int, int] = {}
        self._numbers = 0
        self._writes: list[tuple[int, int, Ints]] = []
        self._groups: list[tuple[Ints, int]] | None = None
        self.change = StepChange((), {}, self._join(batch.requests))
        """The changes of the latest step. At the first step all requests have just joined."""

    @property
    def rows(self) -> Ints:
        """Rows of running requests, in ascending order."""
        return np.flatnonzero(self.lengths).astype(np.int32)

    @property
    def held(self) -> Ints:
        """Number of pages of each row, `[rows]`."""
        return -(-self.lengths // self.page_size)

    @property
    def used_pages(self) -> int:
        """Number of pages that belong to at least one row."""
        return int(np.count_nonzero(self.owners))

    def apply(self, events: BatchEvents) -> None:
        """Advances by a step. Raises InputError where the batch no longer fits."""
        self._groups = None
        finished = tuple(self._leave(number) for number in events.finished)
        running, grown = len(self._row_of), self._grow()
        numbers = set(grown.values())
        all_grown = numbers.pop() if len(numbers) == 1 and len(grown) == running else None
        self.change = StepChange(finished, grown, self._join(events.arrived), all_grown)

    def taken_writes(self) -> tuple[Longs, Ints]:
        """Returns the cells of the flat table written since the last call, and the page ids in them."""
        writes, self._writes = self._writes, []
        width = self.table.shape[1]
        cells = [np.zeros(0, np.int64)] + [row * width + first + np.arange(len(ids)) for row, first, ids in writes]
        return np.concatenate(cells), np.concatenate([np.zeros(0, np.int32)] + [ids for _, _, ids in writes])

    def groups(self) -> list[tuple[Ints, int]]:
        """Groups running rows by their first page.

        Returns:
            For each group its rows, and the tokens that all of them share: whole pages, at least one page fewer than
            any of the rows has, and 0 for a single row.
        """
        if self._groups is None:
            rows, held = self.rows, self.held
            first = self.table[rows, 0]
            self._groups = []
            for page in dict.fromkeys(first.tolist()):
                members = rows[first == page]
                most = int(held[members].min()) - 1 if len(members) > 1 else 0
                same = (self.table[members, :most] == self.table[members[0], :most]).all(0)
                common = most if same.all() else int(np.argmin(same))
                self._groups.append((members, common * self.page_size))
        return self._groups

    def _leave(self, number: int) -> int:
        row = self._row_of.pop(number)
        ids = self.table[row, : self.held[row]]
        self.owners[ids] -= 1
        self.free_pages += ids[self.owners[ids] == 0].tolist()
        self._free_rows.append(row)
        self.lengths[row] = self.queries[row] = self._grows[row] = 0
        return row

    def _grow(self) -> dict[int, int]:
        before = self.held
        self.lengths += self._grows
        after = self.held
        for row in np.flatnonzero(after > before).tolist():
            self._write(row, int(before[row]), self._taken(int(after[row] - before[row])))
        rows = np.flatnonzero(self._grows)
        return dict(zip(rows.tolist(), self._grows[rows].tolist(), strict=True))

    def _join(self, requests: Sequence[BatchRequest]) -> tuple[BatchArrival, ...]:
        arrived = []
        self._free_rows.sort(reverse=True)
        for request in requests:
            if not self._free_rows:
                raise InputError("sizes", len(self.lengths), "has fewer rows than running requests", "add rows")
            row = self._free_rows.pop()
            shared_row = None if request.shared_with is None else self._row_of[request.shared_with]
            shared = self.table[row, :0] if shared_row is None else self._shared(shared_row, request.shared_tokens)
            self.owners[shared] += 1
            own = self._taken(-(-request.tokens // self.page_size) - len(shared))
            self._write(row, 0, np.concatenate([shared, own]))
            self.lengths[row], self.queries[row], self._grows[row] = request.tokens, request.queries, request.grows
            self._row_of[self._numbers] = row
            self._numbers += 1
            arrived.append(BatchArrival(row, request, shared_row))
        return tuple(arrived)

    def _shared(self, row: int, tokens: int) -> Ints:
        if tokens % self.page_size or tokens > self.lengths[row]:
            reason = f"is not a number of whole pages of a request of {self.lengths[row]} tokens"
            raise InputError("shared_tokens", tokens, reason, "share fewer tokens")
        return self.table[row, : tokens // self.page_size]

    def _taken(self, count: int) -> Ints:
        if count > len(self.free_pages):
            raise InputError("sizes", len(self.owners), "has fewer pages than the batch needs", "add pages")
        ids = np.array(self.free_pages[len(self.free_pages) - count :], np.int32)
        del self.free_pages[len(self.free_pages) - count :]
        self.owners[ids] += 1
        return ids

    def _write(self, row: int, first: int, ids: Ints) -> None:
        self.table[row, first : first + len(ids)] = ids
        self._writes.append((row, first, ids))
