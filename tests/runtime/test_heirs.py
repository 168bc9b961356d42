"""Requests that end while others share their pages: an heir takes over what the plan reads from them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import planned_batches
from treegen import LiveBatch
from treegen.ir.arrays import INT32_MAX
from treegen.ir.request_schedule import NO_EPOCH, RequestSchedule
from treegen.ir.seat_sharing import begin_alike
from treegen.runtime.batch_kernel import BatchKernel
from treegen.strategies import cohort

PAGE, SEATS = 16, 12


pytestmark = pytest.mark.usefixtures("both_ways")


def kernel_for(tokens: int = 16384) -> BatchKernel:
    """A kernel whose plans use all sharing."""
    return planned_batches.kernel_for(SEATS, tokens, strategy=cohort(64, split=64))


def schedule_of(kernel: BatchKernel) -> RequestSchedule:
    assert kernel.planned is not None
    return kernel.planned.schedule


def owners(kernel: BatchKernel, batch: LiveBatch) -> set[int]:
    """The seats whose rows of the page table the kernel compares with others'."""
    claims = schedule_of(kernel).claims[:, [0, 2]].tolist()
    found = {reading_row(kernel, owner, end) for owner, end in claims}
    return {seat for seat in batch.seats.tolist() if batch.row[seat] in found}


def reading_row(kernel: BatchKernel, seat: int, end_page: int) -> int:
    """The row in which the kernel reads pages up to this one of the request that was planned in a seat."""
    row, _, heir_row, common = kernel.program.running[:, seat].tolist()
    return int(heir_row if end_page <= common else row)


def is_served(kernel: BatchKernel, seat: int, alike: Callable[[int, int, int], bool]) -> bool:
    """Whether the kernel serves a seat by its plan, by what it was told. alike: whether a seat has the same first pages
    as the request in a row, and how many.
    """
    made, (_, told, _, common) = schedule_of(kernel), kernel.program.running.tolist()
    if seat >= len(made.epoch) or not made.epoch[seat] == told[seat] != NO_EPOCH:
        return False
    claims = [(owner, end) for owner, _, end in made.claims_of(seat).tolist()]
    if any(0 < common[owner] < end for owner, end in claims):
        return False
    claims += [(seat, common[seat])] if common[seat] else []
    return all(alike(seat, reading_row(kernel, owner, end), end) for owner, end in claims)


def alone(kernel: BatchKernel, batch: LiveBatch) -> list[int]:
    """The seats that the kernel serves alone, if requests share what the batch says."""
    seat_in = {int(batch.row[seat]): seat for seat in batch.seats.tolist()}

    def alike(seat: int, row: int, end: int) -> bool:
        other, tokens = seat_in.get(row, -1), end * PAGE
        long_enough = other >= 0 and min(batch.tokens[[seat, other]]) >= tokens
        return long_enough and begin_alike(batch.shared_with, batch.shared_tokens, seat, other, tokens)

    return [seat for seat in batch.seats.tolist() if not is_served(kernel, seat, alike)]


def test_who_shares_with_an_ended_request_is_served_by_the_plan() -> None:
    """The heir is the one that shares most. When that has ended as well, the next one follows."""
    kernel, batch = kernel_for(), LiveBatch(page_size=PAGE)
    first = batch.add(4100)
    sharing = [batch.add(4100, first, tokens) for tokens in (3200, 4080, 4000, 3200)]
    kernel.prepare(batch)
    assert owners(kernel, batch) == {first}
    for ended, heir in itertools.pairwise((first, sharing[1], sharing[2])):
        batch.finish(ended)
        assert not kernel.prepare(batch)
        assert alone(kernel, batch) == []
        assert owners(kernel, batch) == {heir}
    assert kernel.counters()["plans"] == 1


def test_the_seat_of_an_ended_request_is_for_those_that_share_with_its_heir() -> None:
    kernel, batch = kernel_for(), LiveBatch(page_size=PAGE)
    first = batch.add(4100)
    sharing = [batch.add(4100, first, 4000) for _ in range(4)]
    kernel.prepare(batch)
    batch.finish(first)
    kernel.prepare(batch)
    assert batch.add(4100) == first
    kernel.prepare(batch)
    assert alone(kernel, batch) == [first]
    batch.finish(first)
    assert batch.add(4100, sharing[2], 4000) == first
    kernel.prepare(batch)
    assert alone(kernel, batch) == []


def test_the_seat_of_one_that_shared_more_than_the_heir_is_not_served() -> None:
    """What it would read is in the pages of neither the ended request nor the heir."""
    kernel, batch = kernel_for(), LiveBatch(page_size=PAGE)
    first = batch.add(200)
    more, heir = batch.add(200, first, 192), batch.add(300, first, 64)
    kernel.update(batch)
    batch.finish(more)
    batch.finish(first)
    kernel.seat(batch)
    assert owners(kernel, batch) == {heir}
    assert (batch.add(200), batch.add(200, heir, 192)) == (first, more)
    kernel.seat(batch)
    assert alone(kernel, batch) == [first, more]


