"""Trees of thoughts: what a plain search over the model without cache finds, whatever the pool and the batch are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from support.noted_steps import NotingTokens, note_launches
from support.tiny_models import PROMPTS, tiny
from treegen.engine import Branch, Continuation, Engine, Frontier, Growth, Next, Sample, Sampling, Search
from treegen.engine.control import Controller
from treegen.integrations import HFModel
from treegen.ir.errors import BranchError, InputError

SAMPLING = Sampling(1.0, top_k=30, seed=5)
MANY = tuple(range(0, 97, 4))
Call = tuple[list[int], list[list[int]]]


class Form(NamedTuple):
    """The numbers of a search."""

    width: int
    branching: int
    thought_tokens: int
    depth: int
    stop_ids: tuple[int, ...] = ()

    def controller(
        self, score: Callable[..., Any], sampling: Sampling = SAMPLING, stop: Callable[..., bool] | None = None
    ) -> Search:
        return Search(score, sampling=sampling, stop=stop, **self._asdict())


FORMS = [
    Form(1, 1, 5, 1),
    Form(1, 3, 1, 3),
    Form(2, 1, 4, 2, (11,)),
    Form(2, 3, 4, 3),
    Form(2, 3, 6, 3, MANY),
    Form(5, 2, 3, 3, MANY),
]


class Scorer:
    """Rates candidates by numbers with many ties, and notes what it was asked."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, prompt: list[int], candidates: list[list[int]]) -> list[float]:
        self.calls.append((prompt, candidates))
        return [(sum(tokens) + len(prompt)) % 5 / 2 for tokens in candidates]


def searched(
    prompts: Sequence[list[int]], form: Form, score: Callable[..., Any], stop: Callable[..., bool] = lambda *_: False
) -> list[list[Continuation]]:
    """The search as a few loops, with a whole pass of the model for each token."""
    model = tiny()

    @torch.no_grad()
    def thought(tokens: list[int], label: tuple[int, ...]) -> list[int]:
        begin = len(tokens)
        while len(tokens) - begin < form.thought_tokens and (len(tokens) == begin or tokens[-1] not in form.stop_ids):
            logits = model(torch.tensor([tokens])).logits[:, -1]
            tokens = [*tokens, *SAMPLING.draw(logits, [label], [len(tokens)])]
        return tokens

    found = []
    for number, prompt in enumerate(prompts):
        kept: list[tuple[tuple[int, ...], list[int]]] = [((number,), prompt)]
        best: list[tuple[float, list[int], tuple[int, ...]]] = []
        answers: list[tuple[float, list[int], tuple[int, ...]]] = []
        for level in range(form.depth):
            labels = [((*label, place), tokens) for label, tokens in sorted(kept) for place in range(form.branching)]
            candidates = [(label, thought(tokens, label)) for label, tokens in labels]
            scores = score(prompt, [tokens[len(prompt) :] for _, tokens in candidates]) if candidates else []
            rated = [(rate, tokens, label) for rate, (label, tokens) in zip(scores, candidates, strict=True)]
            best = sorted([*answers, *rated], key=lambda each: -each[0])[: form.width]
            ended = [each for each in best if each in answers or stop(prompt, each[1][len(prompt) :])]
            if level + 1 < form.depth:
                answers, kept = (
                    ended,
                    [(label, tokens) for rate, tokens, label in best if (rate, tokens, label) not in ended],
                )
        found.append([Continuation((number, rank), own[1][len(prompt) :], own[0]) for rank, own in enumerate(best)])
    return found


def engine(controller: Controller, pages: int = 120, page_size: int = 4, rows: int = 40) -> Engine:
    return Engine(HFModel(tiny()), controller, num_pages=pages, page_size=page_size, max_rows=rows, max_branches=20)


def served(made: Engine, prompts: Sequence[Sequence[int]]) -> list[list[Continuation]]:
    """The results of each prompt; afterwards all pages are free."""
    results = made.run(prompts)
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages
    return results


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_results_are_those_of_a_plain_search(form: Form) -> None:
    """The same tokens, scores and labels; and the scorer is asked once for each level of each prompt."""
    plain, own = Scorer(), Scorer()
    expected = searched(PROMPTS, form, plain)
    assert served(engine(form.controller(own)), PROMPTS) == expected
    assert sorted(own.calls) == sorted(plain.calls)
    assert len(own.calls) == len(PROMPTS) * form.depth
    if form.stop_ids == MANY:
        assert len({len(tokens) for _, candidates in own.calls for tokens in candidates}) > form.depth


