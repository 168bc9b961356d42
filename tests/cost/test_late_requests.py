"""Requests that come between plans: who is walked alone, what that costs, and when a plan cannot wait."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from treegen import LiveBatch, PageTable, Shape
from treegen.cost.late_requests import LatePlan
from treegen.cost.planned_requests import PlannedRequests
from treegen.cost.token_rates import TokenRates
from treegen.ir.arrays import Ints
from treegen.ir.request_schedule import NO_EPOCH
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.steady_sharing import SteadySharing
from treegen.strategies import Strategy, cohort, query
from treegen.target.targets import target_from

SHAPE = Shape(32, 8, 128, dtype="bf16", page_size=16)
TARGET = target_from("h200")


def kernel_for(
    rows: int, tokens: int = 16384, shape: Shape = SHAPE, max_rows: int | None = None, window_left: int = -1,
    strategy: str | Strategy = "auto",
) -> BatchKernel:  # fmt: skip
    """A kernel whose page table nobody reads."""
    table, lengths = torch.zeros(rows, tokens // 16, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    queries = None if max_rows is None else torch.zeros(rows + 1, dtype=torch.int32)
    pages = PageTable(table, lengths, 4096, qo_indptr=queries)
    return treegen.compile_batch(
        shape, pages, strategy=strategy, max_tokens=tokens, max_rows=max_rows, target=TARGET, window_left=window_left
    )


def late(kernel: BatchKernel, batch: LiveBatch) -> float:
    """What it costs that the kernel's plan is the one before."""
    return late_plan(kernel).cost(batch).late_us


def late_plan(kernel: BatchKernel, shared: Ints | None = None) -> LatePlan:
    """The kernel's plan, for the batches after its own. shared: what requests shared; by default what the plan uses."""
    assert kernel.planned is not None
    (tree, shape, target), _, _, schedule = kernel.planned
    rates = TokenRates.of(kernel.form.tile, shape, target, kernel.form.window_left)
    assert tree.requests is not None
    if shared is None:
        shared = np.zeros(len(schedule.epoch), np.int32)
        shared[tree.requests.seat] = tree.requests.shared_tokens
    return LatePlan(schedule, tree, shared, kernel.form.room, rates)


def alone(kernel: BatchKernel, batch: LiveBatch) -> list[int]:
    """The seats that are walked alone with the kernel's plan."""
    assert kernel.planned is not None
    seats: list[int] = PlannedRequests(kernel.planned.schedule).walked_alone(batch).nonzero()[0].tolist()
    return seats


def test_a_request_is_served_without_a_plan_and_planned_behind_the_step() -> None:
    kernel, batch = kernel_for(32), LiveBatch(page_size=16)
    for _ in range(20):
        batch.add(8000)
    assert kernel.prepare(batch)
    assert not kernel.refresh(batch)
    batch.grow()
    assert not kernel.prepare(batch)
    seat = batch.add(300)
    assert not kernel.prepare(batch)
    assert seated(kernel) == [*range(21)]
    assert alone(kernel, batch) == [seat]
    made = [kernel.refresh(batch) for _ in range(4)]  # 32 layers take longer than the plan, and lose 128 us a step
    assert made == [True, False, False, False]
    assert not alone(kernel, batch)
    batch.finish(seat)
    assert not kernel.prepare(batch)
    assert seated(kernel) == [*range(20)]
    assert kernel.counters()["plans"] == 2


def seated(kernel: BatchKernel) -> list[int]:
    """The rows of seats that are taken."""
    rows: list[int] = kernel.program.seats[0].tolist()
    return [row for row in rows if row >= 0]


def test_requests_of_other_query_rows_are_walked_alone() -> None:
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


def test_a_plan_waits_until_it_pays() -> None:
    """Where layers are short a request is walked alone until that has cost as much as a plan."""
    kernel, batch = kernel_for(8), LiveBatch(page_size=16)
    prompt = batch.add(2000)
    kernel.prepare(batch)
    batch.add(300)
    steps = [(kernel.prepare(batch), kernel.refresh(batch)) for _ in range(40)]
    assert 8 < steps.index((False, True)) < 24
    assert sum(map(any, steps)) == 1
    batch.add(2000, prompt, 1600)
    sharing = [(kernel.prepare(batch), kernel.refresh(batch)) for _ in range(40)]
    assert 0 < sharing.index((False, True)) < steps.index((False, True))


