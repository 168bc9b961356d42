"""Requests that come and go between plans: whom the plan serves, and who is served alone."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.planned_batches import SHAPE, TARGET, alone, alone_by, kernel_for, late, late_plan
from treegen import LiveBatch
from treegen.cost.token_rates import TokenRates
from treegen.ir.request_schedule import NO_EPOCH
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.planned_requests import PlannedRequests
from treegen.strategies import Strategy, cohort, query

pytestmark = pytest.mark.usefixtures("both_ways")


def test_requests_of_other_query_rows_are_served_alone() -> None:
    """A chunk cannot wait for a plan; a row more or less can."""
    kernel, batch = kernel_for(32, max_rows=1024), LiveBatch(page_size=16)
    for _ in range(20):
        batch.add(1000)
    kernel.prepare(batch)
    batch.set_rows(3, 2)
    assert not kernel.prepare(batch)
    assert alone(kernel, batch) == [3]
    batch.set_rows(5, 512)
    assert kernel.prepare(batch)
    assert not alone(kernel, batch)
    assert kernel.rows == 18 + 2 + 512
    batch.set_rows(5, 1)
    assert not kernel.prepare(batch)
    assert alone(kernel, batch) == [5]
    assert kernel.rows == 19 + 2
    batch.set_rows(3, 1)
    plan = late_plan(kernel)
    assert plan.most_late_us(batch, plan.requests.served(batch)) == math.inf  # requests may be alone by their rows


def test_a_request_in_the_seat_of_another_one_is_served_by_its_plan() -> None:
    """It shares the same prompt, or nothing. The kernel is told the epoch that it planned for."""
    kernel, batch = kernel_for(64), LiveBatch(page_size=16)
    prompt = batch.add(8000)
    shared = [batch.add(8100, prompt, 8000) for _ in range(10)]
    apart = [batch.add(3000) for _ in range(20)]
    assert kernel.prepare(batch)
    for seat in (shared[3], apart[5]):
        batch.finish(seat)
    assert (batch.add(8100, prompt, 8000), batch.add(500)) == (shared[3], apart[5])
    assert not kernel.prepare(batch)
    assert alone(kernel, batch) == []
    assert late(kernel, batch) == 0
    assert kernel.planned is not None
    epochs = kernel.planned.schedule.epoch
    assert kernel.program.running[1, : len(epochs)].tolist() == epochs.tolist()
    assert not any(kernel.refresh(batch) for _ in range(100))
    batch.finish(apart[6])
    assert batch.add(3100, prompt, 2992) == apart[6]  # it would read the prompt by itself
    assert not kernel.prepare(batch)
    assert alone(kernel, batch) == []
    rates = TokenRates.of(kernel.form.config, SHAPE, TARGET)
    assert late(kernel, batch) == pytest.approx(2992 * rates.token_us + 100 * rates.lone_token_us)
    assert any(kernel.refresh(batch) for _ in range(100))
    batch.finish(shared[4])
    batch.add(8300)
    assert not kernel.prepare(batch)
    assert alone(kernel, batch) == [shared[4]]  # the plan has it share the prompt
    batch.finish(apart[7])
    batch.add(30000)
    assert alone(kernel, batch) == [shared[4], apart[7]]  # too long for the room of its items


def test_a_request_that_is_faster_alone_takes_no_seat_of_a_plan() -> None:
    """It would make one work item so much longer that the layer waits for it. What it shares speaks for the plan."""
    kernel, batch = kernel_for(64), LiveBatch(page_size=16)
    prompt = batch.add(8000)
    shared = [batch.add(8100, prompt, 8000) for _ in range(10)]
    apart = [batch.add(3000) for _ in range(20)]
    kernel.prepare(batch)
    for seat in (shared[3], *apart[5:8]):
        batch.finish(seat)
    arrived = [batch.add(8600, prompt, 8000), *(batch.add(tokens) for tokens in (3200, 4500, 3100))]
    assert arrived == [shared[3], *apart[5:8]]
    assert not kernel.prepare(batch)
    assert served_alone(kernel, batch) == [apart[6]]
    for _ in range(200):  # growth does not change that
        batch.grow()
        kernel.prepare(batch)
    assert served_alone(kernel, batch) == [apart[6]]


def served_alone(kernel: BatchKernel, batch: LiveBatch) -> list[int]:
    """The seats whose epochs the kernel was told, and that its plan was not made for."""
    assert kernel.planned is not None
    planned = kernel.planned.schedule.epoch
    told = kernel.program.running[1, : len(planned)]
    seats = batch.seats
    return seats[told[seats] != planned[seats]].tolist()


def test_another_request_may_take_the_place_of_an_owner() -> None:
    """It forked from one that shares the prompt, too, so the plan goes on to read the prompt once."""
    kernel, batch = kernel_for(8), LiveBatch(page_size=16)
    owner = batch.add(4100)
    beams = [batch.add(4100, owner, 4096) for _ in range(5)]
    kernel.prepare(batch)
    batch.finish(owner)
    assert alone(kernel, batch) == beams
    assert batch.fork(beams[2]) == owner
    assert not kernel.prepare(batch)
    assert alone(kernel, batch) == []
    assert not any(kernel.refresh(batch) for _ in range(100))


def test_an_owner_that_went() -> None:
    kernel, batch = kernel_for(8), LiveBatch(page_size=16)
    owner = batch.add(1000)
    heir, other = batch.add(1000, owner, 800), batch.add(1000, owner, 640)
    apart = batch.add(50)
    kernel.update(batch)
    assert kernel.planned is not None
    made = kernel.planned.schedule
    batch.finish(owner)
    assert alone_by(PlannedRequests(made), batch) == [heir, other]
    assert batch.add(70) == owner
    assert alone_by(PlannedRequests(made), batch) == [heir, other]
    kernel.update(batch)
    batch.moved([apart, heir])
    assert alone(kernel, batch) == [other]  # it shares with the heir by the plan, and these two with nobody


def test_whoever_shares_with_an_owner_that_goes_later_is_alone() -> None:
    """Also one that has come into the seat of another request, and was served by the plan until then."""
    kernel, batch = kernel_for(8), LiveBatch(page_size=16)
    owner = batch.add(4000)
    sharing = batch.add(4000, owner, 3200)
    kernel.prepare(batch)
    planned = PlannedRequests(kernel.planned.schedule)  # type: ignore[union-attr]
    batch.finish(sharing)
    assert batch.add(4000, owner, 3200) == sharing
    assert planned.served(batch).others.tolist() == [sharing]
    batch.finish(owner)
    assert batch.add(100) == owner
    assert alone_by(planned, batch) == [sharing]
    assert sharing not in planned.served(batch).others
    batch.finish(sharing)
    assert batch.add(0) == sharing
    batch.set_tokens(sharing, 9000)  # it had no tokens when it was looked at
    assert alone_by(planned, batch) == [sharing]


@pytest.mark.parametrize("window_left", [-1, 127])
@pytest.mark.parametrize(("strategy", "claims"), [(query(split=512), False), (cohort(64), True)], ids=str)
def test_a_plan_that_reads_requests_alone_claims_nothing(window_left: int, strategy: Strategy, claims: bool) -> None:
    """It serves whatever comes into their seats, as long as that fits."""
    kernel, batch = kernel_for(16, window_left=window_left, strategy=strategy), LiveBatch(page_size=16)
    prompt = batch.add(4100)
    shared = [batch.add(4100, prompt, 4080) for _ in range(11)]
    kernel.prepare(batch)
    assert kernel.planned is not None
    assert (len(kernel.planned.schedule.claims) > 0) == (kernel.planned.saved_bytes > 0) == claims
    for seat in shared[2:5]:
        batch.finish(seat)
    new = [batch.add(4200) for _ in range(3)]
    assert new == shared[2:5]
    assert alone(kernel, batch) == (new if claims else [])


@given(st.data())
def test_who_is_served_alone(data: st.DataObject) -> None:
    """Whoever does not fit what the plan assumes of the seat: its pages, by a list of them, and its length."""
    kernel, batch = kernel_for(12, 256), LiveBatch(page_size=16)
    pages: dict[int, list[int]] = {}
    numbers = itertools.count()

    def add(tokens: int, begin: list[int], **shared: int) -> None:
        seat = batch.add(tokens, **shared)
        pages[seat] = [*begin, *itertools.islice(numbers, tokens // 16 - len(begin))]

    def events(count: int) -> None:
        for _ in range(count):
            seats = batch.seats.tolist()
            kind = data.draw(st.sampled_from(["add", "share", "finish", "moved"]))
            seat = data.draw(st.sampled_from(seats)) if seats else None
            if kind in ("add", "share") and len(batch) < 12:
                tokens = data.draw(st.integers(0, 100))
                if seat is None or kind == "add":
                    add(tokens, [])
                else:
                    shared = data.draw(st.integers(0, min(tokens, int(batch.tokens[seat]))))
                    add(tokens, pages[seat][: shared // 16], shared_with=seat, shared_tokens=shared)
            elif seat is not None and kind == "finish":
                batch.finish(seat)
                del pages[seat]
            elif seat is not None and kind == "moved":
                batch.moved(seat)
                pages[seat] = [*itertools.islice(numbers, len(pages[seat]))]

    events(8)
    kernel.update(batch)
    assert kernel.planned is not None
    made = kernel.planned.schedule
    before = dict(enumerate(batch.epoch.tolist()))
    followed = PlannedRequests(made)
    for count in data.draw(st.sampled_from([(6,), (2, 4), (1, 2, 3)])):
        events(count)
        step = followed.served(batch)  # looks only at what has changed since the last step
    served = PlannedRequests(made).served(batch)
    assert (step.others.tolist(), step.planned.tolist()) == (served.others.tolist(), served.planned.tolist())
    fits = {seat for seat in batch.seats.tolist() if seat < len(made.epoch) and made.epoch[seat] != NO_EPOCH
            and (batch.epoch[seat] == before[seat] or batch.tokens[seat] <= made.most[seat])}  # fmt: skip
    for seat in batch.seats.tolist():
        claims = [(owner, end) for owner, _, end in made.claims_of(seat).tolist()] if seat in fits else []
        alike = all(pages.get(owner, [])[:end] == pages[seat][:end] for owner, end in claims)
        planned = seat in fits and alike and all(len(pages[seat]) >= end for _, end in claims)
        assert bool(served.planned[seat]) == planned
        assert (seat in served.others) == (planned and batch.epoch[seat] != before[seat])
