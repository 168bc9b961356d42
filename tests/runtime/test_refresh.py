"""When kernels for running batches plan behind a step, and in how many calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import treegen
from treegen import LiveBatch, PageTable, Shape
from treegen.ir.errors import InputError, PlanError
from treegen.runtime.batch_kernel import BatchKernel

SHAPE = Shape(8, 1, 16, dtype="fp32", page_size=16)
ROWS = 16


def kernel_for(tokens: int = 4096, strategy: str = "auto", window_left: int = -1) -> BatchKernel:
    """Makes a kernel for 16 requests. Its page table stays empty, because nothing is computed."""
    pages = PageTable(torch.zeros(ROWS, tokens // 16, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32), 1)
    options = {"strategy": strategy, "target": "h200", "backend": "torch", "window_left": window_left}
    return treegen.compile_batch(SHAPE, pages, max_tokens=tokens, **options)  # type: ignore[arg-type]


def planned_batch(kernel: BatchKernel, tokens: int = 200) -> LiveBatch:
    """Plans for 8 requests."""
    batch = LiveBatch(page_size=16, max_seats=ROWS)
    for _ in range(8):
        batch.add(tokens)
    assert kernel.prepare(batch)
    return batch


def planned_tokens(kernel: BatchKernel) -> int:
    """Counts the tokens of the kernel's present plan."""
    assert kernel.planned is not None
    return kernel.planned.problem.tree.unique_tokens


@pytest.mark.parametrize("tokens", [200, 400_000])
def test_a_call_makes_a_plan_where_requests_have_grown(tokens: int) -> None:
    kernel = kernel_for(tokens + 10_000)
    batch = planned_batch(kernel, tokens)
    assert not kernel.refresh(batch)
    batch.grow(700)
    assert kernel.refresh(batch)
    assert planned_tokens(kernel) == 8 * (tokens + 700)
    assert not kernel.refresh(batch)


def test_a_plan_is_renewed_for_a_request_that_is_too_short_for_its_window() -> None:
    """It is kept for a request that soon has the tokens it asks for. Without windows it asks for none."""
    kernel = kernel_for(window_left=99)
    batch = planned_batch(kernel, 2000)
    assert kernel.planned is not None
    least = int(kernel.planned.schedule.least[3])
    assert 2000 - 64 <= least <= 2000
    for tokens in (least, least - 15):
        batch.set_tokens(3, tokens)
        assert not kernel.refresh(batch)
    batch.set_tokens(3, least - 16)
    assert kernel.refresh(batch)
    assert kernel.planned.schedule.least[3] <= least - 16
    whole = kernel_for()
    batch = planned_batch(whole, 2000)
    batch.set_tokens(3, 100)
    assert not whole.refresh(batch)


def test_buckets_that_change_in_every_step_are_planned_for() -> None:
    kernel = kernel_for(tokens=40_000)
    batch = planned_batch(kernel)
    made = 0
    for _ in range(30):
        batch.grow(900)
        made += kernel.refresh(batch)
    assert made >= 3


@pytest.mark.parametrize("seats", [False, True])
def test_another_batch_and_one_with_more_seats_get_a_plan(seats: bool) -> None:
    kernel = kernel_for()
    batch = LiveBatch(page_size=16, max_seats=8)
    for _ in range(8):
        batch.add(200)
    kernel.update(batch)
    batch.grow(10)
    assert not kernel.refresh(batch)
    if seats:
        batch.add(500)
    else:
        batch = LiveBatch(page_size=16, max_seats=8)
        batch.add(500)
    assert kernel.refresh(batch)
    assert planned_tokens(kernel) == (8 * 210 + 500 if seats else 500)


def test_after_a_failure_the_kernel_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_for()
    batch = planned_batch(kernel)
    batch.grow(700)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "form", kernel.form._replace(room=dataclasses.replace(kernel.form.room, items=0)))
        with pytest.raises(PlanError, match="needs more tables than there is room for"):
            assert kernel.refresh(batch)
    assert planned_tokens(kernel) == 8 * 200
    batch.grow(100)
    assert kernel.refresh(batch)
    assert planned_tokens(kernel) == 8 * 1000


def test_too_many_requests_are_refused() -> None:
    kernel = kernel_for()
    batch = planned_batch(kernel)
    batch.grow(700)
    seats = [batch.add(20) for _ in range(ROWS)]
    with pytest.raises(InputError, match="24"):
        kernel.refresh(batch)
    for seat in seats:
        batch.finish(seat)
    assert kernel.refresh(batch)


def test_a_batch_takes_its_seats_back_from_another_one() -> None:
    kernel = kernel_for()
    batch, other = planned_batch(kernel), LiveBatch(page_size=16, max_seats=ROWS)
    while other.moves < batch.moves:
        other.add(200)
    other.finish(0)
    batch.finish(0)
    assert not kernel.prepare(batch)
    kernel.seat(other)
    assert kernel.replanning.has_moved(batch)
    assert not kernel.prepare(batch)
    assert not kernel.replanning.has_moved(batch)
