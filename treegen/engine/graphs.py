"""StepGraphs: steps captured as CUDA graphs, by their number of rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from treegen.engine.step import Step
from treegen.ir.errors import BackendError

if TYPE_CHECKING:
    from treegen.engine.forward import Model

_FINE, _COARSE, _FINE_UP_TO = 8, 16, 64
"""Graphs are for 1, 2, 4 and then every multiple of 8 rows up to 64, and for multiples of 16 rows above that."""
_OF_PROMPTS = (32, 64, 128, 192, 256, 384, 512)
"""The same for steps with chunks of prompts. Steps of more rows take the device longer than the host."""

Capture = Callable[[Callable[[], torch.Tensor], Any], tuple[Callable[[], None], torch.Tensor]]
"""Captures a call, given a pool of device memory; returns a replay, and the tensor that replays fill."""


def row_buckets(most: int) -> list[int]:
    """Returns the numbers of rows that graphs are captured for, up to the first that holds `most` rows."""
    steps = [1, 2, 4, *range(_FINE, _FINE_UP_TO, _FINE), *range(_FINE_UP_TO, most + _COARSE, _COARSE)]
    return [rows for place, rows in enumerate(steps) if place == 0 or steps[place - 1] < most]


def prompt_buckets(most: int) -> list[int]:
    """Returns the numbers of rows of steps with chunks of prompts that graphs are captured for, up to `most` rows."""
    return [rows for rows in _OF_PROMPTS if rows <= most]


def cuda_capture(call: Callable[[], torch.Tensor], pool: Any) -> tuple[Callable[[], None], torch.Tensor]:
    """Captures a call that has run before as a CUDA graph. Raises BackendError where that is impossible."""
    graph = torch.cuda.CUDAGraph()
    try:
        with _no_collection(), torch.cuda.graph(graph, pool=pool, stream=capture_stream(torch.cuda.current_device())):
            result = call()
    except RuntimeError as cause:
        reason = f"cannot be captured: {str(cause).splitlines()[0]}"
        raise BackendError("model", "a step", reason, "pass cuda_graphs=False") from cause
    return graph.replay, result


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Returns the stream to capture on. Graphs of one pool reuse memory if they are captured on one stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Holds the garbage collector back: it may free the graphs of an earlier engine, which ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StepGraphs:
    """CUDA graphs of a model's steps, which share one pool of device memory.

    A graph reads the tensors of its step, so it serves any branches, pages and plans. Its last rows may stand for no
    token.

    Args:
        step: The step; it has room for `buckets[-1]` rows.
        model: Computes logits `[rows kept, vocabulary]` of the rows that its second argument lists.
        buckets: The numbers of rows to capture graphs for, in ascending order.
        most_kept: The most rows whose logits a step is asked for; by default all of them.
        needed: Whether it is an error if the model cannot be captured. If not, there are no graphs then.
        capture: Captures a call.

    Attributes:
        buckets: See above; none where the model turned out not to be captured.
    """

    def __init__(
        self,
        step: Step,
        model: Model,
        buckets: list[int],
        most_kept: int | None = None,
        needed: bool = True,
        capture: Capture = cuda_capture,
    ) -> None:
        self.step, self.buckets = step, buckets
        self._model, self._capture, self._keeps_all, self._needed = model, capture, most_kept is None, needed
        most = buckets[-1] if most_kept is None else min(most_kept, buckets[-1])
        self._keep = torch.arange(most, device=step.pool.device)
        on_gpu = step.pool.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self._graphs: dict[int, tuple[Callable[[], None], torch.Tensor]] = {}

    def __len__(self) -> int:
        """The number of graphs."""
        return len(self._graphs)

    def rows_for(self, rows: int) -> int | None:
        """Returns the rows of the smallest graph with this many rows, or None where there is none."""
        return next((bucket for bucket in self.buckets if bucket >= rows), None)

    def capture_all(self, begin: Callable[[int], object]) -> None:
        """Captures all graphs, the largest first: smaller ones reuse its memory.

        Args:
            begin: Begins a step of this many rows.
        """
        for rows in reversed(self.buckets):
            if self.buckets:
                begin(rows)
                self.compute([0])

    def compute(self, kept: list[int]) -> torch.Tensor:
        """Computes the step; returns logits `[rows kept, vocabulary]` of these rows, valid until the next call.

        The first step with its number of rows runs without a graph, and is captured after that.
        """
        if self._keeps_all:
            return chosen_rows(self._computed(), kept)
        self._keep.copy_(torch.tensor(kept + [0] * (len(self._keep) - len(kept))), non_blocking=True)
        return self._computed()[: len(kept)]

    def _computed(self) -> torch.Tensor:
        rows = self.step.rows
        if rows not in self._graphs:
            logits = self._run()
            try:
                self._graphs[rows] = self._capture(self._run, self._pool)
            except BackendError:
                if self._needed:
                    raise
                self.buckets = []
            return logits
        replay, logits = self._graphs[rows]
        replay()
        return logits

    def _run(self) -> torch.Tensor:
        return self.step.compute(self._model, self._keep[: self.step.rows])


def chosen_rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Returns these rows of logits, without waiting for the device; those from the first one on without a copy."""
    count = len(rows)
    if rows == list(range(count)):
        return logits[:count]
    return logits[torch.tensor(rows).to(logits.device, non_blocking=True)]
