"""Captures of steps as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from treegen.engine.graphs import cuda_capture
from treegen.ir.errors import BackendError


class Graph:
    """What stands in for a CUDA graph."""

    def replay(self) -> None:
        """Does nothing."""


@contextmanager
def capturing(graph: Graph, pool: object) -> Iterator[None]:
    """What stands in for a capture, in which nothing may be freed on the device."""
    yield


def test_garbage_is_not_collected_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold the graphs of an earlier engine."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    collecting = []

    def call() -> torch.Tensor:
        collecting.append(gc.isenabled())
        return torch.ones(1)

    def failing() -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    assert gc.isenabled()
    cuda_capture(call, None)
    with pytest.raises(BackendError, match="cannot be captured"):
        cuda_capture(failing, None)
    assert collecting == [False]
    assert gc.isenabled()
