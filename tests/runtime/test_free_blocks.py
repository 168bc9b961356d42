"""Plans of running batches that leave thread blocks to requests that are served alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import treegen
from treegen import LiveBatch, PageTable, Shape
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.batch_room import leaving_free
from treegen.strategies import Choice, Strategy, cohort
from treegen.strategies.cohort import Cohort

ROWS, PROMPT = 64, 4096


def agents(
    heads: tuple[int, int] = (8, 1), strategy: str | Strategy = "auto", prompt: int = PROMPT, window_left: int = -1
) -> tuple[BatchKernel, LiveBatch]:
    """A planned batch of agents over two prompts. The page table stays empty, because nothing is computed."""
    pages = PageTable(torch.zeros(ROWS, 1024, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32), 1)
    shape = Shape(*heads, 128, dtype="bf16", page_size=16)
    options = {"strategy": strategy, "target": "h200", "backend": "torch", "window_left": window_left}
    kernel = treegen.compile_batch(shape, pages, max_tokens=16384, **options)  # type: ignore[arg-type]
    batch = batch_of(prompt)
    assert kernel.prepare(batch)
    return kernel, batch


def batch_of(prompt: int = PROMPT) -> LiveBatch:
    """A batch of agents over two prompts."""
    batch, tokens = LiveBatch(page_size=16, max_seats=ROWS), np.random.default_rng(0).integers(200, 500, ROWS)
    first = [batch.add(prompt + int(own)) for own in tokens[:2]]
    for number, own in enumerate(tokens[2:]):
        batch.add(prompt + int(own), first[number % 2], prompt)
    return batch


def shares_of(kernel: BatchKernel) -> float:
    """The thread blocks that the present plan divides tokens among."""
    assert kernel.choice is not None
    assert isinstance(kernel.choice.strategy, Cohort)
    assert kernel.choice.strategy.shares is not None
    return kernel.choice.strategy.shares


def run(kernel: BatchKernel, batch: LiveBatch, steps: int, *, arrivals: bool, at_once: int = 1) -> None:
    """Runs steps. With `arrivals`, each step ends `at_once` agents of one prompt and adds as many of the other one."""
    first, second, *agents = batch.seats.tolist()
    of = {seat: int(batch.shared_with[seat]) for seat in agents}
    for step in range(steps):
        batch.grow()
        for _ in range(at_once if arrivals else 0):
            seat = next(seat for seat in agents if of[seat] == (first, second)[step % 2])
            agents.remove(seat)
            batch.finish(seat)
            agents.append(batch.add(PROMPT + 200, (second, first)[step % 2], PROMPT))
            of[agents[-1]] = (second, first)[step % 2]
        kernel.prepare(batch)
        kernel.refresh(batch)


def test_blocks_are_left_to_requests_that_are_alone() -> None:
    kernel, batch = agents()
    whole = shares_of(kernel)
    run(kernel, batch, 60, arrivals=True)
    assert 0.79 * whole < shares_of(kernel) < 0.9 * whole
    assert kernel.choice is not None
    assert "are left to requests that are served alone" in kernel.choice.reason


def test_when_no_more_requests_come_no_blocks_are_left() -> None:
    kernel, batch = agents()
    whole = shares_of(kernel)
    run(kernel, batch, 60, arrivals=True)
    plans = kernel.counters()["plans"]
    run(kernel, batch, 40, arrivals=False)  # too few for a plan because requests have grown
    assert shares_of(kernel) >= 0.9 * whole
    assert plans < kernel.counters()["plans"] <= plans + 5


@pytest.mark.parametrize("layers", [1, 4, 32])
def test_a_single_burst_leaves_none(layers: int) -> None:
    kernel, batch = agents()
    kernel.replanning.calls = layers
    kernel.replanning.note_step()
    run(kernel, batch, 1, arrivals=True, at_once=12)
    for _ in range(150):
        run(kernel, batch, 1, arrivals=False)
        assert kernel.planned is not None
        assert kernel.planned.free_share == 0
    assert kernel.counters()["plans"] > 1


def test_another_batch_begins_anew() -> None:
    kernel, batch = agents()
    whole = shares_of(kernel)
    run(kernel, batch, 60, arrivals=True)
    assert shares_of(kernel) < whole
    assert kernel.prepare(batch_of())
    assert shares_of(kernel) == whole


@pytest.mark.parametrize("shares", [0.5, 2.0625, 8.25, 264])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.2])
def test_shares_fall_by_what_is_left_free(shares: float, share: float) -> None:
    whole = Choice(cohort(head_rows=64, shares=shares), "a reason")
    left = leaving_free(whole, share).strategy
    assert isinstance(left, Cohort)
    assert left.shares == pytest.approx(shares * (1 - share), abs=0.01)


def test_a_batch_that_only_grows_leaves_none() -> None:
    kernel, batch = agents()
    whole = shares_of(kernel)
    run(kernel, batch, 300, arrivals=False)
    assert kernel.counters()["plans"] > 1
    assert shares_of(kernel) == whole


@pytest.mark.parametrize(
    ("heads", "strategy", "prompt"),
    [((32, 8), "auto", 3 * PROMPT), ((8, 1), cohort(head_rows=64, shares=200), PROMPT)],
    ids=["long items", "named"],
)
def test_long_items_and_named_strategies_leave_none(
    heads: tuple[int, int], strategy: str | Strategy, prompt: int
) -> None:
    kernel, batch = agents(heads, strategy, prompt)
    whole = shares_of(kernel)
    run(kernel, batch, 60, arrivals=True)
    assert kernel.counters()["plans"] > 1
    assert shares_of(kernel) == whole
    run(kernel, batch, 10, arrivals=False)
    plans = kernel.counters()["plans"]
    run(kernel, batch, 30, arrivals=False)
    assert kernel.counters()["plans"] == plans  # there is nothing to take back


def test_tokens_that_windows_reach_count() -> None:
    kernel, batch = agents((32, 8), prompt=3 * PROMPT, window_left=1023)
    run(kernel, batch, 60, arrivals=True)
    assert kernel.planned is not None
    assert kernel.planned.free_share > 0.05
