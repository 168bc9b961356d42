"""KV reads: the tokens of KV that the attention of decoding steps reads, by the plans that served them.

Steps are noted while they run, as copies of the live batch, in some microseconds. What they read is counted afterwards.
"""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from treegen.engine.attention_kernels import AttentionKind, KernelMaker, StepKernel
from treegen.engine.step import Step
from treegen.ir.arrays import Bools, Ints, Longs, offsets, ragged_ranges
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import RequestSchedule
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.planned_requests import PlannedRequests


class ReadTokens(NamedTuple):
    """Tokens of KV, summed over steps and layers. read: those that groups of rows read, each group's once. paths: those
    that query rows would read, each its own.
    """

    read: int
    paths: int


class StepFigures(NamedTuple):
    """Figures of a decoding step.

    Attributes:
        step: Its number among the decoding steps, from 1 on.
        branches: The branches that it decodes.
        read: Tokens of KV that groups of rows read, over all layers.
        paths: The same if each query row read its own.
        ms: Milliseconds, the mean up to the next step that has figures.
    """

    step: int
    branches: int
    read: int
    paths: int
    ms: float


@dataclass(slots=True)
class KVReads:
    """Notes the decoding steps of an engine whose kernels `noting` makes, and counts what they read.

    Attributes:
        kernels: The kernels, one for each kind of attention layer.
    """

    kernels: list[_NotedKernel] = field(default_factory=list)

    def noting(self, make: KernelMaker) -> KernelMaker:
        """Returns a maker of the same kernels that notes each step."""

        def made(step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> StepKernel | None:
            kernel = make(step, kind, sinks)
            if kernel is None:
                return None
            self.kernels.append(_NotedKernel(kernel, kind.window_left))
            return self.kernels[-1]

        return made

    def restart(self) -> None:
        """Forgets the steps so far."""
        for kernel in self.kernels:
            kernel.steps.clear()
            kernel.began.clear()

    def count(self, steps: slice = slice(None)) -> ReadTokens:
        """Counts the tokens of these steps; by default of all."""
        counts = [np.array(kernel.count(steps), np.int64) * kernel.layers for kernel in self.kernels]
        return ReadTokens(*np.sum([np.zeros(2, np.int64), *counts], axis=0).tolist())

    def course(self, most: int) -> tuple[StepFigures, ...]:
        """Returns the figures of at most `most` steps, spread evenly; the last step, whose end is unknown, has none."""
        if not self.kernels or len(self.kernels[0].steps) < 2:
            return ()
        began, steps = self.kernels[0].began, self.kernels[0].steps
        last = len(steps) - 1
        chosen = np.unique(np.linspace(0, last - 1, min(most, last)).round().astype(np.int64))
        figures = []
        for step, until in zip(chosen.tolist(), [*chosen[1:].tolist(), last], strict=True):
            read, paths = self.count(slice(step, step + 1))
            rows = int(np.count_nonzero(steps[step].batch.row >= 0))
            figures.append(
                StepFigures(step + 1, rows, read, paths, 1e3 * (began[until] - began[step]) / (until - step))
            )
        return tuple(figures)


class _NotedStep(NamedTuple):
    """A step: the plan, or None where each branch reads its own path once, and the batch at the step."""

    plan: RequestSchedule | None
    batch: LiveBatch


class _NotedKernel:
    """A kernel that notes its steps. layers: its calls in a step. began: when each step began, in seconds.
    device_tables, device_lengths: see StepKernel.
    """

    def __init__(self, kernel: StepKernel, window_left: int) -> None:
        self._kernel, self._window_left = kernel, window_left
        self.device_tables = getattr(kernel, "device_tables", False)
        self.device_lengths = getattr(kernel, "device_lengths", False)
        self.layers = 0
        self.steps: list[_NotedStep] = []
        self.began: list[float] = []

    @property
    def rows(self) -> int:
        """See StepKernel."""
        return self._kernel.rows

    def prepare(self, batch: LiveBatch) -> None:
        """See StepKernel."""
        self.began.append(time.perf_counter())
        self._kernel.prepare(batch)
        planned = self._kernel.planned if isinstance(self._kernel, BatchKernel) else None
        self.steps.append(_NotedStep(None if planned is None else planned.schedule, deepcopy(batch)))

    def step(self) -> None:
        """See StepKernel."""
        self.layers = 0
        self._kernel.step()

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, out: torch.Tensor) -> None:
        """See StepKernel."""
        self.layers += 1
        self._kernel(q, k_cache, v_cache, out=out)

    def refresh(self, batch: LiveBatch) -> None:
        """See StepKernel."""
        self._kernel.refresh(batch)

    def count(self, steps: slice) -> tuple[int, int]:
        """Counts the tokens of a layer in these steps: those that are read, and those of all paths."""
        read = paths = 0
        known: RequestSchedule | None = None
        for plan, batch in self.steps[steps]:
            tokens = np.where(batch.row >= 0, batch.tokens, 0)
            first = np.maximum(tokens - batch.rows - self._window_left, 0)  # of the first query row
            begin = np.zeros_like(tokens) if self._window_left < 0 else first
            own = _path_tokens(tokens, batch.rows, self._window_left)
            paths += int(own.sum())
            if plan is None:
                read += int((tokens - begin).sum())
                continue
            if plan is not known:
                known, groups, requests = plan, _Groups.of(plan), PlannedRequests(plan)
            by_plan = requests.inherit(batch)
            served = by_plan.planned & (tokens > 0)
            both = min(len(served), len(plan.most))
            served[:both] &= tokens[:both] <= plan.most[:both]
            common = requests.running(batch, by_plan)[3] * np.int64(batch.page_size)
            read += int(own[~served].sum()) + groups.tokens(served, tokens, begin, common)
        return read, paths


