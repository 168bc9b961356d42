"""Sampling: the distribution of tokens, what top_k and top_p keep, and noise that only labels and positions decide."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from support.full_tests import others_full
from treegen.codegen.aot import ARCHITECTURES, device_of
from treegen.codegen.compile_counter import expected_compiles
from treegen.engine import Sampling
from treegen.engine.sampling import kept, launch_draws, plain_draws
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


@pytest.mark.parametrize("dtype", others_full([torch.bfloat16, torch.float16, torch.float32], 3), ids=str)
@pytest.mark.parametrize("vocabulary", [3, 1003, 40_001])
def test_the_kernel_draws_the_same_tokens(vocabulary: int, dtype: torch.dtype) -> None:
    """Also of rows that lie apart, and of numbers that are negative, tiny, -inf or equal to others."""
    source = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(6, 2 * vocabulary, generator=source)[:, :vocabulary].mul(3).to(dtype)
    logits[1] -= 90
    logits[2] = torch.where(logits[2] > 0, logits[2] * 1e-30, -torch.inf).to(dtype)
    logits[3] = logits[3].round()
    logits[4, vocabulary // 2 :] = -torch.inf
    logits[5] = 0
    uniform = torch.rand(6, generator=source, dtype=torch.float64)
    usual = (1.3, 0, 1.0), (0.7, 2, 1.0), (1.0, 0, 0.8), (2.0, 40, 0.51)
    for options in (*usual, (1e-20, 0, 1.0), (1.0, 0, 1e-60), (1e30, 10**30, 1)):
        sampling = Sampling(*options)
        assert torch.equal(launch_draws(logits, uniform, sampling), plain_draws(logits, uniform, sampling)), options


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, which interprets
def test_the_kernel_finds_no_token_where_there_are_no_probabilities() -> None:
    logits = torch.zeros(4, 300)
    logits[0, 5], logits[1], logits[2, 7], logits[3, :299] = torch.nan, -torch.inf, torch.inf, -torch.inf
    for options in ((1.0, 0, 1.0), (1.0, 5, 0.5)):
        drawn = launch_draws(logits, torch.full((4,), 0.5, dtype=torch.float64), Sampling(*options))
        assert drawn.tolist() == [300, 300, 300, 299]


def test_the_kernel_finds_a_token_for_the_largest_number() -> None:
    """Rounding may make the sum of all weights more than the last cumulated one."""
    logits = torch.randn(64, 2000, generator=torch.Generator().manual_seed(0)).mul(4)
    logits[:, 1900:] = -torch.inf
    drawn = launch_draws(logits, torch.full((64,), 1 - 2.0**-53, dtype=torch.float64), Sampling(1.0))
    assert (drawn < 1900).all()


def test_the_kernel_passes_by_tokens_whose_cumulated_weight_is_no_more_than_the_number() -> None:
    logits = torch.zeros(3, 40_000)
    logits[1:, :20_000] = -torch.inf
    logits[0, 4:] = -torch.inf
    uniform = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    assert launch_draws(logits, uniform, Sampling(1.0)).tolist() == [2, 20_000, 30_000]


def compiles(architecture: int, dtype: torch.dtype, unused_bits: int) -> bool:
    """Says whether there is a kernel; runs in a process where Triton does not interpret."""
    from treegen.backends.sampling_kernels import draw_tokens

    uniform, tokens = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    arguments = torch.zeros(4, 1000, dtype=dtype), uniform, tokens, 1000, 1000, 0.7, 20, 0.9
    with device_of(architecture), expected_compiles():
        made: Any = draw_tokens.warmup(*arguments, True, True, unused_bits, 16384, grid=(1,), num_warps=32)
    return bool(made.asm["cubin"])


@pytest.mark.parametrize("kind", others_full([(torch.bfloat16, 16), (torch.float16, 13), (torch.float32, 0)], 3))
def test_the_kernel_compiles_for_every_architecture(
    kind: tuple[torch.dtype, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        calls = [pool.submit(compiles, architecture, *kind) for architecture in ARCHITECTURES]
        assert all(call.result() for call in calls)


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
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": 1e31}, {"top_k": -1}, {"top_k": 1.5},
     {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}, {"seed": 0.5}],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Sampling(**options)  # type: ignore[arg-type]
