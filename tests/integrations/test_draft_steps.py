"""Drafts of a smaller model: its most likely tokens, whatever was accepted and whoever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support.tiny_models import PROMPTS, tiny
from treegen.engine import Branch, DraftModel, DraftTree, Engine, Sample, Sampling, Speculate
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
            expected = self.likely(text[:length], most).filled(most, text[length - 1])
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


@pytest.mark.parametrize(("widths", "most", "page_size"), [
    ((1,), 1, 4), ((1, 1, 1), 3, 1), ((1, 1, 1, 1), 3, 4), ((1, 1, 1), 3, 16), ((2, 1, 1), 6, 4), ((3, 2), 7, 1),
    ((4,), 4, 16), ((2, 2, 1), 12, 4),
])  # fmt: skip
def test_drafts_are_the_small_models_most_likely_tokens(widths: tuple[int, ...], most: int, page_size: int) -> None:
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
    assert served(drafter)[0] == served(None)[0]
    assert drafter.checked["device"] > 10


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 1, 1)])
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


def test_a_text_outgrows_the_model() -> None:
    text, drafter = [1, 2, 3], DraftModel(HFModel(tiny(max_position_embeddings=32)), (1, 1), num_pages=90, page_size=4)
    found = []
    while len(text) < 40:
        found.append(len(drafter([text], 2)[0].tokens))
        text.append(5)
    assert found == [2] * 28 + [0] * 9


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 1)])
@pytest.mark.parametrize("trouble", [1, 4, 9])
def test_a_drafter_that_is_stopped_goes_on(trouble: int, widths: tuple[int, ...]) -> None:
    drafter = Checked(widths, num_pages=200, page_size=4, max_texts=6)
    drafter.trouble = trouble
    with pytest.raises(KeyboardInterrupt):
        served(drafter)
    assert served(drafter)[0] == served(None)[0]
