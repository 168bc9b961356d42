"""What controllers and models may give that no engine can follow: one line says so, and the next run works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from support.refused_runs import engine, refused
from support.tiny_models import PROMPTS, tiny
from treegen.engine import (
    Beam,
    Branch,
    Continuation,
    DraftTree,
    Engine,
    Frontier,
    Growth,
    Next,
    NGrams,
    Sample,
    Sampling,
    Selection,
    Speculate,
    Step,
)
from treegen.integrations import HFModel


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


class Shaped(HFModel):
    """A model that returns something made of its logits in one call."""

    at, called = 2, 0
    change: Callable[[torch.Tensor], Any]

    def __call__(self, step: Step, keep: torch.Tensor) -> Any:
        self.called += 1
        logits = super().__call__(step, keep)
        return self.change(logits) if self.called == self.at else logits


@pytest.mark.parametrize(
    ("change", "found"),
    [(lambda logits: None, "NoneType"), (lambda logits: (logits,), "tuple"),
     (lambda logits: logits[:, :-1], r"logits of shape \(3, 96\)"), (lambda logits: logits.T, r"logits of shape \(97,"),
     (lambda logits: logits.repeat(1, 2), r"logits of shape \(3, 194\)"),
     (lambda logits: logits[None], r"logits of shape \(1, 3, 97\)")],
)  # fmt: skip
def test_logits_of_another_shape(change: Callable[[torch.Tensor], Any], found: str) -> None:
    model = Shaped(tiny())
    model.change = change
    text = f"^model = {found}.*: has not a row for each of 3, with a number for each of 97 tokens; return logits"
    refused(engine(Sample(max_new_tokens=4), model), text)


def test_the_first_of_equally_likely_tokens_is_taken() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = logits[1, 4] = 1.0
    logits[2, 3] = torch.inf
    assert Sampling().draw(logits, [(0,)] * 3, [1] * 3) == [0, 2, 3]


class Ends:
    """Ends the prompts one after another, with the results that it is told."""

    together, width, max_new_tokens = False, 2, 8

    def __init__(self, ended: Callable[[Branch], list[Continuation]]) -> None:
        self.ended = ended

    def decide(self, frontier: Frontier) -> Growth:
        grown, results = {}, []
        for branch in frontier.branches:
            ends = len(branch.new_tokens) > branch.label[0]
            grown[branch.number] = [] if ends else [Next(3, branch.label)]
            results += self.ended(branch) if ends else []
        return Growth(grown, results)


class Tells(Ends):
    """Decides for the first branch as it is told, once it has a new token."""

    def __init__(self, decide: Callable[[Branch], Growth]) -> None:
        super().__init__(lambda branch: [])
        self.told = decide

    def decide(self, frontier: Frontier) -> Growth:
        branch = frontier.branches[0]
        if branch.new_tokens:
            growth = self.told(branch)
            others = {each.number: [Next(3, each.label)] for each in frontier.branches[1:]}
            return growth._replace(grown={**others, **growth.grown})
        return super().decide(frontier)


@pytest.mark.parametrize("tokens", [torch.tensor, np.array])
def test_results_with_equal_labels_may_have_tensors_and_arrays(tokens: Callable[[list[int]], Any]) -> None:
    """They stay as they ended; the label 0 comes before 1."""

    def ended(branch: Branch) -> list[Continuation]:
        labels = [(*branch.label, 1), (*branch.label, 0), (*branch.label, 0)]
        return [Continuation(label, tokens([place, 5])) for place, label in enumerate(labels)]

    found = engine(Ends(ended)).run(PROMPTS)
    assert [[own.tokens[0] for own in each] for each in found] == [[1, 2, 0]] * 3


@pytest.mark.parametrize("label", [("x",), (0, "a"), (0.5,), (0.0,), (False,), (np.zeros(2),)], ids=str)
def test_labels_are_integers(label: Any) -> None:
    refused(
        engine(Ends(lambda branch: [Continuation(label, [1])])), r"decide\(\) = .*: is the label of a result, and no"
    )
    refused(engine(Tells(lambda branch: Growth({branch.number: [Next(3, label)]}, []))), "is no label of integers that")


def test_labels_may_have_numpys_integers() -> None:
    made = engine(Ends(lambda branch: [Continuation((*branch.label, np.int64(place)), [place]) for place in (1, 0)]))
    assert made.run(PROMPTS) == [[((number, 0), [0], 0.0), ((number, 1), [1], 0.0)] for number in range(3)]


@pytest.mark.parametrize(
    ("decide", "text"),
    [(lambda branch: Growth({branch.number: [], "a": [], 99: []}, []), r"decide\(\) = \[99, 'a'\]: .* no decision"),
     (lambda branch: Growth({branch.number: []}, [], {}, [[0]]), r"decide\(\)\.resting = \[\[0\]\]: are no numbers"),
     (lambda branch: Growth({branch.number: []}, [], {}, {"a"}), r"decide\(\)\.resting = \{'a'\}: are no numbers"),
     (lambda branch: Growth({branch.number: []}, [], {}, {7, 8}), r"resting = \[7, 8\]: is not in the frontier"),
     (lambda branch: Growth({branch.number: []}, [], {99: [0], "a": []}), r"accepted = \[99, 'a'\]: is not in the fr"),
     (lambda branch: Growth({branch.number: []}, [], {branch.number: [0]}), "accepted = 0: should keep 1 drafts, and")],
)  # fmt: skip
def test_decisions_about_what_is_not_there(decide: Callable[[Branch], Growth], text: str) -> None:
    refused(engine(Tells(decide)), text)


class Accepts(Tells):
    """Accepts what it is told of its drafts."""

    max_draft, draft_trees = 2, False

    def draft(self, branches: Sequence[Branch]) -> list[DraftTree]:
        return [DraftTree.chain([3, 3])] * len(branches)


def accepting(drafts: Any) -> Engine:
    def told(branch: Branch) -> Growth:
        return Growth({branch.number: []}, [Continuation(branch.label, branch.new_tokens)], {branch.number: drafts})

    return engine(Accepts(told))


@pytest.mark.parametrize(
    "drafts", [None, 3, "ab", {0}, np.array(0), [0.0], ["a"], [True], [[0]], [1], [0, 0, 0]], ids=str
)
def test_drafts_that_cannot_be_accepted(drafts: Any) -> None:
    listed = isinstance(drafts, list)
    text = r"accepted = 0: (has drafts with|should keep 3)" if listed else r"decide\(\)\.accepted\[0\] = .*: is no list"
    refused(accepting(drafts), text, PROMPTS[:1])


@pytest.mark.parametrize("drafts", [[], [0, 1], (0,), range(2), np.array([0, 1])], ids=str)
def test_drafts_that_are_accepted_may_be_any_list(drafts: Any) -> None:
    accepting(drafts).run(PROMPTS[:1])


class Forks(Beam):
    """Selects what it is told."""

    def __init__(self, change: Callable[[Selection], Any]) -> None:
        super().__init__(2, 8)
        self.change = change

    def select_forks(self, frontier: Frontier) -> Any:
        return self.change(super().select_forks(frontier))


@pytest.mark.parametrize("change", [lambda found: found[:1], lambda found: None, lambda found: (*found, 1)])
def test_selections_of_another_form(change: Callable[[Selection], Any]) -> None:
    refused(engine(Forks(change)), r"select_forks\(\) = (tuple|NoneType): is no Selection; return")


def test_a_selection_may_be_one_tensor() -> None:
    expected = [[own.tokens for own in each] for each in engine(Beam(2, 8)).run(PROMPTS)]
    assert [[own.tokens for own in each] for each in engine(Forks(torch.stack)).run(PROMPTS)] == expected
