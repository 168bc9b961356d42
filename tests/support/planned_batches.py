"""Kernels for running batches whose page tables nobody reads, and whom their plans serve."""

from __future__ import annotations

import numpy as np
import torch

import treegen
from treegen import LiveBatch, PageTable, Shape
from treegen.cost.token_rates import TokenRates
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


def late_plan(kernel: BatchKernel, then: LiveBatch | None = None) -> LatePlan:
    """The kernel's plan, for the batches after its own. then: its own batch; by default one that shares what the plan
    uses.
    """
    planned = kernel.planned
    assert planned is not None
    shape, requests = planned.shape, planned.tree.tree.requests
    rates = TokenRates.of(kernel.form.config, shape, planned.target, kernel.form.window_left)
    assert requests is not None
    if then is None:
        then = LiveBatch(shape.page_size, max_seats=len(planned.schedule.epoch))
        then.table[:, requests.seat] = np.array([
            requests.seat, requests.epoch, requests.shared_with, requests.shared_tokens, requests.length,
            np.ones_like(requests.seat),
        ])  # fmt: skip
    return LatePlan(planned.tables, planned.tree, then, kernel.form.room, rates)


def alone(kernel: BatchKernel, batch: LiveBatch) -> list[int]:
    """The seats that are served alone with the kernel's plan."""
    assert kernel.planned is not None
    return alone_by(PlannedRequests(kernel.planned.schedule), batch)


def alone_by(requests: PlannedRequests, batch: LiveBatch) -> list[int]:
    """The seats whose requests a plan does not serve."""
    seats: list[int] = ((batch.row >= 0) & ~requests.served(batch).planned).nonzero()[0].tolist()
    return seats
