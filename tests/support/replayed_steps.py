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
        rows = step.rows

        def replay() -> None:
            assert step.rows == rows
            filled.copy_(call())

        return replay, filled


def replaying(engine: Engine) -> Replayed:
    """Lets an engine replay its steps; returns what counts captures."""
    forward, capture = engine.forward, Replayed()
    buckets = row_buckets(forward.decoding.max_rows)
    forward.graphs = StepGraphs(forward.decoding, engine.model, buckets, capture=capture)
    most = forward.step.max_rows
    of_prompts = sorted({rows for rows in (8, 16, 40, 100, most) if rows <= most})
    forward.prompt_graphs = StepGraphs(forward.step, engine.model, of_prompts, buckets[-1], capture=capture)
    return capture
