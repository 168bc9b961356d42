"""When kernels for running batches choose and plan behind a step."""

from __future__ import annotations

import torch

import treegen
from treegen import LiveBatch, PageTable, Shape
from treegen.runtime.batch_kernel import BatchKernel

SHAPE = Shape(8, 1, 16, dtype="fp32", page_size=16)
ROWS, TOKENS = 16, 4096


def kernel_for(strategy: str = "auto") -> BatchKernel:
    """Makes a kernel for 16 requests. Its page table stays empty, because nothing is computed."""
    pages = PageTable(torch.zeros(ROWS, TOKENS // 16, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32), 1)
    return treegen.compile_batch(SHAPE, pages, max_tokens=TOKENS, strategy=strategy, target="h200", backend="torch")


def planned_batch(kernel: BatchKernel) -> LiveBatch:
    """Plans for 8 requests of 200 tokens."""
    batch = LiveBatch(page_size=16, max_seats=ROWS)
    for _ in range(8):
        batch.add(200)
    assert kernel.prepare(batch)
    return batch


def test_a_bucket_that_is_new_is_chosen_for_in_one_call_and_planned_for_in_the_next() -> None:
    kernel = kernel_for()
    batch = planned_batch(kernel)
    batch.grow(700)
    earlier = kernel.planned
    assert not kernel.refresh(batch)
    assert kernel.planned is earlier
    assert kernel.refresh(batch)
    assert kernel.planned is not earlier
    batch.grow(128)
    assert kernel.refresh(batch)  # a bucket that is known


def test_one_plan_waits_for_one_choice() -> None:
    """Buckets that change in every step would otherwise never be planned for."""
    kernel = kernel_for()
    batch = planned_batch(kernel)
    made = []
    for _ in range(4):
        batch.grow(900)
        made.append(kernel.refresh(batch))
    assert made == [False, True, False, True]


def test_a_strategy_that_is_given_is_not_waited_for() -> None:
    kernel = kernel_for("cohort")
    batch = planned_batch(kernel)
    batch.grow(700)
    assert kernel.refresh(batch)


def test_a_call_that_only_chooses_takes_the_seats() -> None:
    kernel = kernel_for()
    batch = planned_batch(kernel)
    batch.grow(700)
    batch.add(300)
    assert not kernel.refresh(batch)
    assert kernel.rows == 9
    assert not kernel.prepare(batch)


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
