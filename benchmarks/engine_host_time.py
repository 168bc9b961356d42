"""Host time of decoding steps, besides the model and attention: pages, tables, plans and the controller.

    python benchmarks/engine_host_time.py
    python benchmarks/engine_host_time.py --profile beams    # the functions that take longest

64 query rows decode over prompts of 1,000 tokens, in pages of 16. A stand-in for a model looks up its logits, over a
vocabulary of 1,000, by the tokens of a step alone. Kernels plan as always, and compute nothing. Times are CPU time in
microseconds, medians of a run's steps. `step` is from the end of a model call to the beginning of the next one; without
a GPU that includes the operations on logits. `critical` begins when the host has read the tokens of the step, so it is
what a device waits for. Samples run ahead, so no device waits for them.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import treegen
from treegen.engine import (
    AttentionKind,
    Beam,
    Engine,
    NGrams,
    Sample,
    Sampling,
    Search,
    Speculate,
    Step,
    StepKernel,
    tree_kernels,
)
from treegen.engine.control import Controller

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KIND = AttentionKind(128**-0.5)
VOCABULARY, PROMPT, TOKENS, RUNS = 1000, 1000, 65, 3
DRAWN = {"sampling": Sampling(1.0, seed=1), "max_new_tokens": TOKENS}


def variety(prompt: list[int], candidates: list[list[int]]) -> list[int]:
    """Rates candidates by their different tokens."""
    return [len(set(tokens)) for tokens in candidates]


CASES: dict[str, tuple[Controller, int]] = {
    "samples": (Sample(8, **DRAWN), 8),
    "beams": (Beam(8, TOKENS), 8),
    "one beam search": (Beam(64, TOKENS), 1),
    "thoughts": (Search(variety, width=2, branching=4, thought_tokens=13, depth=5, sampling=DRAWN["sampling"]), 8),
    "chains": (Speculate(NGrams(), 3, 2, **DRAWN), 8),
    "trees": (Speculate(NGrams(2, occurrences=2), 7, 1, **DRAWN), 8),
}
"""The controller and the number of prompts."""


class Planning:
    """A kernel that plans, and computes nothing."""

    def __init__(self, kernel: StepKernel) -> None:
        self._kernel = kernel
        self.prepare, self.refresh = kernel.prepare, kernel.refresh

    @property
    def rows(self) -> int:
        """See StepKernel."""
        return self._kernel.rows

    def step(self) -> None:
        """Does nothing."""

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, out: torch.Tensor) -> None:
        """Does nothing."""


def planning(step: Step, kind: AttentionKind, sinks: torch.Tensor | None) -> StepKernel:
    """Makes such a kernel."""
    made = tree_kernels()(step, kind, sinks)
    assert made is not None
    return Planning(made)


class LookUp:
    """The stand-in for a model. Notes the time between two calls, and that after the tokens are read."""

    shape, layers, max_tokens, vocabulary, device = treegen.Shape(32, 8, 128, dtype="fp16"), 1, 4096, VOCABULARY, DEVICE

    def __init__(self) -> None:
        self.gaps: list[tuple[float, float]] = []
        self._logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        self._q = torch.zeros(8192, 32, 128, dtype=torch.float16, device=DEVICE)
        self._ended = self.read = time.thread_time()

    def __call__(self, step: Step, keep: torch.Tensor) -> torch.Tensor:
        """See Model."""
        begin = time.thread_time()
        self.gaps.append((1e6 * (begin - self._ended), 1e6 * (begin - self.read)))
        rows = step.rows
        step.attend(0, KIND, self._q[:rows], self._q[:rows, :8], self._q[:rows, :8])
        logits = self._logits[step.ids[:rows][keep]]
        self._ended = time.thread_time()
        return logits


def engine_of(model: LookUp, controller: Controller) -> Engine:
    """Makes the engine of a case. Its steps of prompts compute nothing either."""
    engine = Engine(
        model, controller, num_pages=4096, max_branches=64, max_rows=8192, cuda_graphs=False, make_kernel=planning
    )
    forward = engine.forward
    forward.step = Step(
        engine.sequences, forward.sizes.max_tokens, forward.sizes.max_rows, max_tree=forward.sizes.max_tree,
        make_kernel=planning,
    )  # fmt: skip
    return engine


def gaps_of(name: str) -> list[tuple[float, float]]:
    """Runs a case; returns the microseconds of its steps, and those after the tokens were read."""
    controller, prompts = CASES[name]
    model = LookUp()
    engine = engine_of(model, controller)
    source = torch.Generator().manual_seed(1)
    texts = torch.randint(VOCABULARY, (prompts, PROMPT), generator=source).tolist()
    gaps = []
    for run in range(RUNS):
        begin = len(model.gaps)
        with noting_reads(model):
            engine.run(texts)
        gaps += model.gaps[begin + 2 :] if run else []  # the prompts' step, and the first after it
    return gaps


@contextmanager
def noting_reads(model: LookUp) -> Iterator[None]:
    """Lets the model know when the host has read a tensor of tokens."""
    read = torch.Tensor.tolist

    def noting(tensor: torch.Tensor) -> Any:
        values = read(tensor)
        model.read = time.thread_time()
        return values

    torch.Tensor.tolist = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.tolist = read  # type: ignore[method-assign]


def main() -> None:
    """Prints a line per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", choices=CASES, help="profile this case")
    name = parser.parse_args().profile
    if name:
        profile = cProfile.Profile()
        profile.runcall(gaps_of, name)
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        return
    for name in CASES:
        step, critical = (statistics.median(gaps) for gaps in zip(*gaps_of(name), strict=True))
        print(f"{name:16} step {step:6.0f}, critical {critical:6.0f}", flush=True)


if __name__ == "__main__":
    main()
