"""Steps that are replayed as CUDA graphs are, without a GPU."""

from __future__ import annotations

from typing import Any

import torch

from treegen.engine import Engine
from treegen.engine.graphs import StepGraphs, row_buckets


class Replayed:
    """Takes the place of CUDA graphs: a replay runs the model again, and writes into the same tensor."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, call: Any, pool: object) -> tuple[Any, torch.Tensor]:
        self.captured += 1
        step, filled = call.__self__.step, call().clone()

        def replay() -> None:
            assert step.rows == len(filled)
            filled.copy_(call())

        return replay, filled


def replaying(engine: Engine) -> Replayed:
    """Lets an engine replay its decoding steps; returns what counts captures."""
    forward, capture = engine.forward, Replayed()
    buckets = row_buckets(forward.decoding.max_rows)
    forward.graphs = StepGraphs(forward.decoding, engine.model, buckets, capture)
    return capture
