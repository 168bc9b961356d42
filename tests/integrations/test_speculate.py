"""Speculative decoding: the tokens of `Sample` whatever the drafts are, in fewer steps where they are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from support.replayed_steps import replaying
from support.tiny_models import NAMES, PROMPTS, VOCABULARY, generated, tiny
from treegen.engine import Engine, NGrams, Sample, Sampling, Speculate
from treegen.engine.control import Controller
from treegen.integrations import HFModel
from treegen.ir.errors import BranchError, InputError


def served(
    model: Any, controller: Controller, pages: int = 60, page_size: int = 4, replays: bool = False
) -> tuple[list[Any], Engine]:
    """The tokens of the results of each prompt; afterwards all pages are free."""
    made = Engine(
        HFModel(model),
        controller,
        num_pages=pages,
        page_size=page_size,
        max_rows=64,
        max_branches=max(6, controller.width),
    )
    if replays:
        replaying(made)
    results = made.run(PROMPTS)
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages
    return [[result.tokens for result in own] for own in results], made


class Told:
    """A drafter that knows what comes, but for every `wrong`-th token."""

    def __init__(self, expected: Sequence[Sequence[int]], wrong: int = 0) -> None:
        self.whole = [[*prompt, *own] for prompt, own in zip(PROMPTS, expected, strict=True)]
        self.wrong = wrong

    def __call__(self, tokens: Sequence[int], most: int) -> list[int]:
        (own,) = (each for each in self.whole if each[: len(tokens)] == list(tokens))
        following = own[len(tokens) : len(tokens) + most]
        places = range(len(tokens), len(tokens) + most)
        return [
            (token + 1) % VOCABULARY if self.wrong and place % self.wrong == 0 else token
            for token, place in zip(following, places, strict=False)
        ]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_generate_whatever_the_drafts_are(name: str) -> None:
    model = tiny(name)
    expected = [generated(model, prompt, max_new_tokens=13) for prompt in PROMPTS]
    first = [own[0] for own in expected]
    steps = []
    for drafter in (Told(first), Told(first, wrong=3), Told(first, wrong=1), NGrams()):
        found, made = served(model, Speculate(drafter, max_draft=4, max_new_tokens=13), replays=len(steps) == 1)
        assert found == expected
        steps.append(made.accounting.steps)
    assert steps[0] < steps[1] < steps[2]
    assert steps[0] <= 5  # prompts, and 12 tokens by five at most


@pytest.mark.parametrize(("pages", "page_size"), [(60, 4), (20, 4), (16, 16), (200, 1)])
def test_samples_are_those_without_drafts(pages: int, page_size: int) -> None:
    """Also with stop ids, with preemption, and where there are no pages for drafts."""
    model, sampling = tiny(), Sampling(0.9, 30, 0.95, seed=3)
    options = {"n": 2, "sampling": sampling, "max_new_tokens": 14, "stop_ids": (7, 31)}
    expected, plain = served(model, Sample(**options), pages, page_size)
    found, made = served(model, Speculate(NGrams(2), 3, **options), pages, page_size)
    assert found == expected
    if pages == 20:
        assert plain.accounting.preempted
        assert made.accounting.preempted


def test_rejected_drafts_leave_no_trace() -> None:
    """A branch whose drafts cross pages, all wrong, keeps the tokens and KV of one without drafts."""
    model = tiny()
    expected = [generated(model, prompt, max_new_tokens=12) for prompt in PROMPTS]
    found, made = served(model, Speculate(lambda tokens, most: [96] * most, 9, max_new_tokens=12), 80, 2)
    assert found == expected
    assert made.accounting.rows > 2 * sum(map(len, PROMPTS))


def test_n_grams_give_what_followed_last_time() -> None:
    assert NGrams(2)([1, 2, 3, 1, 2, 4, 5, 1, 2], 3) == [4, 5, 1]
    assert NGrams(3)([9, 8, 7, 8], 2) == [7, 8]
    assert NGrams(3)([1, 2, 3], 4) == []
    assert NGrams(3)([5], 4) == []


def test_what_is_refused() -> None:
    for make in (lambda: NGrams(0), lambda: Speculate(max_draft=0), lambda: Speculate(n=0)):
        with pytest.raises(InputError):
            make()
    model = tiny()
    with pytest.raises(BranchError, match=r"drafter = 6 tokens: is more than the 4 asked for"):
        served(model, Speculate(lambda tokens, most: [1] * 6, 4))
    with pytest.raises(BranchError, match="max_rows = 64: is less than max_branches = 6, with 21 rows each"):
        served(model, Speculate(max_draft=20))