def test_no_heir_follows_where_another_request_takes_the_seat_and_shares_as_much() -> None:
    kernel, batch = kernel_for(), LiveBatch(page_size=PAGE)
    first = batch.add(4100)
    sharing = [batch.add(4100, first, 4000) for _ in range(4)]
    kernel.prepare(batch)
    batch.finish(first)
    assert batch.fork(sharing[0]) == first
    kernel.prepare(batch)
    assert alone(kernel, batch) == []
    assert owners(kernel, batch) == {first}


def test_a_plan_that_was_not_loaded_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, batch = kernel_for(), LiveBatch(page_size=PAGE)
    first = batch.add(4100)
    batch.add(4100, first, 4000)
    kernel.update(batch)
    planned = kernel.planned

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kernel.program, "load", stopped)
        with pytest.raises(KeyboardInterrupt):
            kernel.update(batch)
    kernel.seat(batch)
    assert kernel.planned is planned
    assert kernel.prepare(batch)


@given(st.data())
def test_requests_read_their_own_pages_whoever_has_ended(data: st.DataObject) -> None:
    """Of all requests that the plan serves because their claims hold; by lists of their pages."""
    kernel, batch = kernel_for(512), LiveBatch(page_size=PAGE)
    pages: dict[int, list[int]] = {}
    numbers = itertools.count()

    def events(count: int) -> None:
        for _ in range(count):
            seats = batch.seats.tolist()
            kind = data.draw(st.sampled_from(["add", "share", "share", "share", "finish", "finish", "moved"]))
            seat = data.draw(st.sampled_from(seats)) if seats else -1
            if kind in ("add", "share") and len(batch) < 6:
                tokens, shared = 32 * data.draw(st.integers(1, 4)), 0
                if seat >= 0 and kind == "share":
                    shared = min(tokens, 32 * data.draw(st.integers(1, 4)), int(batch.tokens[seat]))
                begin = pages[seat][: shared // PAGE] if shared else []
                new = batch.add(tokens, seat if shared else None, shared)
                pages[new] = [*begin, *itertools.islice(numbers, -(-tokens // PAGE) - len(begin))]
            elif seat >= 0 and kind == "finish":
                batch.finish(seat)
                del pages[seat]
            elif seat >= 0 and kind == "moved":
                batch.moved(seat)
                pages[seat] = [*itertools.islice(numbers, len(pages[seat]))]

    events(8)
    if not len(batch):
        return
    kernel.update(batch)
    for _ in range(4):
        events(2)
        kernel.seat(batch)
        check_reads(kernel, batch, pages)


def check_reads(kernel: BatchKernel, batch: LiveBatch, pages: dict[int, list[int]]) -> None:
    """Checks every entry of the plan for every row that a step kernel would serve by it."""
    made = schedule_of(kernel)
    pages_in = {int(batch.row[seat]): of_seat for seat, of_seat in pages.items()}

    def alike(seat: int, row: int, end: int) -> bool:
        return len(pages[seat]) >= end and pages_in.get(row, [])[:end] == pages[seat][:end]

    def has_room(seat: int) -> bool:
        return int(made.least[seat]) <= int(batch.tokens[seat]) <= int(made.most[seat])

    served = {seat for seat in pages if is_served(kernel, seat, alike) and has_room(seat)}
    read: Counter[int] = Counter()
    for item, (row0, rows) in enumerate(made.schedule.items[:, :2].tolist()):
        seats = made.schedule.rows[row0 : row0 + rows].tolist()
        for owner, first, end, lo, hi in made.entries[made.entry_indptr[item] : made.entry_indptr[item + 1]].tolist():
            for seat in served.intersection(seats[lo:hi]):
                row = reading_row(kernel, owner, -(-end // PAGE) if end else INT32_MAX)
                length = next((int(batch.tokens[each]) for each in pages if batch.row[each] == row), 0)
                end_of_entry = length if end == 0 else min(end, length)
                own = slice(first // PAGE, -(-end_of_entry // PAGE))
                assert end_of_entry <= first or pages_in[row][own] == pages[seat][own]
                read[seat] += max(end_of_entry - first, 0)
    assert all(read[seat] == batch.tokens[seat] for seat in served)


@pytest.mark.parametrize("seats", [1, 5])
def test_a_schedule_without_claims_has_no_heirs(seats: int) -> None:
    kernel, batch = kernel_for(), LiveBatch(page_size=PAGE)
    for _ in range(seats):
        batch.add(300)
    kernel.prepare(batch)
    batch.finish(0)
    kernel.prepare(batch)
    assert alone(kernel, batch) == []
    assert not kernel.program.running[3].any()
