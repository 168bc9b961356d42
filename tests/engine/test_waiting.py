"""Branches that wait for others of their prompt, with drafts: their tokens are those of samples."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest
import torch

from support.tiny_models import tiny
from treegen.engine import DraftTree, Engine, Frontier, Growth, NGrams, Sample, Sampling, Speculate
from treegen.engine.waiting import WaitingBranches
from treegen.integrations import HFModel
from treegen.ir.errors import BranchError

MODEL = tiny(num_hidden_layers=2)
OPTIONS = {"n": 2, "max_new_tokens": 12, "sampling": Sampling(1.0, seed=4)}


class Together(Speculate):
    """Decides about all branches of a prompt at a time."""

    @property
    def together(self) -> bool:
        return True


class InStep(Together):
    """A branch that is more than two tokens ahead of another one rests. All drafts that were right stay."""

    rested: ClassVar[list[int]] = []
    """The numbers of branches that have rested."""

    def decide(self, frontier: Frontier) -> Growth:
        growth = super().decide(frontier)
        lengths = {each.number: len(each.tokens) - each.drafts for each in frontier.branches}
        grown, resting = dict(growth.grown), []
        for branch in frontier.branches:
            going = [each.number for each in frontier.branches if growth.grown[each.number]]
            others = [lengths[each.number] for each in frontier.branches if each.number in going]
            if branch.number in going and lengths[branch.number] > min(others) + 2:
                grown[branch.number] = []
                resting.append(branch.number)
        self.rested.extend(resting)
        return growth._replace(grown=grown, resting=resting)


class OnTheHost:
    """Drafts as `NGrams` does, but for the host alone."""

    trees = False

    def __call__(self, texts: Sequence[Sequence[int]], most: int) -> list[DraftTree]:
        return NGrams(1)(texts, most)


def prompts_of(seed: int, count: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(1, 97) for _ in range(source.randint(1, 25))] * 2 for _ in range(count)]


def tokens(controller: Sample | Speculate, prompts: Sequence[Sequence[int]], **options: int) -> list[list[list[int]]]:
    engine = Engine(HFModel(MODEL), controller, **{"num_pages": 400, "page_size": 4, **options})
    results = engine.run(prompts)
    engine.sequences.check()
    assert engine.pool.free + engine.sequences.available >= engine.pool.num_pages
    return [[each.tokens for each in own] for own in results]


@pytest.mark.parametrize("drafter", [OnTheHost(), NGrams(2), NGrams(2, occurrences=2)], ids=["host", "chain", "tree"])
def test_drafts_wait_with_their_logits(drafter: OnTheHost | NGrams) -> None:
    """Also where prompts are late, because a step has few tokens, and where branches are preempted."""
    for seed in range(3):
        prompts = prompts_of(seed, 3)
        needed = (max(map(len, prompts)) + 20) // 4
        expected = tokens(Sample(**OPTIONS), prompts)
        for pages in (3 * needed, 5 * needed):
            made = Together(drafter, max_draft=3, **OPTIONS)
            assert tokens(made, prompts, num_pages=pages, max_branches=6, max_rows=24) == expected


def test_branches_rest_with_the_logits_of_their_last_draft() -> None:
    InStep.rested.clear()
    for seed in range(4):
        prompts, made = prompts_of(seed, 2), InStep(OnTheHost(), max_draft=4, **OPTIONS)
        assert tokens(made, prompts) == tokens(Sample(**OPTIONS), prompts)
    assert InStep.rested


def test_a_class_that_overrides_decide_is_asked() -> None:
    """Also where its drafter drafts on the device."""
    decided = []

    class Noted(Speculate):
        def decide(self, frontier: Frontier) -> Growth:
            decided.append(len(frontier.branches))
            return super().decide(frontier)

    assert tokens(Noted(NGrams(2), max_draft=3, **OPTIONS), prompts_of(0, 2))
    assert len(decided) > 4


def test_a_branch_cannot_rest_with_drafts_that_are_no_path() -> None:
    class Wrong(InStep):
        def decide(self, frontier: Frontier) -> Growth:
            growth = super().decide(frontier)
            return (
                growth._replace(accepted={number: [1, 0] for number in growth.accepted}) if growth.resting else growth
            )

    with pytest.raises(BranchError, match="accept drafts that follow one another"):
        tokens(Wrong(OnTheHost(), max_draft=4, **OPTIONS), prompts_of(0, 2) + prompts_of(1, 2))


class StoppedHalfway(list[int]):
    """Numbers that can be looked through once; then somebody presses Ctrl-C."""

    looked = False

    def __iter__(self) -> Iterator[int]:
        if self.looked:
            raise KeyboardInterrupt
        self.looked = True
        return super().__iter__()


def test_branches_that_rest_are_forgotten_after_a_stop_in_the_middle() -> None:
    sequences = Engine(HFModel(MODEL), Sample(1), num_pages=9, page_size=4).sequences
    waiting = WaitingBranches(sequences)
    resting = sequences.add([1, 2], (0,))
    waiting.rest([resting], torch.zeros(1, 97))
    numbers = StoppedHalfway([resting.number])
    with pytest.raises(KeyboardInterrupt):
        waiting.forget(numbers)
    waiting.clear()
    sequences.clear()
    going, _ = sequences.add([1, 2], (0,)), sequences.add([3], (1,))
    assert not waiting.are_all_but([going])
