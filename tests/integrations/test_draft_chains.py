"""Chains of a smaller model: its most likely tokens, whatever was accepted and whoever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support.tiny_models import PROMPTS, generated, tiny
from treegen.engine import Branch, DraftModel, DraftTree, Engine, Sample, Sampling, Speculate
from treegen.integrations import HFModel

SAMPLING = Sampling(0.5, top_k=5, seed=2)


def likely(model: Any, text: Sequence[int], count: int) -> list[int]:
    return generated(model, [*text], max_new_tokens=count)[0]


class Checked(DraftModel):
    """Compares its drafts, called by the host or on the device, with the model's greedy tokens."""

    def __init__(self, depth: int, name: str = "Llama", seed: int = 0, **options: Any) -> None:
        super().__init__(HFModel(tiny(name, seed)), (1,) * depth, **options)
        self.model, self.depth = tiny(name, seed), depth
        self.checked = {"host": 0, "device": 0}
        self.trouble = 0

    def __call__(self, texts: Sequence[Sequence[int]], most: int) -> list[DraftTree]:
        found = super().__call__(texts, most)
        for text, own in zip(texts, found, strict=True):
            assert own.tokens == likely(self.model, text, min(most, self.depth))
            self.checked["host"] += 1
        return found

    def drafts_after(
        self, branches: Sequence[Branch], texts: torch.Tensor, lengths: torch.Tensor, most: int
    ) -> torch.Tensor:
        found = super().drafts_after(branches, texts, lengths, most)
        for text, length, own in zip(texts.tolist(), lengths.tolist(), found.tolist(), strict=True):
            assert own[: self.depth] == likely(self.model, text[:length], min(most, self.depth))
            assert own[self.depth :] == [text[length - 1]] * (most - self.depth)
            self.checked["device"] += 1
            if self.checked["device"] == self.trouble:
                raise KeyboardInterrupt
        return found


def served(drafter: DraftModel | None, most: int = 3, n: int = 2, tokens: int = 14) -> tuple[list[Any], Engine]:
    """The samples of the prompts. Of six branches that may run, some wait for others."""
    options = {"sampling": SAMPLING, "max_new_tokens": tokens, "stop_ids": (3, 50)}
    controller = Sample(n, **options) if drafter is None else Speculate(drafter, most, n, **options)
    made = Engine(HFModel(tiny()), controller, num_pages=200, page_size=4, max_rows=100, max_branches=4)
    found = [[each.tokens for each in own] for own in made.run(PROMPTS)]
    made.sequences.check()
    return found, made


@pytest.mark.parametrize(("depth", "most", "page_size"), [(1, 1, 4), (3, 3, 1), (4, 3, 4), (3, 3, 16)])
def test_drafts_are_the_small_models_most_likely_tokens(depth: int, most: int, page_size: int) -> None:
    expected, plain = served(None)
    drafter = Checked(depth, num_pages=800 // page_size, page_size=page_size, max_texts=6)
    for _ in range(2):  # the second time by what the prefix cache has
        found, made = served(drafter, most)
        assert found == expected
        assert made.accounting.steps < plain.accounting.steps
    assert min(drafter.checked.values()) > 4


def test_drafts_of_a_model_that_is_seldom_right() -> None:
    drafter = Checked(3, "Qwen3", 4, num_pages=100, page_size=4, max_texts=6)
    assert served(drafter)[0] == served(None)[0]
    assert drafter.checked["device"] > 10


def test_texts_that_grow_and_go() -> None:
    """Random histories of texts, called by the host: appended to by accepted drafts or others, replaced, left out."""
    source = random.Random(5)
    drafter = Checked(3, num_pages=120, page_size=4, max_texts=4)
    texts = [[*prompt] for prompt in PROMPTS]
    for _ in range(12):
        for text, own in zip(texts, drafter(texts, 3), strict=True):
            accepted = source.randrange(4)
            text += [*own.tokens[:accepted], source.randrange(97)]
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


def test_more_drafts_are_asked_for_than_the_model_gives() -> None:
    """The text's last token follows; where it is accepted, the KV of what was accepted is computed."""
    text = [5, 9, 2]
    drafter = Checked(2, num_pages=60, page_size=4)
    for _ in range(6):
        text += [*drafter([text], 5)[0].tokens, text[-1], text[-1], 7]
    assert drafter.checked["host"] == 6


def test_texts_for_which_there_is_no_room_get_no_drafts() -> None:
    texts = [[number, *PROMPTS[1]] for number in range(5)]
    for options, served in (({"num_pages": 60, "max_texts": 3}, 3), ({"num_pages": 16}, 2), ({"num_pages": 4}, 0)):
        drafter = DraftModel(HFModel(tiny()), (1, 1), page_size=4, **options)
        drafts = [len(own.tokens) for own in drafter(texts, 2)]
        assert drafts == [2] * served + [0] * (5 - served)
        assert [len(own.tokens) for own in drafter(texts[3:], 2)] == [2 * (served > 0)] * 2  # the others have gone
    assert [own.tokens for own in drafter([[5], []], 2)] == [[], []]
    assert drafter([], 2) == []


def test_a_text_outgrows_the_model() -> None:
    text, drafter = [1, 2, 3], DraftModel(HFModel(tiny(max_position_embeddings=32)), (1, 1), num_pages=90, page_size=4)
    found = []
    while len(text) < 40:
        found.append(len(drafter([text], 2)[0].tokens))
        text.append(5)
    assert found == [2] * 28 + [0] * 9


@pytest.mark.parametrize("trouble", [1, 4, 9])
def test_a_drafter_that_is_stopped_goes_on(trouble: int) -> None:
    drafter = Checked(3, num_pages=200, page_size=4, max_texts=6)
    drafter.trouble = trouble
    with pytest.raises(KeyboardInterrupt):
        served(drafter)
    assert served(drafter)[0] == served(None)[0]