def test_layers_are_counted() -> None:
    """Of a model with one layer a plan waits longer."""
    shape = Shape(4, 2, 16, dtype="fp32", page_size=16)
    kernel, batch = kernel_for(4, 64, shape), LiveBatch(page_size=16)
    q, caches = torch.zeros(4, 4, 16), torch.zeros(2, 4096, 16, 2, 16)
    kernel.prepare(batch)
    for layers in (3, 5):
        kernel.step()
        for _ in range(layers):
            kernel(q, *caches)
    assert kernel.replanning.layers == 3
    kernel.step()
    assert kernel.replanning.layers == 5
    kernel.step()
    assert kernel.replanning.layers == 5
    batch.add(10)
    assert sum(kernel.prepare(batch) or kernel.refresh(batch) for _ in range(15)) == 0  # 20 us are lost in a step
    assert sum(kernel.prepare(batch) or kernel.refresh(batch) for _ in range(15)) == 1


def test_a_plan_that_cannot_wait() -> None:
    """Many requests that share a long prompt, one that is long beside short ones, and another batch."""
    kernel, batch = kernel_for(64), LiveBatch(page_size=16)
    prompt = batch.add(8000)
    kernel.prepare(batch)
    for _ in range(32):
        batch.add(8016, prompt, 8000)
    assert kernel.prepare(batch)
    assert not kernel.refresh(batch)
    assert kernel.prepare(LiveBatch(page_size=16))


def test_requests_outgrow_plans_by_tokens_and_by_their_own_length() -> None:
    """Long requests by 128 tokens, short ones on one prompt by a quarter of theirs, if an eighth of them are."""

    def planned(batch: LiveBatch, seats: list[int] | None) -> list[int]:
        """The steps at whose end a plan is made."""
        kernel = kernel_for(65)
        kernel.prepare(batch)
        kernel.replanning.layers = 1000  # so that one call makes a whole plan
        steps = []
        for step in range(1, 140):
            batch.grow(1, seats)
            assert not kernel.prepare(batch)
            if kernel.refresh(batch):
                steps.append(step)
        return steps

    def samples(others: int) -> tuple[LiveBatch, list[int]]:
        batch = LiveBatch(page_size=16)
        prompt = batch.add(2008)
        seats = [batch.fork(prompt) for _ in range(8)]
        for _ in range(others):
            batch.add(2008)
        return batch, seats

    alone = LiveBatch(page_size=16)
    for tokens in (4000, 3000, 16):
        alone.add(tokens)
    assert planned(alone, [0, 1]) == [128]
    assert planned(*samples(others=0)) == [16, 32, 48, 64, 82, 104, 132]  # 8 tokens of their own, then 24, 40, 56
    assert planned(*samples(others=56)) == [128]


def test_what_late_plans_cost() -> None:
    kernel, batch = kernel_for(64), LiveBatch(page_size=16)
    for _ in range(16):
        batch.add(12000)
    kernel.update(batch)
    assert late(kernel, batch) == 0.0
    batch.grow()
    assert late(kernel, batch) == 0.0
    batch.add(100)
    assert late(kernel, batch) == 0.0  # long before the others are
    batch.add(12000, 0, 11200)
    shared = 11200 * SHAPE.kv_token_bytes / TARGET.memory_bytes_per_us
    assert late(kernel, batch) == pytest.approx(shared, rel=1e-6)

    short = LiveBatch(page_size=16)
    short.add(100)
    kernel.update(short)
    costs = []
    for _ in range(24):
        short.add(12000)
        costs.append(late(kernel, short))
    assert costs == sorted(costs)
    assert costs[0] < 20 < costs[3]  # of few requests each is divided among many work items


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


