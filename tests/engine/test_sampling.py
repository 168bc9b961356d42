"""Sampling: the distribution of tokens, what top_k and top_p keep, and noise that only labels and positions decide."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from treegen.engine import Sampling
from treegen.engine.sampling import kept
from treegen.ir.errors import InputError

LOGITS = torch.tensor([1.0, 0.0, 3.0, 2.0, -1.0])


def test_tokens_have_their_probabilities() -> None:
    draws = 6000
    sampling = Sampling(temperature=1.5, seed=3)
    tokens = sampling.draw(LOGITS.expand(draws, -1), [(0, i) for i in range(draws)], [7] * draws)
    expected = (LOGITS / 1.5).double().softmax(-1).numpy() * draws
    assert chisquare(np.bincount(tokens, minlength=5), expected * draws / expected.sum()).pvalue > 1e-3


def test_no_temperature_takes_the_most_likely_token() -> None:
    assert Sampling().draw(torch.stack([LOGITS, -LOGITS]), [(0,), (1,)], [1, 1]) == [2, 4]


def test_top_k_and_top_p_keep_the_most_likely_tokens() -> None:
    def left(top_k: int, top_p: float) -> list[int]:
        return kept(LOGITS[None], top_k, top_p)[0].isfinite().nonzero()[:, 0].tolist()

    probabilities = LOGITS.softmax(-1)
    assert left(0, 1.0) == [0, 1, 2, 3, 4]
    assert left(2, 1.0) == [2, 3]
    assert left(9, 1.0) == [0, 1, 2, 3, 4]
    assert left(0, float(probabilities[2]) - 1e-3) == [2]
    assert left(0, float(probabilities[2]) + 1e-3) == [2, 3]
    assert left(3, 0.99) == [0, 2, 3]
    tied = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert [kept(tied, *options)[0].isfinite().sum() for options in ((1, 1.0), (2, 0.2), (0, 0.3), (4, 0.99))] == [
        3, 3, 3, 4
    ]  # fmt: skip
    sampling = Sampling(temperature=5.0, top_k=2)
    assert set(sampling.draw(LOGITS.expand(200, -1), [(i,) for i in range(200)], [0] * 200)) == {2, 3}


def test_noise_follows_from_seed_label_and_position() -> None:
    rows = [((0, 1), 5), ((0, 2), 5), ((0, 1), 6), ((3,), 5)]
    scores = torch.zeros(4, 1000)
    drawn = Sampling(1.0, seed=1).draw(scores, [label for label, _ in rows], [place for _, place in rows])
    assert len(set(drawn)) == 4
    for (label, place), token in zip(rows, drawn, strict=True):
        assert Sampling(1.0, seed=1).draw(scores[:1], [label], [place]) == [token]
    assert Sampling(1.0, seed=2).draw(scores[:1], [(0, 1)], [5]) != drawn[:1]


def test_tokens_stay_the_same_in_all_versions() -> None:
    """The noise is a hash of text, which no version of a library changes."""
    labels = [(0, place) for place in range(8)]
    assert Sampling(1.0, seed=7).draw(torch.zeros(8, 100), labels, list(range(8))) == [99, 12, 70, 20, 55, 71, 78, 56]


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_k": 1.5}, {"top_p": 0.0},
     {"top_p": 1.1}, {"seed": -1}, {"seed": 0.5}],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Sampling(**options)  # type: ignore[arg-type]
