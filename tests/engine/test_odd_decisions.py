"""What controllers and models may give that no engine can follow: one line says so, and the next run works."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.tiny_models import PROMPTS, generated, tiny
from treegen.engine import Beam, Engine, NGrams, Sample, Sampling, Speculate, Step
from treegen.engine.control import Controller
from treegen.integrations import HFModel
from treegen.ir.errors import TreegenError


def engine(controller: Controller, model: Any = None, **options: Any) -> Engine:
    model = HFModel(tiny()) if model is None else model
    return Engine(model, controller, **{"num_pages": 60, "page_size": 4, "max_branches": 9, **options})


def refused(made: Engine, text: str, prompts: Any = PROMPTS) -> None:
    """The run ends with this error, in one line; the engine then serves other prompts, with the right tokens."""
    with pytest.raises(TreegenError, match=text) as found:
        made.run(prompts)
    assert "\n" not in str(found.value)
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages
    made.controller = Sample(max_new_tokens=3)
    tokens = [[own.tokens for own in each] for each in made.run(PROMPTS)]
    assert tokens == [generated(tiny(), prompt, max_new_tokens=3) for prompt in PROMPTS]


class Spoilt(HFModel):
    """A model with a row of logits that has one number of this value, or this value alone, in one call."""

    at, called, value = 1, 0, float("nan")

    def __call__(self, step: Step, keep: torch.Tensor) -> torch.Tensor:
        self.called += 1
        logits = super().__call__(step, keep)
        if self.called == self.at:
            logits[-1, 7 if self.value != self.value else slice(None)] = self.value
        return logits


NO_TOKEN = r"select\(\) = 97: is not one of the tokens 0\.\.96; return one of these; `Sampling` gives this number where"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(
    ("make", "first", "later"),
    [(lambda: Sample(max_new_tokens=6), r"logits\[\d\] = NaN or -inf: gives tokens no probabilities", NO_TOKEN),
     (lambda: Speculate(NGrams(), max_new_tokens=6), r"logits\[\d\] = NaN or -inf: gives tokens no prob", NO_TOKEN),
     (lambda: Beam(2, 6), "logits = NaN or -inf: give beams no scores; look for NaN", "logits = NaN or -inf")],
    ids=["sample", "speculate", "beam"],
)  # fmt: skip
def test_logits_without_a_most_likely_token(make: Any, first: str, later: str, value: float) -> None:
    for at, text in ((1, first), (3, later)):
        model = Spoilt(tiny())
        model.at, model.value = at, value
        refused(engine(make(), model), text)


def test_the_first_of_equally_likely_tokens_is_taken() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = logits[1, 4] = 1.0
    logits[2, 3] = torch.inf
    assert Sampling().draw(logits, [(0,)] * 3, [1] * 3) == [0, 2, 3]
