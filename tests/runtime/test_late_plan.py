"""Requests that come between plans: what it costs to serve them alone, and when a plan cannot wait."""

from __future__ import annotations

import random
from copy import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.planned_batches import SHAPE, TARGET, alone, kernel_for, late, late_plan
from treegen import LiveBatch, Shape
from treegen.cost.token_rates import TokenRates
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.steady_sharing import SteadySharing
from treegen.strategies import cohort


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
    rows: list[int] = kernel.program.running[0].tolist()
    return [row for row in rows if row >= 0]


def test_a_plan_waits_until_it_pays() -> None:
    """Where layers are short a request is served alone until that has cost as much as a plan."""
    kernel, batch = kernel_for(8), LiveBatch(page_size=16)
    prompt = batch.add(2000)
    kernel.prepare(batch)
    batch.add(300)
    steps = [(kernel.prepare(batch), kernel.refresh(batch)) for _ in range(40)]
    assert steps.index((False, True)) == 2  # no clock decides, so the count is exact
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
    assert kernel.replanning.layers == 5
    kernel.step()
    assert kernel.replanning.layers == 5
    kernel.step()
    assert kernel.replanning.layers == 5
    batch.add(10)
    assert sum(kernel.prepare(batch) or kernel.refresh(batch) for _ in range(14)) == 0  # 20 us are lost in a step
    assert sum(kernel.prepare(batch) or kernel.refresh(batch) for _ in range(15)) == 1


def test_layers_of_a_captured_step_count_though_no_step_follows() -> None:
    shape = Shape(4, 2, 16, dtype="fp32", page_size=16)
    kernel, batch = kernel_for(4, 64, shape), LiveBatch(page_size=16)
    q, caches = torch.zeros(4, 4, 16), torch.zeros(2, 4096, 16, 2, 16)
    kernel.prepare(batch)
    kernel.step()
    kernel(q, *caches)  # compiles
    kernel.step()
    assert kernel.replanning.layers == 1
    kernel.step()  # from here on in a graph
    for _ in range(4):
        kernel(q, *caches)
    assert kernel.replanning.layers == 4
    for _ in range(300):  # somebody measures a layer
        kernel(q, *caches)
    assert kernel.replanning.layers == 1


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
        kernel.replanning.calls = 1000  # so that one call makes a whole plan
        kernel.replanning.note_step()
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


def test_plans_of_beams_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come to share less than could be shared, because beams that fork later do not share it."""
    alone_sharing_less, plans = alone_and_plans_of_beams()
    with monkeypatch.context() as patch:
        patch.setattr(SteadySharing, "allowance", lambda *_: 0.0)  # plans share all that they can
        alone_sharing_all, plans_sharing_all = alone_and_plans_of_beams()
    assert alone_sharing_less < 0.65 * alone_sharing_all
    assert plans < 0.8 * plans_sharing_all


def alone_and_plans_of_beams() -> tuple[int, int]:
    """Counts requests that are served alone, and plans, in 160 steps of 32 beams over one prompt."""
    source, kernel, batch = random.Random(1), kernel_for(32), LiveBatch(page_size=16)
    first = batch.add(4608)
    for _ in range(31):
        batch.add(4608, first, 4096)
    kernel.prepare(batch)
    kernel.refresh(batch)
    counts, plans = [], []
    for _ in range(200):
        batch.grow()
        for _ in range(source.randrange(6)):
            batch.finish(source.choice(batch.seats.tolist()))
            batch.fork(source.choice(batch.seats.tolist()))
        kernel.prepare(batch)
        counts.append(len(alone(kernel, batch)))
        plans.append(kernel.refresh(batch))
    assert kernel.planned is not None
    assert kernel.planned.problem.tree.unique_tokens < sum(batch.tokens.tolist()) / 4  # the prompt is still shared
    return sum(counts[40:]), sum(plans[40:])


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
                batch.grow(data.draw(st.sampled_from([1, 1, 1100])))  # a plan has room for 1,024 tokens more
            elif kind == "share" and len(seats) > 1 and batch.shared_with[seats[0]] < 0:
                batch.share(seats[-1], None, 0)
                if batch.shared_with[seats[0]] != seats[-1]:
                    batch.share(seats[-1], seats[0], int(min(batch.tokens[[seats[0], seats[-1]]])))

    events(8)
    if not len(batch):
        return
    kernel.update(batch)
    plan = late_plan(kernel, copy(batch))
    assert plan.most_late_us(batch, plan.requests.served(batch)) == 0
    for _ in range(3):
        events(3)
        served = plan.requests.served(batch)
        most_us, cost = plan.most_late_us(batch, served), plan.cost(batch, served)
        assert most_us >= cost.late_us - 1e-9


def test_requests_with_windows_cost_what_windows_reach() -> None:
    """Newcomers read again what they share within their windows, and are longer by tokens in windows alone."""
    kernel, batch = kernel_for(24, window_left=1023, strategy=cohort(64)), LiveBatch(page_size=16)
    rates = TokenRates.of(kernel.form.config, SHAPE, TARGET)
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