def _path_tokens(tokens: Ints, rows: Ints, window_left: int) -> Longs:
    """Returns the tokens that the query rows of each seat read, each row by itself: those of its last `rows` tokens."""
    ends = rows.cumsum()
    lengths = np.repeat(tokens - ends, rows) + np.arange(1, ends[-1] + 1)
    if window_left >= 0:
        lengths = np.minimum(lengths, window_left + 1)
    return np.add.reduceat(np.where(np.repeat(tokens, rows) > 0, lengths, 0).astype(np.int64), ends - rows)


class _Groups(NamedTuple):
    """What the groups of a plan read.

    entries: `[entries, 3]`: the seat, the first token and the end of each range that a group reads, as in
    RequestSchedule; a group's row tiles read the same ranges. seats, indptr: the seats that read each of them.
    """

    entries: Ints
    seats: Ints
    indptr: Longs

    @classmethod
    def of(cls, plan: RequestSchedule) -> _Groups:
        """Lists the ranges of a plan."""
        items = plan.schedule.items.astype(np.int64)
        counts = np.diff(plan.entry_indptr)
        item = np.repeat(np.arange(len(items)), counts)
        lo, hi = plan.entries[:, 3].astype(np.int64), plan.entries[:, 4].astype(np.int64)
        keys = np.column_stack([items[item, 7], plan.entries[:, :3]])
        _, first, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(group.ravel(), kind="stable")
        listed = ragged_ranges((items[item, 0] + lo)[order], (hi - lo)[order])
        indptr = offsets(np.bincount(group.ravel(), hi - lo, len(first)).astype(np.int64))
        return cls(plan.entries[first, :3], plan.schedule.rows[listed], indptr)

    def tokens(self, served: Bools, tokens: Ints, begin: Ints, common: Longs) -> int:
        """Counts the tokens that the branches in the seats `served` read, at these lengths and window begins.

        common: by seat, the first tokens that are read from another branch, because this one has ended.
        """
        if not len(self.entries):
            return 0
        seat, first, end = self.entries.T.astype(np.int64)
        length = np.where(end <= common[seat], np.maximum(end, tokens[seat]), tokens[seat])
        end = np.where(end > 0, np.minimum(end, length), length + end)
        first = np.where(first < 0, length + first, np.maximum(first, begin[seat]))
        reads = np.add.reduceat(served[self.seats].astype(np.int64), self.indptr[:-1]) > 0
        return int(np.maximum(end - first, 0)[reads].sum())