@pytest.mark.parametrize("form", [Form(2, 3, 4, 4), Form(3, 2, 6, 3, MANY), Form(1, 3, 2, 5)], ids=str)
@pytest.mark.parametrize("part", [1, 2, 3])
def test_candidates_that_are_answers_wait(form: Form, part: int) -> None:
    """Every, every other or every third candidate; no thought follows them, and better ones take their places."""

    def stop(prompt: list[int], tokens: list[int]) -> bool:
        return sum(tokens) % part == 0

    def rising(prompt: list[int], candidates: list[list[int]]) -> list[float]:
        return [sum(tokens) % 7 / 2 for tokens in candidates]

    for score in (Scorer(), rising):
        made = engine(form.controller(score, stop=stop))
        assert served(made, PROMPTS) == searched(PROMPTS, form, score, stop)
        if part == 1:
            assert all(len(each.tokens) <= form.thought_tokens for own in made.run(PROMPTS) for each in own)


@pytest.fixture(scope="module")
def expected() -> list[list[Continuation]]:
    return served(engine(FORMS[-2].controller(Scorer())), PROMPTS)


@pytest.mark.parametrize(("pages", "page_size", "rows"), [(40, 16, 512), (300, 1, 40), (44, 4, 20), (40, 4, 20)])
def test_pools_and_budgets_change_no_thought(
    pages: int, page_size: int, rows: int, expected: list[list[Continuation]]
) -> None:
    made = engine(FORMS[-2].controller(Scorer()), pages, page_size, rows)
    assert served(made, PROMPTS) == expected
    assert (made.accounting.preempted > 0) == (rows == 20)


def test_thoughts_do_not_depend_on_the_batch(expected: list[list[Continuation]]) -> None:
    for number, prompt in enumerate(PROMPTS):
        prompts = [[1]] * number + [prompt]  # the number of a prompt is part of its labels
        assert served(engine(FORMS[-2].controller(Scorer())), prompts)[number] == expected[number]


def test_one_engine_serves_prompts_again() -> None:
    controller = Form(2, 2, 3, 2).controller(Scorer())
    made = engine(controller)
    assert served(made, PROMPTS) == served(made, PROMPTS)


def test_a_search_of_one_thought_is_greedy() -> None:
    form = Form(1, 1, 4, 2)
    found = served(engine(form.controller(Scorer(), Sampling())), PROMPTS)
    greedy = served(engine(Sample(max_new_tokens=8)), PROMPTS)
    assert [own[0].tokens for own in found] == [own[0].tokens for own in greedy]
    assert form.controller(Scorer()).sampling == SAMPLING
    assert Search(Scorer(), width=2, branching=3, thought_tokens=4, depth=5).sampling == Sampling(temperature=1.0)


def test_a_controller_says_how_many_branches_and_tokens_it_needs() -> None:
    controller = Form(2, 3, 4, 5).controller(Scorer())
    assert (controller.width, controller.max_new_tokens, controller.kept) == (6, 20, 2)
    with pytest.raises(BranchError, match=r"controller\.width = 21"):
        engine(Form(7, 3, 1, 1).controller(Scorer()))


def test_scores_may_be_a_tensor_or_an_array() -> None:
    form = Form(2, 3, 2, 2)
    expected = served(engine(form.controller(Scorer())), PROMPTS)
    for convert in (torch.tensor, np.float32):
        controller = form.controller(lambda *given, convert=convert: convert(Scorer()(*given)))
        assert served(engine(controller), PROMPTS) == expected


@pytest.mark.parametrize(
    ("scores", "text"),
    [([1.0] * 5, r"score\(\) = 5 scores: is not the number of candidates, 6"),
     ([], r"score\(\) = 0 scores: .*; return one for each"),
     ([0.0, float("nan")] * 3, r"score\(\)\[1\] = nan: is not a finite number"),
     ([float("inf")] * 6, r"score\(\)\[0\] = inf: is not a finite number"),
     ([0.0, 1.0, 2.0, "3", 4.0, 5.0], r"score\(\)\[3\] = 3: is not a finite number")],
)  # fmt: skip
def test_scores_that_do_not_fit(scores: list[Any], text: str) -> None:
    def score(prompt: list[int], candidates: list[list[int]]) -> list[Any]:
        return scores if len(candidates) == 6 else [0.0] * len(candidates)

    made = engine(Form(2, 3, 2, 2).controller(score))
    with pytest.raises(InputError, match=text):
        made.run(PROMPTS)
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages
    made.controller = Form(2, 2, 2, 2).controller(score)
    assert len(served(made, PROMPTS)) == len(PROMPTS)


def test_a_search_goes_on_after_an_error() -> None:
    """A scorer that fails once leaves nothing behind in the controller."""
    failures, scorer = [KeyboardInterrupt], Scorer()

    def score(prompt: list[int], candidates: list[list[int]]) -> list[float]:
        if len(candidates) == 6 and failures:
            raise failures.pop()
        return scorer(prompt, candidates)

    made = engine(FORMS[4].controller(score))
    with pytest.raises(KeyboardInterrupt):
        made.run(PROMPTS)
    assert served(made, PROMPTS) == served(engine(FORMS[4].controller(Scorer())), PROMPTS)


class NotingSearch(NotingTokens, Search):
    """Notes what happens in which order."""


