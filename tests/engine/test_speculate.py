"""Speculative decoding: the tokens of `Sample` whatever the drafts are, in fewer steps where they are right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from support.replayed_steps import replaying
from support.tiny_models import NAMES, PROMPTS, VOCABULARY, generated, tiny
from treegen.engine import DraftModel, DraftTree, Engine, NGrams, Sample, Sampling, Speculate
from treegen.engine.control import Controller
from treegen.engine.draft_trees import draft_shape
from treegen.integrations import HFModel
from treegen.ir.errors import BranchError, InputError, TreegenError


def served(
    model: Any, controller: Controller, pages: int = 60, page_size: int = 4, replays: bool = False
) -> tuple[list[Any], Engine]:
    """The tokens of the results of each prompt; afterwards all pages are free."""
    made = Engine(
        HFModel(model),
        controller,
        num_pages=pages,
        page_size=page_size,
        max_rows=100,
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

    trees = False

    def __init__(self, expected: Sequence[Sequence[int]], wrong: int = 0) -> None:
        self.whole = [[*prompt, *own] for prompt, own in zip(PROMPTS, expected, strict=True)]
        self.wrong = wrong

    def following(self, text: Sequence[int], most: int) -> list[int]:
        (own,) = (each for each in self.whole if each[: len(text)] == list(text))
        following = own[len(text) : len(text) + most]
        places = range(len(text), len(text) + most)
        return [
            (token + 1) % VOCABULARY if self.wrong and place % self.wrong == 0 else token
            for token, place in zip(following, places, strict=False)
        ]

    def __call__(self, texts: Sequence[Sequence[int]], most: int) -> list[DraftTree]:
        return [DraftTree.chain(self.following(text, most)) for text in texts]


class Hidden(Told):
    """A drafter of trees, in which the right tokens are among wrong ones, in an order that follows from the text."""

    trees = True

    def __call__(self, texts: Sequence[Sequence[int]], most: int) -> list[DraftTree]:
        return [self._tree(text, self.following(text, 3)) for text in texts]

    def _tree(self, text: Sequence[int], right: Sequence[int]) -> DraftTree:
        order = np.random.default_rng(len(text))
        tokens: list[int] = []
        parents: list[int] = []
        last = -1
        for token in right:
            siblings = [token, (token + 1) % VOCABULARY, (token + 2) % VOCABULARY]
            begin, place = len(tokens), int(order.integers(3))
            tokens += siblings[-place:] + siblings[:-place] if place else siblings
            parents += [last, last, int(order.integers(-1, begin))]
            last = begin + place
            parents[last] = parents[begin] if place == 2 else parents[last]
        return DraftTree(tokens, parents)


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


class Constant:
    """Drafts the same token over and over, or other drafts than it may."""

    def __init__(self, count: int, parents: Sequence[int] | None = None, trees: bool = False) -> None:
        self.drafts = DraftTree([96] * count, [*range(-1, count - 1)] if parents is None else parents)
        self.trees = trees

    def __call__(self, texts: Sequence[Sequence[int]], most: int) -> list[DraftTree]:
        return [self.drafts] * len(texts)


@pytest.mark.parametrize(
    ("name", "page_size"),
    [("Llama", 4), ("Qwen3", 16), ("Qwen3Moe", 1), ("Mistral", 4), ("Gemma2", 1), ("Gemma3", 16), ("GptOss", 4)],
)
def test_trees_of_drafts_give_the_tokens_of_generate(name: str, page_size: int) -> None:
    model = tiny(name)
    expected = [generated(model, prompt, max_new_tokens=13) for prompt in PROMPTS]
    drafter = Hidden([own[0] for own in expected])
    for pages, replays in ((300 // page_size, False), (300 // page_size, True), (80 // page_size, False)):
        found, made = served(model, Speculate(drafter, 9, max_new_tokens=13), pages, page_size, replays)
        assert found == expected
    assert made.accounting.steps > 5
    found, made = served(model, Speculate(drafter, 9, max_new_tokens=13), 300 // page_size, page_size)
    assert made.accounting.steps <= 6  # prompts, and 12 tokens by four at most, or by three where a tree is wrong


def test_samples_by_trees_of_n_grams_and_of_a_smaller_model() -> None:
    model, sampling = tiny(), Sampling(0.7, 30, 0.95, seed=3)
    options = {"n": 2, "sampling": sampling, "max_new_tokens": 14, "stop_ids": (7, 31)}
    expected, plain = served(model, Sample(**options), 100)
    own = DraftModel(HFModel(tiny()), (3, 2, 1), num_pages=400, page_size=4, max_texts=6)
    other = DraftModel(HFModel(tiny("Qwen3")), (2, 1), num_pages=200, page_size=4, max_texts=6)
    short = DraftModel(HFModel(tiny()), (1, 1), num_pages=2, page_size=4)  # most texts are too long for it
    assert (own.drafts, own.trees, short.trees) == (3 + 6 + 6, True, False)
    steps = []
    for drafter, most in ((NGrams(2, occurrences=3), 6), (own, 15), (other, 4), (short, 2)):
        found, made = served(model, Speculate(drafter, most, **options), 200)
        assert found == expected
        steps.append(made.accounting.steps)
    assert steps[1] < steps[2] <= plain.accounting.steps


def test_rejected_drafts_leave_no_trace() -> None:
    """A branch whose drafts cross pages, all wrong, keeps the tokens and KV of one without drafts."""
    model = tiny()
    expected = [generated(model, prompt, max_new_tokens=12) for prompt in PROMPTS]
    found, made = served(model, Speculate(Constant(9), 9, max_new_tokens=12), 80, 2)
    assert found == expected
    assert made.accounting.rows > 2 * sum(map(len, PROMPTS))


@pytest.mark.parametrize(("drafter", "most"), [(NGrams(3), 4), (NGrams(2, occurrences=3), 6)])
def test_branches_keep_their_numbers_of_rows(drafter: NGrams, most: int) -> None:
    """However many tokens are drafted, plans know all rows, and are made as often as without drafts."""
    sampling, prompt = Sampling(0.7, 30, 0.95, seed=3), [4, 8, 15, 16, 23, 42] * 20
    options = {"n": 8, "sampling": sampling, "max_new_tokens": 30}
    plans = []
    for controller in (Sample(**options), Speculate(drafter, most, **options)):
        made = Engine(HFModel(tiny()), controller, num_pages=400, page_size=4, max_rows=130, max_branches=8)
        decoding, seen = made.forward.decoding, []
        begin = decoding.begin

        def noting(*given: Any, begin: Any = begin, seen: Any = seen, made: Engine = made) -> dict[int, int]:
            if len(made.sequences) == 8:
                known = [kernel.counters() for kernel in made.forward.decoding.kernels.values()]
                seen.append((sum(given[0].values()), sum(each["plans"] for each in known)))
            return begin(*given)

        decoding.begin = noting  # type: ignore[method-assign]
        made.run([prompt])
        (kernel,) = decoding.kernels.values()
        assert kernel.counters()["new"] == 0
        assert {rows for rows, _ in seen} == {8 if isinstance(controller, Sample) else 8 * (1 + most)}
        plans.append(max(count for _, count in seen))
    assert 1 <= plans[1] <= plans[0] + 1  # that one more: drafts count as tokens that a branch has grown by


def test_drafts_end_where_the_model_does() -> None:
    """A prompt that leaves room for the new tokens alone."""
    model = tiny()
    prompt = [4, 8, 15, 16, 23, 42] * 41
    assert len(prompt) == 256 - 10
    expected = generated(model, prompt, max_new_tokens=10)
    made = Engine(HFModel(model), Speculate(NGrams(), 6, max_new_tokens=10), num_pages=80, page_size=4)
    assert [each.tokens for each in made.run([prompt])[0]] == expected
    made.sequences.check()


def test_filled_drafts() -> None:
    assert DraftTree([], []).filled(2, 7) == ([7, 7], [-1, 0])
    assert DraftTree([5, 6], [-1, -1]).filled(4, 7) == ([5, 6, 7, 7], [-1, -1, 1, 2])
    assert DraftTree([5, 6], [-1, -1]).filled(2, 7) == ([5, 6], [-1, -1])
    assert DraftTree([5, 6, 7], [-1, -1, 0]).first(2) == ([5, 6], [-1, -1])


def test_n_grams_give_what_followed() -> None:
    def drafts(text: list[int], most: int, **options: int) -> DraftTree:
        (found,) = NGrams(**options)([text], most)
        return found

    assert drafts([1, 2, 3, 1, 2, 4, 5, 1, 2], 3, longest=2) == ([4, 5, 1], [-1, 0, 1])
    assert drafts([9, 8, 7, 8], 2) == ([7, 8], [-1, 0])
    assert drafts([1, 2, 3], 3) == ([3, 3, 3], [-1, 0, 1])
    assert drafts([5], 2) == ([5, 5], [-1, 0])
    repeated = [1, 2, 3, 7, 1, 2, 4, 1, 2, 3, 8, 1, 2]
    assert drafts(repeated, 7, longest=2, occurrences=3) == ([3, 8, 1, 4, 1, 3, 7], [-1, 0, 1, -1, 3, -1, 5])
    assert drafts(repeated, 4, longest=2, occurrences=3) == ([3, 8, 4, 3], [-1, 0, -1, -1])
    assert drafts(repeated, 2, longest=2, occurrences=3) == ([3, 4], [-1, -1])
    assert drafts([6, 7, 6], 5, occurrences=2) == ([7, 6, 6, 6, 6], [-1, 0, 1, -1, 3])


@pytest.mark.parametrize("occurrences", [1, 2])
def test_n_grams_give_nothing_where_there_is_nothing_to_give(occurrences: int) -> None:
    """No drafts are asked for, or the text is empty."""
    drafter = NGrams(occurrences=occurrences)
    assert drafter([[1, 2, 1], [5]], 0) == [([], [])] * 2
    assert drafter.fixed_parents(0) == []
    assert drafter([[], [5]], 2) == [([], []), ([5, 5], [-1, 0] if occurrences == 1 else [-1, -1])]


def test_n_grams_follow_texts_that_grow() -> None:
    """Lists that are appended to, cut back, or replaced by others give what new ones give."""
    source, drafter = random.Random(0), NGrams(occurrences=2)
    texts = [[source.randrange(4) for _ in range(9)] for _ in range(3)]
    for _ in range(60):
        assert drafter(texts, 5) == NGrams(occurrences=2)([text[:] for text in texts], 5)
        for text in texts:
            text += [source.randrange(4) for _ in range(source.randrange(3))]
        if not source.randrange(4):
            del texts[0][5:]
        if not source.randrange(4):
            texts[1:] = [texts[2], [source.randrange(4) for _ in range(7)]]


@pytest.mark.parametrize("window", [2, 3])
def test_windows_that_are_shorter_than_trees(window: int) -> None:
    """A draft sees itself and one or two tokens before it; trees have 9 drafts, and paths of three or more."""
    model = tiny("Mistral", sliding_window=window)
    expected = [generated(model, prompt, max_new_tokens=13) for prompt in PROMPTS]
    for drafter in (Hidden([own[0] for own in expected]), NGrams(2, occurrences=3)):
        for replays in (False, True):
            assert served(model, Speculate(drafter, 9, max_new_tokens=13), 75, 4, replays)[0] == expected


def test_what_drafts_see() -> None:
    shape = draft_shape((-1, -1, 0, 0, 3))
    assert shape.depths.tolist() == [1, 1, 2, 2, 3]
    assert [np.flatnonzero(row).tolist() for row in shape.sees] == [[0], [1], [0, 2], [0, 3], [0, 3, 4]]


@pytest.mark.parametrize(
    ("drafter", "text"),
    [
        (Constant(6), "drafts = 6 tokens and 6 parents: are not one parent each, for at most 4"),
        (Constant(3, [-1, 0]), "drafts = 3 tokens and 2 parents"),
        (Constant(2, [-1, 1]), r"parents\[1\] = 1: is no earlier draft"),
        (Constant(2, [-1, -1]), r"parents = \[-1, -1\]: are not a chain"),
    ],
)
def test_drafts_that_do_not_fit(drafter: Constant, text: str) -> None:
    with pytest.raises(BranchError, match=text):
        served(tiny(), Speculate(drafter, 4))


def test_what_is_refused() -> None:
    for make in (
        lambda: NGrams(0),
        lambda: NGrams(occurrences=0),
        lambda: Speculate(max_draft=0),
        lambda: Speculate(n=0),
        lambda: Speculate(sampling=0.5),  # type: ignore[arg-type]
        lambda: Speculate(stop_ids=(-1,)),
        lambda: DraftModel(HFModel(tiny()), (), num_pages=9),
        lambda: DraftModel(HFModel(tiny()), (2, 0), num_pages=9),
    ):
        with pytest.raises(InputError):
            make()
    with pytest.raises(BranchError, match="max_rows = 100: is less than max_branches = 6, with 21 rows each"):
        served(tiny(), Speculate(max_draft=20))


@pytest.mark.parametrize("drafted", [False, True])
def test_prompts_may_have_limits_of_their_own(drafted: bool) -> None:
    model, limits = tiny(), [3, 12, 1]
    greedy = [generated(model, prompt, max_new_tokens=12) for prompt in PROMPTS]
    expected = [[tokens[:limit] for tokens in own] for own, limit in zip(greedy, limits, strict=True)]
    options: dict[str, Any] = {"max_new_tokens": 12, "limits": limits}
    controller = Speculate(NGrams(), 3, **options) if drafted else Sample(**options)
    made = Engine(HFModel(model), controller, num_pages=80, page_size=4)
    assert [[each.tokens for each in own] for own in made.run(PROMPTS)] == expected
    made.sequences.check()
    with pytest.raises(TreegenError, match=r"controller\.limits = 3 limits: are not one for each of 2 prompts"):
        made.run(PROMPTS[:2])
    for wrong, text in (
        ([13], r"limits\[0\] = 13: is more than max_new_tokens = 12"),
        ([0], r"limits\[0\] = 0"),
        (5, "limits"),
    ):
        with pytest.raises(TreegenError, match=text):
            Sample(max_new_tokens=12, limits=wrong)  # type: ignore[arg-type]