def test_plans_of_beams_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come to share less than could be shared, because beams that fork later do not share it."""
    walked, plans = walked_and_plans_of_beams()
    with monkeypatch.context() as patch:
        patch.setattr(SteadySharing, "allowance", lambda *_: 0.0)  # plans share all that they can
        walked_sharing_all, plans_sharing_all = walked_and_plans_of_beams()
    assert walked < 0.65 * walked_sharing_all
    assert plans < 0.8 * plans_sharing_all


def walked_and_plans_of_beams() -> tuple[int, int]:
    """Counts requests that are walked alone, and plans, in 160 steps of 32 beams over one prompt."""
    source, kernel, batch = random.Random(1), kernel_for(32), LiveBatch(page_size=16)
    first = batch.add(4608)
    for _ in range(31):
        batch.add(4608, first, 4096)
    kernel.prepare(batch)
    kernel.refresh(batch)
    walked, plans = [], []
    for _ in range(200):
        batch.grow()
        for _ in range(source.randrange(6)):
            batch.finish(source.choice(batch.seats.tolist()))
            batch.fork(source.choice(batch.seats.tolist()))
        kernel.prepare(batch)
        walked.append(len(alone(kernel, batch)))
        plans.append(kernel.refresh(batch))
    assert kernel.planned is not None
    assert kernel.planned.problem.tree.unique_tokens < sum(batch.tokens.tolist()) / 4  # the prompt is still shared
    return sum(walked[40:]), sum(plans[40:])


def test_an_owner_that_went() -> None:
    kernel, batch = kernel_for(8), LiveBatch(page_size=16)
    owner = batch.add(1000)
    heir, other = batch.add(1000, owner, 800), batch.add(1000, owner, 640)
    apart = batch.add(50)
    kernel.update(batch)
    assert kernel.planned is not None
    made = kernel.planned.schedule
    batch.finish(owner)
    assert PlannedRequests(made).walked_alone(batch).nonzero()[0].tolist() == [heir, other]
    assert batch.add(70) == owner
    assert PlannedRequests(made).walked_alone(batch).nonzero()[0].tolist() == [heir, other]
    kernel.update(batch)
    batch.moved([apart, heir])
    assert alone(kernel, batch) == [other]  # it shares with the heir by the plan, and these two with nobody


@given(st.data())
def test_who_is_walked_alone(data: st.DataObject) -> None:
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
    events(6)
    served = PlannedRequests(made).served(batch)
    assert PlannedRequests(made).walked_alone(batch).tolist() == ((batch.row >= 0) & ~served.planned).tolist()
    fits = {seat for seat in batch.seats.tolist() if seat < len(made.epoch) and made.epoch[seat] != NO_EPOCH
            and (batch.epoch[seat] == before[seat] or batch.tokens[seat] <= made.most[seat])}  # fmt: skip
    for seat in batch.seats.tolist():
        claims = [(owner, end) for owner, _, end in made.claims_of(seat).tolist()] if seat in fits else []
        alike = all(pages.get(owner, [])[:end] == pages[seat][:end] for owner, end in claims)
        planned = seat in fits and alike and all(len(pages[seat]) >= end for _, end in claims)
        assert bool(served.planned[seat]) == planned
        assert (seat in served.others) == (planned and batch.epoch[seat] != before[seat])


@pytest.mark.parametrize("window_left", [-1, 63])
@given(st.data())
def test_a_quick_bound_of_the_cost(window_left: int, data: st.DataObject) -> None:
    """`prepare` leaves out the estimate where the bound already says that the batch can wait."""
    kernel, batch = kernel_for(12, 1024, window_left=window_left), LiveBatch(page_size=16)

    def events(count: int) -> None:
        for _ in range(count):
            seats = batch.seats.tolist()
            kind = data.draw(st.sampled_from(["add", "fork", "finish", "moved", "grow", "share"]))
            seat = data.draw(st.sampled_from(seats)) if seats else -1
            if len(batch) < 12 and (kind == "add" or seat < 0):
                batch.add(data.draw(st.integers(0, 500)))
            elif len(batch) < 12 and kind == "fork":
                batch.fork(seat)
            elif kind == "finish":
                batch.finish(seat)
            elif kind == "moved":
                batch.moved(seat)
            elif kind == "grow":
                batch.grow()
            elif kind == "share" and len(seats) > 1 and batch.shared_with[seats[0]] < 0:
                batch.share(seats[-1], None, 0)
                if batch.shared_with[seats[0]] != seats[-1]:
                    batch.share(seats[-1], seats[0], int(min(batch.tokens[[seats[0], seats[-1]]])))

    events(8)
    if not len(batch):
        return
    kernel.update(batch)
    plan = late_plan(kernel, batch.shared_tokens.copy())
    assert plan.most_late_us(batch, plan.requests.served(batch)) == 0
    for _ in range(3):
        events(3)
        served = plan.requests.served(batch)
        most_us, cost = plan.most_late_us(batch, served), plan.cost(batch, served)
        assert most_us >= cost.late_us - 1e-9


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
    assert kernel.program.seats[1, : len(epochs)].tolist() == epochs.tolist()
    assert not any(kernel.refresh(batch) for _ in range(100))
    batch.finish(apart[6])
    assert batch.add(3100, prompt, 2992) == apart[6]  # it would read the prompt by itself
    assert not kernel.prepare(batch)
    assert alone(kernel, batch) == []
    rates = TokenRates.of(kernel.form.tile, SHAPE, TARGET)
    assert late(kernel, batch) == pytest.approx(2992 * rates.token_us + 100 * rates.lone_token_us)
    assert any(kernel.refresh(batch) for _ in range(100))
    batch.finish(shared[4])
    batch.add(8300)
    assert not kernel.prepare(batch)
    assert alone(kernel, batch) == [shared[4]]  # the plan has it share the prompt
    batch.finish(apart[7])
    batch.add(30000)
    assert alone(kernel, batch) == [shared[4], apart[7]]  # too long for the room of its items


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


def test_requests_with_windows_cost_what_windows_reach() -> None:
    """Newcomers read again what they share within their windows, and are longer by tokens in windows alone."""
    kernel, batch = kernel_for(24, window_left=1023, strategy=cohort(64)), LiveBatch(page_size=16)
    rates = TokenRates.of(kernel.form.tile, SHAPE, TARGET)
    prompt = batch.add(8000)
    shared = [batch.add(8100, prompt, 7984) for _ in range(4)]
    apart = [batch.add(500) for _ in range(16)]
    long = batch.add(5000)
    kernel.prepare(batch)
    new = batch.add(8200, prompt, 7984)  # its window begins at token 7176
    assert alone(kernel, batch) == [new]
    assert late(kernel, batch) == pytest.approx((7984 - 7176) * rates.token_us)
    batch.finish(new)
    batch.finish(shared[0])
    assert batch.add(8900, prompt, 7984) == shared[0]  # 800 tokens more, but its window is as long as before
    assert alone(kernel, batch) == []
    assert late(kernel, batch) == 0
    batch.finish(apart[2])
    assert batch.add(700) == apart[2]
    assert alone(kernel, batch) == []
    assert late(kernel, batch) == pytest.approx(200 * rates.lone_token_us)
    batch.finish(long)
    assert batch.add(4900) == long  # its window begins before the tokens that the plan has
    assert alone(kernel, batch) == [long]


def test_sharing_that_is_told_late_gets_a_plan() -> None:
    """The plan had sixteen requests read their tokens by themselves."""
    kernel, batch = kernel_for(16), LiveBatch(page_size=16)
    for _ in range(16):
        batch.add(12000)
    kernel.prepare(batch)
    assert not kernel.refresh(batch)
    for seat in range(1, 16):
        batch.share(seat, 0, 11200)
    assert not kernel.prepare(batch) or kernel.counters()["plans"] == 2
    assert kernel.counters()["plans"] == 2 or kernel.refresh(batch) or kernel.refresh(batch)  # the first may choose
    assert not any(kernel.prepare(batch) or kernel.refresh(batch) for _ in range(50))


@pytest.mark.parametrize("replaced", [False, True])
def test_requests_in_others_seats_outgrow_a_plan_as_all_do(replaced: bool) -> None:
    kernel, batch = kernel_for(8), LiveBatch(page_size=16)
    for _ in range(4):
        batch.add(4000)
    kernel.prepare(batch)
    if replaced:
        for seat in range(4):
            batch.finish(seat)
            assert batch.add(4000) == seat
    steps = []
    for _ in range(400):
        kernel.prepare(batch)
        batch.grow()
        steps.append(kernel.refresh(batch))
    assert alone(kernel, batch) == []
    assert 3 <= sum(steps) <= 4


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
    assert planned.walked_alone(batch).nonzero()[0].tolist() == [sharing]
    assert sharing not in planned.served(batch).others
    batch.finish(sharing)
    assert batch.add(0) == sharing
    batch.set_tokens(sharing, 9000)  # it had no tokens when it was looked at
    assert planned.walked_alone(batch).nonzero()[0].tolist() == [sharing]


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
    told = kernel.program.seats[1, : len(planned)]
    seats = batch.seats
    return seats[told[seats] != planned[seats]].tolist()
