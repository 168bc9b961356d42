"""Captures of steps as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from support.replayed_steps import replaying
from support.tiny_models import PROMPTS, tiny
from treegen.engine import Beam, Engine, NGrams, Sample, Sampling, Speculate
from treegen.engine.graphs import cuda_capture
from treegen.integrations import HFModel
from treegen.ir.errors import BackendError


class Graph:
    """What stands in for a CUDA graph."""

    def replay(self) -> None:
        """Does nothing."""


@contextmanager
def capturing(graph: Graph, pool: object, stream: object) -> Iterator[None]:
    """What stands in for a capture on a stream, in which nothing may be freed on the device."""
    assert stream == "stream 1"
    yield


def test_garbage_is_not_collected_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold the graphs of an earlier engine."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr("treegen.engine.graphs.capture_stream", lambda device: f"stream {device}")
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


def test_engines_launch_on_the_device_of_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton and captures take the current device, which is another one where there are several."""
    within: list[torch.device] = []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        within.append(device)
        yield
        within.pop()

    class Noting(HFModel):
        def __call__(self, *arguments: Any) -> torch.Tensor:
            assert within == [self.device]
            return super().__call__(*arguments)

    monkeypatch.setattr("treegen.engine.engine.on_device", on_device)
    made = Engine(Noting(tiny()), Sample(max_new_tokens=3), num_pages=60, page_size=4)
    replaying(made)
    made.warm_up()
    assert len(made.run(PROMPTS)) == len(PROMPTS)
    assert within == []


def test_warming_up_draws_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no step compiles what does so."""
    drawn = []

    def select(
        sampling: Sampling, logits: torch.Tensor, labels: Sequence[tuple[int, ...]], positions: Sequence[int]
    ) -> torch.Tensor:
        drawn.append((sampling, tuple(logits.shape)))
        return torch.zeros(len(labels), dtype=torch.int64)

    monkeypatch.setattr(Sampling, "select", select)
    sampling, model = Sampling(0.8, top_p=0.9), HFModel(tiny())
    for controller in (Sample(2, sampling), Speculate(NGrams(), 2, sampling=sampling), Beam(2)):
        made = Engine(model, controller, num_pages=60, page_size=4)
        replaying(made)
        made.warm_up()
        assert made.sequences.available == made.pool.num_pages
    assert drawn == [(sampling, (1, model.vocabulary))] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "controller", [Sample(3, Sampling(0.9, 20, 0.95, seed=3), 12), Beam(3, 12)], ids=["samples", "beams"]
)
def test_tokens_are_those_of_the_host_on_every_gpu(controller: Any) -> None:
    def tokens(device: str) -> list[list[list[int]]]:
        made = Engine(HFModel(tiny().to(device)), controller, num_pages=80, page_size=4)
        made.warm_up()
        return [[own.tokens for own in each] for each in made.run(PROMPTS)]

    assert tokens("cuda:0") == tokens("cuda:1") == tokens("cpu")
