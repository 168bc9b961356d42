"""Drafts of a smaller model: its most likely tokens, whatever was accepted and whoever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support.full_tests import others_full
from support.tiny_models import PROMPTS, tiny
from treegen.engine import Branch, DraftModel, DraftTree, Engine, NGrams, Sample, Sampling, Speculate
from treegen.integrations import HFModel

SAMPLING = Sampling(0.5, top_k=5, seed=2)


class Checked(DraftModel):
    """Compares its drafts, called by the host or on the device, with the most likely tokens of a plain model."""

    def __init__(self, widths: tuple[int, ...], name: str = "Llama", seed: int = 0, **options: Any) -> None:
        super().__init__(HFModel(tiny(name, seed)), widths, **options)
        self.model, self.widths = tiny(name, seed), widths
        self.checked = {"host": 0, "device": 0}
        self.trouble = 0

    def likely(self, text: Sequence[int], most: int) -> DraftTree:
        """The most likely tokens, those of each depth before deeper ones, by whole passes of the plain model."""
        tokens: list[int] = []
        parents: list[int] = []
        paths: list[tuple[int, list[int]]] = [(-1, [*text])]
        for width in self.widths:
            following = []
            for parent, path in paths:
                with torch.no_grad():
                    best = self.model(torch.tensor([path])).logits[0, -1].topk(width).indices.tolist()
                for token in best:
                    following.append((len(tokens), [*path, token]))
                    tokens.append(token)
                    parents.append(parent)
            paths = following
        return DraftTree(tokens, parents).first(most)

    def tried(self, texts: Sequence[Sequence[int]], most: int) -> list[bool]:
        """Which texts get drafts."""
        found = super().__call__(texts, most)
        assert all(own in (self.likely(text, most), ([], [])) for text, own in zip(texts, found, strict=True))
        return [bool(own.tokens) for own in found]

    def __call__(self, texts: Sequence[Sequence[int]], most: int) -> list[DraftTree]:
        found = super().__call__(texts, most)
        for text, own in zip(texts, found, strict=True):
            assert own == self.likely(text, most)
            self.checked["host"] += 1
        return found

    def drafts_after(
        self, branches: Sequence[Branch], texts: torch.Tensor, lengths: torch.Tensor, most: int
    ) -> torch.Tensor:
        found = super().drafts_after(branches, texts, lengths, most)
        for text, length, own in zip(texts.tolist(), lengths.tolist(), found.tolist(), strict=True):
            expected = self.likely(text[:length], most)
            assert (own, self.fixed_parents(most)) == (expected.tokens, expected.parents)
            self.checked["device"] += 1
            if self.checked["device"] == self.trouble:
                raise KeyboardInterrupt
        return found


def served(drafter: DraftModel | None, most: int = 4, n: int = 2, tokens: int = 14) -> tuple[list[Any], Engine]:
    """The samples of the prompts. Of six branches that may run, some wait for others."""
    options = {"sampling": SAMPLING, "max_new_tokens": tokens, "stop_ids": (3, 50)}
    controller = Sample(n, **options) if drafter is None else Speculate(drafter, most, n, **options)
    made = Engine(HFModel(tiny()), controller, num_pages=200, page_size=4, max_rows=100, max_branches=4)
    found = [[each.tokens for each in own] for own in made.run(PROMPTS)]
    made.sequences.check()
    return found, made


@pytest.mark.parametrize("case", others_full([
    ((1,), 1, 4), ((1, 1, 1), 3, 1), ((1, 1, 1, 1), 3, 4), ((1, 1, 1), 3, 16), ((3, 2), 8, 1), ((2, 1, 1), 6, 4),
    ((4,), 4, 16), ((2, 2, 1), 10, 4),
]))  # fmt: skip
def test_drafts_are_the_small_models_most_likely_tokens(case: tuple[tuple[int, ...], int, int]) -> None:
    widths, most, page_size = case
    expected, plain = served(None)
    drafter = Checked(widths, num_pages=800 // page_size, page_size=page_size, max_texts=6)
    for _ in range(2):  # the second time by what the prefix cache has
        found, made = served(drafter, most)
        assert found == expected
        assert made.accounting.steps < plain.accounting.steps
    assert min(drafter.checked.values()) > 4


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 1)])
def test_drafts_of_a_model_that_is_seldom_right(widths: tuple[int, ...]) -> None:
    drafter = Checked(widths, "Qwen3", 4, num_pages=100, page_size=4, max_texts=6)
    assert served(drafter, 3)[0] == served(None)[0]
    assert drafter.checked["device"] > 10


@pytest.mark.parametrize("case", others_full([
    (90, (1, 1), 2), (90, (2, 1), 4), (112, (2, 1), 4), (112, (1, 1), 2), (112, (1, 1), 3), (90, (2, 1), 5),
]))  # fmt: skip
def test_draft_models_of_other_vocabularies(case: tuple[int, tuple[int, ...], int]) -> None:
    """As of padded ones. They draft no token that the large model lacks, and read those that they lack as another."""
    size, widths, most = case
    prompts = [[*PROMPTS[0], 96, 90], [95, 96, 94], [*PROMPTS[2]]]
    options = {"sampling": Sampling(0.7, seed=4), "max_new_tokens": 30}
    sizes = {"num_pages": 200, "page_size": 4, "max_rows": 100, "max_branches": 4}
    expected = Engine(HFModel(tiny()), Sample(2, **options), **sizes).run(prompts)
    assert any(token >= 90 for own in expected for each in own for token in each.tokens)
    drafter = DraftModel(HFModel(tiny(vocab_size=size)), widths, num_pages=200, page_size=4)
    assert Engine(HFModel(tiny()), Speculate(drafter, most, 2, **options), **sizes).run(prompts) == expected


def test_a_padded_draft_model_is_as_often_right() -> None:
    """Were padding likely, it would be drafted."""
    padded = tiny()
    padded.resize_token_embeddings(112, mean_resizing=False)
    padded.lm_head.weight.data[97:] = 3 * padded.lm_head.weight.data[:15]
    steps = []
    for model in (tiny(), padded):
        drafter = DraftModel(HFModel(model), (1, 1, 1), num_pages=200, page_size=4)
        steps.append(served(drafter, 3)[1].accounting.steps)
    assert steps[0] == steps[1] < served(None)[1].accounting.steps


def test_drafters_of_users_may_have_a_vocabulary() -> None:
    class Own(NGrams):
        vocabulary = ("a", "b")

    made = Engine(HFModel(tiny()), Speculate(Own(), 2, max_new_tokens=6), num_pages=100, page_size=4)
    plain = Engine(HFModel(tiny()), Sample(max_new_tokens=6), num_pages=100, page_size=4)
    assert made.run(PROMPTS) == plain.run(PROMPTS)


def test_more_drafts_than_the_model_gives_wait_for_the_host() -> None:
    drafter = Checked((1, 1), num_pages=200, page_size=4, max_texts=6)
    assert (drafter.fixed_parents(2), drafter.fixed_parents(3)) == ([-1, 0], [])
    assert served(drafter, 5)[0] == served(None)[0]
    assert (drafter.checked["device"], drafter.checked["host"] > 10) == (0, True)


@pytest.mark.parametrize("widths", others_full([(2, 1, 1), (1, 1, 1)]))
def test_texts_that_grow_and_go(widths: tuple[int, ...]) -> None:
    """Random histories of texts, called by the host: appended to by accepted drafts or others, replaced, left out."""
    source = random.Random(5)
    drafter = Checked(widths, num_pages=120, page_size=4, max_texts=4)
    texts = [[*prompt] for prompt in PROMPTS]
    for _ in range(12):
        for text, own in zip(texts, drafter(texts, 6), strict=True):
            draft = source.randrange(-1, len(own.tokens))
            path: list[int] = []
            while draft >= 0:
                path.insert(0, own.tokens[draft])
                draft = own.parents[draft]
            text += [*path, source.randrange(97)]
        event = source.randrange(5)
        if event == 0:
            texts[source.randrange(len(texts))] = [*source.choice(PROMPTS), source.randrange(97)]
        elif event == 1 and len(texts) < 4:
            texts.append([*source.choice(texts)])
        elif event == 2 and len(texts) > 1:
            texts.pop(source.randrange(len(texts)))
        elif event == 3:
            del texts[0][-2:]
    assert drafter.checked["host"] > 25


@pytest.mark.parametrize("widths", [(1, 1), (2, 1)])
def test_more_drafts_are_asked_for_than_the_model_gives(widths: tuple[int, ...]) -> None:
    """The text's last token follows; where it is accepted, the KV of what was accepted is computed."""
    text = [5, 9, 2]
    drafter = Checked(widths, num_pages=60, page_size=4)
    for _ in range(6):
        tree = drafter([text], 9)[0]
        text += [tree.tokens[0], tree.tokens[tree.parents.index(0)], text[-1], text[-1], 7]
    assert drafter.checked["host"] == 6


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 1)])
def test_tokens_that_are_not_the_drafts_may_be_appended(widths: tuple[int, ...]) -> None:
    """Several others, or more than were drafted: their KV is computed before the next step."""
    text, source = [5, 9, 2, 7], random.Random(2)
    drafter = Checked(widths, num_pages=60, page_size=4)
    for count in (3, 1, 7, 2, 4, 1):
        own = drafter([text], 3)[0].tokens
        text += [*own[: source.randrange(2)], *(source.randrange(97) for _ in range(count))]
    assert drafter.checked["host"] == 6


