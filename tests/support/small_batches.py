"""Small batches of a server, and settings of runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from treegen import Shape
from treegen.bench.batch_case import BatchCase, BatchStart
from treegen.bench.batch_runs import BatchSettings
from treegen.workloads.served_batch import BatchCourse, BatchRequest, ServedBatch

CPU = torch.device("cpu")
TINY = Shape(4, 2, 16, dtype="fp32", page_size=4)


def arriving(course: BatchCourse) -> list[BatchRequest]:
    """A request in each free place, which shares with the first."""
    return [BatchRequest(12 + number, 3, 0, 8) for number in range(course.free())]


BATCH = ServedBatch(
    "tiny",
    "groups",
    4,
    (
        BatchRequest(9, 99),
        BatchRequest(14, 2, 0, 8),
        BatchRequest(11, 1, 0, 8),
        BatchRequest(7, 4),
        BatchRequest(30, 6),
    ),
    0,
    arriving,
    grouped=True,
)
DRAFTS = replace(
    BATCH,
    name="drafts",
    draft=(-1, 0, 0, 1),
    requests=(BatchRequest(12, 99, queries=4, grows=2), BatchRequest(9, 3, queries=4, grows=2)),
    follow=lambda course: [course.batch.requests[-1]] * (course.step % 2 and course.free()),
    grouped=False,
)
CHUNKS = replace(
    DRAFTS, name="chunks", draft=(), requests=(BatchRequest(8, 99), BatchRequest(12, 3, queries=5, grows=5))
)


def replayed(call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """What stands in for a CUDA graph: the call again, into the tensor of its first result."""
    out = call().clone()

    def replay() -> None:
        out.copy_(call())

    return replay, out


def settings(steps: int = 5) -> BatchSettings:
    return BatchSettings(steps, 2, 3, replayed, lambda call, repeats: 10.0)


def case_of(batch: ServedBatch, shape: Shape = TINY, steps: int = 5, window_left: int = -1) -> BatchCase:
    return BatchCase(BatchStart.of(batch, steps), shape, 2, CPU, window_left)