def test_within_a_level_steps_are_launched_before_tokens_are_read() -> None:
    """Decisions are for levels, and after first tokens that end thoughts, also where others end one by one and rest."""
    form = Form(2, 3, 12, 3, tuple(range(0, 97, 9)))
    controller = NotingSearch(Scorer(), sampling=SAMPLING, **form._asdict())
    made = engine(controller)
    note_launches(made, controller.noted)
    (found,) = served(made, PROMPTS[:1])
    assert len({len(each.tokens) for each in found}) > 1
    noted = controller.noted
    assert noted.count("decide") <= 2 * form.depth
    assert noted.count("select") == noted.count("commit") > 15
    unread = [place for place, each in enumerate(noted) if each == "select" and noted[place + 1] != "launch"]
    assert len(unread) <= 1  # the last token of all


def test_a_search_that_is_stopped_while_a_step_is_under_way() -> None:
    form = FORMS[4]
    expected = served(engine(form.controller(Scorer())), PROMPTS)
    made = engine(NotingSearch(Scorer(), sampling=SAMPLING, **form._asdict()))
    for trouble in (1, 3, 6):
        made.controller.trouble, made.controller.noted = trouble, []
        with pytest.raises(KeyboardInterrupt):
            made.run(PROMPTS)
        made.sequences.check()
        assert made.sequences.available == made.pool.num_pages
        made.controller.trouble = 0
        assert served(made, PROMPTS) == expected


@pytest.mark.parametrize("together", [True, False])
def test_branches_that_may_not_rest_when_their_token_is_stored(together: bool) -> None:
    class Tired(Sample):
        def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
            numbers = [99] if together else [branch.number for branch in branches]
            return super().commit(branches, tokens)._replace(resting=numbers)

    Tired.together = together  # type: ignore[assignment, method-assign]
    with pytest.raises(BranchError, match=r"resting = \[\d+\]: has no next token, or rests with drafts or without"):
        engine(Tired(max_new_tokens=5)).run(PROMPTS[:1])


@pytest.mark.parametrize("name", ["width", "branching", "thought_tokens", "depth"])
@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_numbers_out_of_range(name: str, number: Any) -> None:
    numbers = Form(2, 2, 2, 2)._asdict() | {name: number}
    with pytest.raises(InputError, match=f"{name} = {number}: is not a positive integer"):
        Search(Scorer(), **numbers)


@pytest.mark.parametrize("given", [None, 0.5, {"a": 1}, torch.zeros(2, 3)], ids=str)
def test_scores_of_another_form(given: Any) -> None:
    with pytest.raises(InputError, match=r"score\(\) = \w+: is no list of numbers"):
        engine(Form(2, 3, 2, 2).controller(lambda *_: given)).run(PROMPTS)


@pytest.mark.parametrize("form", [iter, lambda scores: torch.tensor(scores)[:, None], np.array])
def test_scores_come_in_any_list(form: Callable[[list[float]], Any]) -> None:
    score, found = Scorer(), []
    for rate in (score, lambda prompt, candidates: form(score(prompt, candidates))):
        results = engine(FORMS[3].controller(rate)).run(iter(PROMPTS))
        found.append([[each.tokens for each in own] for own in results])
    assert found[0] == found[1]


def test_a_scorer_that_cannot_be_called() -> None:
    with pytest.raises(InputError, match="score = 3: is not a function"):
        Form(2, 2, 2, 2).controller(3)  # type: ignore[arg-type]


class Restless:
    """Forks each prompt once, and then decides as it is told."""

    width, max_new_tokens = 2, 8

    def __init__(self, together: bool, resting: Callable[[Sequence[int]], set[int]], going: int) -> None:
        self.together, self.resting, self.going = together, resting, going

    def decide(self, frontier: Frontier) -> Growth:
        branches = frontier.branches
        if not branches[0].new_tokens:
            return Growth({branches[0].number: [Next(3, (0, 0)), Next(4, (0, 1))]}, [])
        numbers = [branch.number for branch in branches]
        grown = {number: [Next(5, (0, 0))] if number in numbers[: self.going] else [] for number in numbers}
        return Growth(grown, [], resting=self.resting(numbers))


@pytest.mark.parametrize(
    ("controller", "text"),
    [(Restless(False, lambda numbers: {numbers[1]}, 1), "rests without `together`"),
     (Restless(True, lambda numbers: {99}, 1), r"resting = \[99\]: is not in the frontier"),
     (Restless(True, lambda numbers: {numbers[0]}, 1), r"resting = \[0\]: .* has next tokens"),
     (Restless(True, lambda numbers: set(numbers), 0), r"resting = \[0, 1\]: of all branches none has next tokens"),
     (Restless(True, lambda numbers: {numbers[0]}, 0), "extend a branch, or end all")],
)  # fmt: skip
def test_branches_that_may_not_rest(controller: Restless, text: str) -> None:
    made = engine(controller)
    with pytest.raises(BranchError, match=text):
        made.run(PROMPTS[:1])
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages
