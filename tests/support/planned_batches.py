"""Kernels for running batches whose page tables nobody reads, and whom their plans serve."""

from __future__ import annotations

import numpy as np
import torch

import treegen
from treegen import LiveBatch, PageTable, Shape
from treegen.cost.token_rates import TokenRates
from treegen.ir.arrays import Ints
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.late_plan import LatePlan
from treegen.runtime.planned_requests import PlannedRequests
from treegen.strategies import Strategy
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
    (tree, shape, target), schedule = kernel.planned.problem, kernel.planned.schedule
    rates = TokenRates.of(kernel.form.config, shape, target, kernel.form.window_left)
    assert tree.requests is not None
    if shared is None:
        shared = np.zeros(len(schedule.epoch), np.int32)
        shared[tree.requests.seat] = tree.requests.shared_tokens
    return LatePlan(schedule, tree, shared, kernel.form.room, rates)


def alone(kernel: BatchKernel, batch: LiveBatch) -> list[int]:
    """The seats that are served alone with the kernel's plan."""
    assert kernel.planned is not None
    return alone_by(PlannedRequests(kernel.planned.schedule), batch)


def alone_by(requests: PlannedRequests, batch: LiveBatch) -> list[int]:
    """The seats whose requests a plan does not serve."""
    seats: list[int] = ((batch.row >= 0) & ~requests.served(batch).planned).nonzero()[0].tolist()
    return seats