@pytest.mark.parametrize("other", [5, 8])
def test_pages_of_texts_that_lose_their_room_hold_what_was_computed(other: int) -> None:
    """A text is left out when it needs a page more, and comes back by what the prefix cache has."""
    for pages in range(5, 14):
        drafter = Checked((1, 1, 1), num_pages=pages, page_size=4, max_texts=4)
        texts = [[1, 5, 9, 33, 2, 7], [4, 8, 15, 16, 23, 42, 3, 9][:other]]
        for _ in range(6):
            room = drafter.tried(texts, 3)
            for text in texts:
                text += drafter.likely(text, 3).tokens
                text += drafter.likely(text, 1).tokens
            if not room[1]:
                break
        drafter.tried(texts[1:], 3)


def test_texts_for_which_there_is_no_room_get_no_drafts() -> None:
    texts = [[number, *PROMPTS[1]] for number in range(5)]
    for options, served in (({"num_pages": 60, "max_texts": 3}, 3), ({"num_pages": 16}, 2), ({"num_pages": 4}, 0)):
        drafter = DraftModel(HFModel(tiny()), (1, 1), page_size=4, **options)
        drafts = [len(own.tokens) for own in drafter(texts, 2)]
        assert drafts == [2] * served + [0] * (5 - served)
        assert [len(own.tokens) for own in drafter(texts[3:], 2)] == [2 * (served > 0)] * 2  # the others have gone
    assert [own.tokens for own in drafter([[5], []], 2)] == [[], []]
    tree = DraftModel(HFModel(tiny()), (2, 1), num_pages=60, page_size=4)
    assert [len(own.tokens) for own in tree([[5, 6], [5, 6, 7]], 4)] == [0, 4]
    assert drafter([], 2) == []
    assert [own.tokens for own in tree([[5, 6, 7]], 0)] == [own.tokens for own in drafter([[5, 6, 7]], 0)] == [[]]


