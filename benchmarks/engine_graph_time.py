"""Time of decoding steps beyond their CUDA graphs, on a GPU.

    python benchmarks/engine_graph_time.py [--model llama-3-8b] [--tokens 1000]

The cases of `engine_host_time.py`, with a model of random weights: 64 query rows decode over prompts. Times are in
microseconds, medians over the steps of the second run that follow a decoding step. `graph` is from the begin of a
replay to its end, `beyond` from there to the begin of the next one (and its 98th percentile), both by the device's
clock. `host` is the time of the host from one replay to the next, without that in which it waits for tokens to read.
`late`: steps whose replay was launched when the one before had ended already, so that the device waited for the host.
`waits`: calls per step in which PyTorch waits for the device, besides the one that reads tokens.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from engine_host_time import CASES, TOKENS
from treegen.engine import Engine
from treegen.engine.graphs import StepGraphs, cuda_capture
from treegen.engine.host_copy import HostCopy
from treegen.integrations import HFModel
from treegen.integrations.random_models import RANDOM_MODELS, random_model


class Replay(NamedTuple):
    """A replay of a graph. step: the number of the model's step. began, ended: on the device. launched, returned: host
    seconds before and after. late: whether the replay before had ended. waited: host seconds spent until then in reads
    of tokens. waits: other calls until then that waited for the device.
    """

    step: int
    began: torch.cuda.Event
    ended: torch.cuda.Event
    launched: float
    returned: float
    late: bool
    waited: float
    waits: int


class Notes:
    """Notes each replay of an engine's decoding steps."""

    def __init__(self, engine: Engine) -> None:
        self.replays: list[Replay] = []
        self._engine, self._waited, self._warned = engine, 0.0, 0
        graphs = engine.forward.graphs
        assert graphs is not None
        engine.forward.graphs = StepGraphs(graphs.step, engine.model, graphs.buckets, capture=self._capture)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Notes replays within its block."""
        read = HostCopy.read

        def noted(copy: HostCopy) -> torch.Tensor:
            began = time.perf_counter()
            tokens = read(copy)
            self._waited += time.perf_counter() - began
            return tokens

        def counted(message: Any, *others: Any, **named: Any) -> None:
            self._warned += "synchronizing" in str(message)

        self.replays.clear()
        with warnings.catch_warnings(), patch.object(HostCopy, "read", noted), patch("warnings.showwarning", counted):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()

    def _capture(self, call: Callable[[], torch.Tensor], pool: Any) -> tuple[Callable[[], None], torch.Tensor]:
        replay, result = cuda_capture(call, pool)

        def noted() -> None:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            launched = time.perf_counter()
            late = bool(self.replays) and self.replays[-1].ended.query()
            began.record()
            replay()
            ended.record()
            steps, waited = self._engine.accounting.steps, self._waited
            self.replays.append(Replay(steps, began, ended, launched, time.perf_counter(), late, waited, self._warned))

        return noted, result


def line_of(name: str, model: HFModel, tokens: int) -> str:
    """Runs a case with prompts of `tokens` tokens; returns its line."""
    controller, prompts = CASES[name]
    engine = Engine(model, controller, num_pages=64 * -(-(tokens + 2 * TOKENS) // 16), max_branches=64)
    notes = Notes(engine)
    engine.warm_up()
    source = torch.Generator().manual_seed(1)
    texts = torch.randint(model.vocabulary, (prompts, tokens), generator=source).tolist()
    engine.run(texts)
    with notes.taken():
        engine.run(texts)
    pairs = [(a, b) for a, b in zip(notes.replays, notes.replays[1:], strict=False) if b.step == a.step + 1]
    graph = np.median([1e3 * each.began.elapsed_time(each.ended) for each, _ in pairs])
    beyond = [1e3 * each.ended.elapsed_time(after.began) for each, after in pairs]
    host = np.median([1e6 * (b.launched - a.returned - b.waited + a.waited) for a, b in pairs])
    late, waits = sum(b.late for _, b in pairs), np.mean([b.waits - a.waits for a, b in pairs])
    return (
        f"{name:16} {len(pairs):4} steps: graph {graph:6.0f}, beyond {np.median(beyond):5.0f} "
        f"({np.quantile(beyond, 0.98):5.0f}), host {host:5.0f}, late {late}, waits {waits:.2f}"
    )


def main() -> None:
    """Prints a line per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=RANDOM_MODELS, default="llama-3-8b", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a prompt (default: %(default)s)")
    chosen = parser.parse_args()
    model = HFModel(random_model(chosen.model, chosen.tokens + 2 * TOKENS, "cuda"))
    for name in CASES:
        print(line_of(name, model, chosen.tokens), flush=True)


if __name__ == "__main__":
    main()
