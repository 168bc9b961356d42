"""Host time of decoding steps, besides the model and attention: pages, tables, plans and the controller.

    python benchmarks/engine_host_time.py [--tokens 8000]
    python benchmarks/engine_host_time.py --profile beams    # the functions that take longest
    python benchmarks/engine_host_time.py --prompts 512      # only prompts: milliseconds of a step

64 query rows decode over prompts of 1,000 tokens, in pages of 16. A stand-in for a model looks up its logits, over a
vocabulary of 1,000, by the tokens of a step alone. Kernels plan as always, and compute nothing. Times are CPU time in
microseconds, medians of a run's steps. `step` is from the end of a model call to the beginning of the next one; without
a GPU that includes the operations on logits. `critical` begins when the host has read the tokens of the step, so it is
what a device waits for where steps do not run ahead. All of these do.

`--prompts 512` computes 512 prompts in steps of 2,048 tokens. They have all tokens but 100 in common.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
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
VOCABULARY, TOKENS, RUNS = 1000, 65, 3
DRAWN = {"sampling": Sampling(1.0, seed=1), "max_new_tokens": TOKENS}


def variety(prompt: list[int], candidates: list[list[int]]) -> list[int]:
    """Rates candidates by their different tokens."""
    return [len(set(tokens)) for tokens in candidates]


CASES: dict[str, tuple[Controller, int]] = {
    "greedy": (Sample(8, max_new_tokens=TOKENS), 8),
    "samples": (Sample(8, **DRAWN), 8),
    "nucleus": (Sample(8, Sampling(1.0, top_p=0.95, seed=1), TOKENS), 8),
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
        self.device_tables = self.device_lengths = True

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

    shape, layers, vocabulary, device = treegen.Shape(32, 8, 128, dtype="fp16"), 1, VOCABULARY, DEVICE

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.gaps: list[tuple[float, float]] = []
        self.took = 0.0  # seconds of all calls
        self._logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        self._q = torch.zeros(1, 32, 128, dtype=torch.float16, device=DEVICE)
        self._ended = self.read = time.thread_time()

    def __call__(self, step: Step, keep: torch.Tensor) -> torch.Tensor:
        """See Model."""
        begin = time.thread_time()
        self.gaps.append((1e6 * (begin - self._ended), 1e6 * (begin - self.read)))
        if step.max_new == step.max_rows:  # a step with chunks of prompts
            self.gaps.clear()
        rows = step.rows
        q = self._q.expand(rows, -1, -1)
        step.attend(0, KIND, q, q[:, :8], q[:, :8])
        logits = self._logits[step.ids[:rows][keep]]
        self._ended = time.thread_time()
        self.took += self._ended - begin
        return logits


def engine_of(model: LookUp, controller: Controller, branches: int = 64, rows: int = 8192) -> Engine:
    """Makes the engine of a case. Its steps of prompts compute nothing either."""
    pages = 64 * -(-model.max_tokens // 16)
    engine = Engine(
        model, controller, num_pages=pages, max_branches=branches, max_rows=rows, cuda_graphs=False,
        make_kernel=planning,
    )  # fmt: skip
    forward = engine.forward
    forward.step = Step(
        engine.sequences, forward.sizes.max_tokens, forward.sizes.max_rows, max_tree=forward.sizes.max_tree,
        make_kernel=planning,
    )  # fmt: skip
    return engine


def gaps_of(name: str, tokens: int) -> list[tuple[float, float]]:
    """Runs a case with prompts of `tokens` tokens; returns microseconds of steps, and those after tokens were read."""
    controller, prompts = CASES[name]
    model = LookUp(tokens + 2 * TOKENS)
    engine = engine_of(model, controller)
    source = torch.Generator().manual_seed(1)
    texts = torch.randint(VOCABULARY, (prompts, tokens), generator=source).tolist()
    gaps = []
    for run in range(RUNS):
        with noting_reads(model):
            engine.run(texts)
        gaps += model.gaps[1:] if run else []
    return gaps


def prompts_ms(prompts: int, tokens: int) -> tuple[float, int]:
    """Computes prompts; returns the milliseconds of a step that the host takes beside the model, and the steps."""
    model = LookUp(tokens + 2)
    engine = engine_of(model, Sample(1, max_new_tokens=1), prompts, max(2048, prompts))
    source = torch.Generator().manual_seed(1)
    begin = torch.randint(VOCABULARY, (tokens - 100,), generator=source).tolist()
    texts = [begin + torch.randint(VOCABULARY, (100,), generator=source).tolist() for _ in range(prompts)]
    started, model.took = time.thread_time(), 0.0
    engine.run(texts)
    return 1e3 * (time.thread_time() - started - model.took) / engine.accounting.steps, engine.accounting.steps


@contextmanager
def noting_reads(model: LookUp) -> Iterator[None]:
    """Lets the model know when the host has read a tensor of tokens."""
    reads = {name: getattr(torch.Tensor, name) for name in ("tolist", "cpu")}

    def noting(read: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def noted(tensor: torch.Tensor) -> Any:
            values = read(tensor)
            model.read = time.thread_time()
            return values

        return noted

    for name, read in reads.items():
        setattr(torch.Tensor, name, noting(read))
    try:
        yield
    finally:
        for name, read in reads.items():
            setattr(torch.Tensor, name, read)


def main() -> None:
    """Prints a line per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", choices=CASES, help="profile this case")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--prompts", type=int, help="only compute this number of prompts that begin alike")
    chosen = parser.parse_args()
    if chosen.prompts:
        took, steps = prompts_ms(chosen.prompts, chosen.tokens)
        print(f"{chosen.prompts} prompts of {chosen.tokens} tokens: {took:.1f} ms a step, {steps} steps")
        return
    if chosen.profile:
        profile = cProfile.Profile()
        profile.runcall(gaps_of, chosen.profile, chosen.tokens)
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        return
    for name in CASES:
        step, critical = (statistics.median(gaps) for gaps in zip(*gaps_of(name, chosen.tokens), strict=True))
        print(f"{name:16} step {step:6.0f}, critical {critical:6.0f}", flush=True)


if __name__ == "__main__":
    main()