def test_a_text_outgrows_the_model() -> None:
    text, drafter = [1, 2, 3], DraftModel(HFModel(tiny(max_position_embeddings=32)), (1, 1), num_pages=90, page_size=4)
    found = []
    while len(text) < 40:
        found.append(len(drafter([text], 2)[0].tokens))
        text.append(5)
    assert found == [2] * 28 + [0] * 9


@pytest.mark.parametrize("widths", others_full([(2, 1), (1, 1, 1)]))
@pytest.mark.parametrize("trouble", [1, 4, 9])
def test_a_drafter_that_is_stopped_goes_on(trouble: int, widths: tuple[int, ...]) -> None:
    drafter = Checked(widths, num_pages=200, page_size=4, max_texts=6)
    drafter.trouble = trouble
    with pytest.raises(KeyboardInterrupt):
        served(drafter, 3)
    assert served(drafter, 3)[0] == served(None)[0]


def test_an_engine_warms_its_draft_model_up() -> None:
    warmed = []

    class Noted(DraftModel):
        def warm_up(self) -> None:
            warmed.append(len(made.sequences))
            super().warm_up()

    drafter = Noted(HFModel(tiny()), (1, 1), num_pages=100, page_size=4)
    made = Engine(HFModel(tiny()), Speculate(drafter, 2, max_new_tokens=6), num_pages=100, page_size=4)
    made.warm_up()
    assert warmed == [0]
    plain = Engine(HFModel(tiny()), Sample(max_new_tokens=6), num_pages=100, page_size=4)
    plain.warm_up()
    assert made.run(PROMPTS) == plain.run(PROMPTS)
    for controller in (Speculate(max_new_tokens=6), Sample()):
        Engine(HFModel(tiny()), controller, num_pages=100, page_size=4).warm_up()
    assert warmed == [0]
