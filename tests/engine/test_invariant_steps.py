"""deterministic=True: the bits of a branch's attention depend on its own tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support.replayed_steps import replaying
from treegen import Shape
from treegen.engine import AttentionKind, Engine, Frontier, Growth, NGrams, Sample, Sampling, Speculate, Step
from treegen.ir.errors import InputError
from treegen.strategies import query

SHAPE = Shape(4, 2, 16, dtype="fp32")
SAMPLING = Sampling(1.0, seed=4)
PROMPT = [number * 7 % 61 for number in range(150)]
OTHERS = [PROMPT[:140] + [5] * 30, PROMPT[:64], [9, 3], [8] * 90]


class RowByRow:
    """A model in which nothing but attention sees several rows at a time. Logits are what the last layer gives."""

    shape, layers, max_tokens, vocabulary, device = SHAPE, 2, 256, 64, torch.device("cpu")

    def __init__(self, window: int = -1) -> None:
        source = torch.Generator().manual_seed(0)
        self.ids = torch.randn(64, 64, generator=source)
        self.positions = torch.randn(256, 64, generator=source)
        self.kinds = [AttentionKind(0.5), AttentionKind(0.5, window)]

    def __call__(self, step: Step, keep: torch.Tensor) -> torch.Tensor:
        rows = step.rows
        hidden = self.ids[step.ids[:rows]] + self.positions[step.positions[:rows]]
        for layer, kind in enumerate(self.kinds):
            keys, values = hidden.view(rows, 2, 2, 16).unbind(1)
            hidden = hidden + step.attend(layer, kind, hidden.view(rows, 4, 16), keys, values).flatten(1)
        return hidden[keep]


class Noted(Sample):
    """Keeps logits by label and position."""

    seen: dict[tuple[int, ...], torch.Tensor]

    def decide(self, frontier: Frontier) -> Growth:
        for branch, row in zip(frontier.branches, frontier.logits, strict=True):
            self.seen[(*branch.label, len(branch.tokens))] = row.clone()
        return super().decide(frontier)

    def selects(self, branches: Sequence[Any]) -> bool:
        return False


class NotedDrafts(Speculate):
    """Keeps the logits after tokens that are no drafts."""

    seen: dict[tuple[int, ...], torch.Tensor]

    def decide(self, frontier: Frontier) -> Growth:
        begin = 0
        for branch in frontier.branches:
            self.seen[(*branch.label, len(branch.tokens) - branch.drafts)] = frontier.logits[begin].clone()
            begin += 1 + branch.drafts
        return super().decide(frontier)


def logits_of(
    prompts: Sequence[list[int]],
    controller: type[Any] = Noted,
    model: RowByRow | None = None,
    replays: bool = False,
    **options: Any,
) -> dict[tuple[int, ...], torch.Tensor]:
    """The logits of the branches of the first prompt."""
    own = {"drafter": NGrams(), "max_draft": 3} if controller is NotedDrafts else {}
    made = controller(n=2, sampling=SAMPLING, max_new_tokens=12, **own)
    object.__setattr__(made, "seen", {})
    sizes = {"num_pages": 120, "max_branches": 12, "max_rows": 200, "page_size": 16}
    engine = Engine(model or RowByRow(), made, **{**sizes, **options})
    if replays:
        replaying(engine)
    engine.run(prompts)
    if options.get("num_pages"):
        assert engine.accounting.preempted
    return {label: row for label, row in made.seen.items() if label[0] == 0}


def same(one: dict[tuple[int, ...], torch.Tensor], other: dict[tuple[int, ...], torch.Tensor]) -> bool:
    assert len(one) == len(other) == 1 + 2 * 11
    return all(torch.equal(other[label].view(torch.int32), row.view(torch.int32)) for label, row in one.items())


@pytest.mark.parametrize("window", [-1, 20])
def test_bits_do_not_depend_on_neighbours(window: int) -> None:
    model = RowByRow(window)
    alone = logits_of([PROMPT], model=model, deterministic=True)
    for prompts, options in (
        ([PROMPT, *OTHERS], {}),
        ([PROMPT, *OTHERS], {"max_rows": 37, "prefix_cache": False}),
        ([PROMPT, *OTHERS, *OTHERS], {"num_pages": 22}),
        ([PROMPT, *OTHERS], {"replays": True}),
    ):
        assert same(alone, logits_of(prompts, model=model, deterministic=True, **options))
    assert not same(logits_of([PROMPT], model=model), logits_of([PROMPT, *OTHERS], model=model, max_rows=37))


def test_bits_with_drafts() -> None:
    """Rows with drafts have the bits of those without, as far as they are asked for."""
    alone = logits_of([PROMPT], deterministic=True)
    for prompts in ([PROMPT], [PROMPT, *OTHERS]):
        drafted = logits_of(prompts, NotedDrafts, deterministic=True)
        assert len(drafted) > 5
        assert all(torch.equal(row, alone[label]) for label, row in drafted.items())


def test_what_is_refused_with_it() -> None:
    for options, text in (
        ({"deterministic": 1}, "deterministic = 1: is not a bool"),
        ({"deterministic": True, "strategy": "query"}, "strategy = query: chooses other kernels"),
        ({"deterministic": True, "strategy": query()}, "chooses other kernels than the batch-invariant ones"),
        ({"deterministic": True, "make_kernel": lambda *_: None}, "make_kernel = function: chooses other kernels"),
    ):
        with pytest.raises(InputError, match=text):
            logits_of([PROMPT], **options)  # type: ignore[arg-type]
