"""Whole decodings with a model: the same tree of sequences by each provider of attention, in the same engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treegen.bench.decoding_kernels import flashinfer_kernel, no_kernel
from treegen.bench.providers import UnavailableError
from treegen.engine.accounting import PARTS
from treegen.engine.attention_kernels import KernelMaker
from treegen.engine.control import Frontier, Growth
from treegen.engine.engine import Engine
from treegen.engine.forced import Forced
from treegen.engine.forward import Model
from treegen.ir.tree import Tree

_WARM_TOKENS = 4
"""Tokens of each node below the root in the run before the measured one."""
_PROVIDERS: dict[str, KernelMaker] = {"flashinfer": flashinfer_kernel, "none": no_kernel}
"""Providers beside treegen's strategies: FlashInfer's decode, and none, which leaves attention out."""


@dataclass(frozen=True, slots=True)
class DecodingSettings:
    """How decodings are run.

    Args:
        page_size: Tokens of a page.
        max_rows: The most tokens of a step.
        seed: Decides the tokens.
        cuda_graphs: As in `Engine`.
    """

    page_size: int = 16
    max_rows: int = 512
    seed: int = 0
    cuda_graphs: bool | None = None


@dataclass(frozen=True, slots=True)
class DecodingOutcome:
    """A provider on a decoding.

    Args:
        provider: Its name.
        detail: Why it was not run; empty if it was.
        tokens: The tokens after the prompt that the branches have at the end, shared ones for each.
        seconds: Of the whole run.
        decoding_seconds: From the first decision of the controller on, without the prompt.
        decoding_steps: Steps of the model in that time.
        parts: Seconds by PARTS. On a GPU all but `model` are the host's; a captured step's attention is in `model`.
        held_bytes: The most bytes of KV that were held at a time.
        unshared_bytes: The same if each branch held its own.
    """

    provider: str
    detail: str = ""
    tokens: int = 0
    seconds: float = 0.0
    decoding_seconds: float = 0.0
    decoding_steps: int = 0
    parts: tuple[float, ...] = ()
    held_bytes: int = 0
    unshared_bytes: int = 0

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step without chunks of the prompt."""
        return 1e3 * self.decoding_seconds / max(1, self.decoding_steps)

    @property
    def host_us(self) -> float:
        """Microseconds of a step for pages, plans and the controller."""
        return 1e6 * sum(self.parts[PARTS.index(part)] for part in ("pages", "control")) / max(1, self.decoding_steps)


class _Clocked:
    """A controller that notes when it is first asked, and what the engine had done until then."""

    def __init__(self, controller: Forced, engine: Engine) -> None:
        self.width, self.max_new_tokens, self.together = (
            controller.width, controller.max_new_tokens, controller.together
        )  # fmt: skip
        self._controller, self._engine = controller, engine
        self.began, self.steps = 0.0, 0

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        if not self.began:
            synchronize(self._engine)
            self.began, self.steps = time.perf_counter(), self._engine.accounting.steps
            self._engine.accounting.seconds.update(dict.fromkeys(PARTS, 0.0))
        return self._controller.decide(frontier)


def synchronize(engine: Engine) -> None:
    """Waits for the engine's device."""
    if engine.pool.device.type == "cuda":
        torch.cuda.synchronize(engine.pool.device)


def run_decoding(
    model: Model, tree: Tree, vocabulary: int, provider: str, settings: DecodingSettings
) -> DecodingOutcome:
    """Replays a tree with a provider, after a run with fewer tokens that compiles and captures.

    Args:
        model: The model.
        tree: The tree of the branches, as `Forced` takes it.
        vocabulary: The number of different tokens.
        provider: `flashinfer`, `none`, or a strategy of treegen.
        settings: How to run it.

    Raises:
        TreegenError: The tree, the provider or a setting does not fit.
    """
    forced = Forced(tree, vocabulary, settings.seed)
    branches = forced.width * len(forced.prompts)
    pages = sum(-(-int(count) // settings.page_size) + 1 for count in tree.tokens.tolist()) + branches
    engine = Engine(
        model, forced, num_pages=pages, page_size=settings.page_size, max_branches=max(2, branches),
        max_rows=max(settings.max_rows, branches), strategy="auto" if provider in _PROVIDERS else provider,
        make_kernel=_PROVIDERS.get(provider), prefix_cache=False, cuda_graphs=settings.cuda_graphs,
    )  # fmt: skip
    if engine.forward.graphs is None and model.device.type == "cuda":
        engine.accounting.device = model.device
    try:
        if model.device.type == "cuda":
            engine.warm_up()
            engine.controller = warm = Forced(_shorter(tree), vocabulary, settings.seed)
            engine.run(warm.prompts)
        engine.controller = clocked = _Clocked(forced, engine)
        before = engine.accounting.steps
        synchronize(engine)
        begin = time.perf_counter()
        results = engine.run(forced.prompts)
        synchronize(engine)
    except UnavailableError as cause:
        return DecodingOutcome(provider, str(cause))
    end, known = time.perf_counter(), engine.accounting
    of_page = engine.pool.page_size * engine.pool.shape.kv_token_bytes * engine.pool.layers
    assert clocked.steps >= before
    return DecodingOutcome(
        provider,
        tokens=sum(len(found.tokens) for own in results for found in own),
        seconds=end - begin,
        decoding_seconds=end - clocked.began,
        decoding_steps=known.steps - clocked.steps,
        parts=tuple(known.seconds[part] for part in PARTS),
        held_bytes=known.most_pages * of_page,
        unshared_bytes=known.most_unshared * of_page,
    )


def decoding_table(outcomes: Sequence[DecodingOutcome]) -> list[list[str]]:
    """Returns lines for print_table: titles, and one for each outcome that ran."""
    bound = next((found for found in outcomes if found.provider == "none" and not found.detail), None)
    titles = ["provider", "ms a token", "ms a step", *_TITLES, "steps", "KV held", "unshared"]
    lines = [titles if bound is None else [*titles, "over none"]]
    for found in outcomes:
        if found.detail:
            continue
        total = sum(found.parts)
        shares = [f"{part / total:.0%}" for part in found.parts]
        line = [found.provider, f"{found.seconds / found.tokens * 1e3:.3f}", f"{found.step_ms:.3f}", *shares]
        line += [str(found.decoding_steps), f"{found.held_bytes / 1e6:.1f} MB", f"{found.unshared_bytes / 1e6:.1f} MB"]
        lines.append(line if bound is None else [*line, f"{found.seconds / bound.seconds:.2f}x"])
    return lines


_TITLES = ("attention", "rest of the model", "pages and plans", "control")


def _shorter(tree: Tree) -> Tree:
    """Returns the tree with fewer tokens below its root."""
    tokens = np.where(tree.parent < 0, tree.tokens, np.minimum(tree.tokens, _WARM_TOKENS))
    return Tree.from_parents(tree.parent.tolist(), tokens.tolist())
