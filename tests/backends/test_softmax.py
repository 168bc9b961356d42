"""What every backend, the unfused path and the oracle make of scores at the edges: NaN in slots that no row sees,
scores and sinks so low that they hide their token, and weights that sum to 1 however large scores are.
"""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import treegen
from support.attention_inputs import tensors
from support.full_tests import others_full
from treegen import KVRuns, Shape, Tree
from treegen.backends import oracle
from treegen.backends.softmax import LEAST_SCORE
from treegen.codegen.emit import emit_merge, emit_partial
from treegen.codegen.merge_forms import invariant_merge_key
from treegen.codegen.partial_keys import KernelOptions, kernel_key
from treegen.scoring.options import ScoreOptions
from treegen.strategies import Strategy, batch_invariant, cohort, deft_flatten, deft_node, medusa, query
from treegen.target.targets import target_from
from treegen.target.tile_config import kernel_config

BACKENDS = ["triton", "torch"]
STRATEGIES = (query(), deft_node(), cohort(), cohort(split=16), deft_flatten(32, "bits"), medusa(), batch_invariant())
HEADS = (2, 1)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_of_no_node_are_not_read(backend: str, strategy: Strategy) -> None:
    """Nodes of 2 and 3 tokens: the shorter one is padded."""
    tree = Tree.from_parents([-1, -1], [2, 3], kv=[[1, 2], [3, 4, 5]])
    q, k, v = tensors(tree, 7, 1, HEADS, 16, torch.float32, pad_pages=False)
    for cache in (k, v):
        cache[[0, 6]] = math.nan
    assert treegen.compile(tree, strategy=strategy, backend=backend).verify(q, k, v).passed


@pytest.mark.parametrize("seed", range(20))
def test_page_tables_without_page_zero(seed: int) -> None:
    source = np.random.default_rng(seed)
    lengths = source.integers(1, 60, size=6)
    counts = -(-lengths // 4)
    pages = np.split(1 + source.permutation(int(counts.sum())), np.cumsum(counts))[:-1]
    tree = Tree.from_parents([-1] * 6, lengths, kv=KVRuns.from_pages(lengths, pages, 4))
    q, k, v = tensors(tree, int(counts.sum()) + 1, 4, HEADS, 16, torch.float32, pad_pages=False)
    for cache in (k, v):
        cache[0] = math.nan
    for strategy in STRATEGIES:
        assert treegen.compile(tree, strategy=strategy, backend="torch").verify(q, k, v).passed


@pytest.mark.parametrize("strategy", [query(), query(16), cohort(split=32), medusa(), batch_invariant(128)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", [-1e9, 1e9, -1e6, 1e6, 1e20])
def test_equal_scores_give_the_mean(score: float, backend: str, strategy: Strategy) -> None:
    """64 tokens, whole or in equal parts, whose lse do not tell how many tokens they have."""
    tree = Tree.from_parents([-1], [64])
    q, k, v = tensors(tree, 64, 1, HEADS, 16, torch.float32, pad_pages=False)
    q[:], k[:] = 0, 0
    q[..., 0], k[..., 0] = 1e3, score / 1e3
    out, lse = treegen.compile(tree, strategy=strategy, backend=backend, sm_scale=1.0)(q, k, v, return_lse=True)
    torch.testing.assert_close(out, v.mean(0, keepdim=True).expand_as(out), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, torch.full_like(lse, score + math.log(64)))
    assert treegen.compile(tree, strategy=strategy, backend=backend, sm_scale=1.0).verify(q, k, v).passed


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_takes_its_share_of_large_scores(backend: str) -> None:
    """One score and a sink, alike, have half of the weights each, though the log-sum-exp does not tell."""
    tree = Tree.from_parents([-1], [1])
    q, k, v = tensors(tree, 1, 1, HEADS, 16, torch.float32, pad_pages=False)
    q[:], k[:] = 0, 0
    q[..., 0], k[..., 0] = 1e3, -1e6
    kernel = treegen.compile(tree, strategy="query", backend=backend, sm_scale=1.0, sinks=torch.tensor([-1e9, -2e9]))
    out = kernel(q, k, v)
    torch.testing.assert_close(out[0, 0], v[0, 0] / 2)
    torch.testing.assert_close(out[0, 1], v[0, 0])


def scores_of(level: float, **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Results of all strategies on both backends, the oracle's first, where every product of q and k is `level`."""
    tree = Tree.from_parents([-1, -1, 1], [32, 0, 3], rows=[(0, 0), (1, 0), (0, 32), (2, 3)])
    q, k, v = tensors(tree, 35, 1, HEADS, 16, torch.float32, pad_pages=False)
    q[:], k[:] = 0, 0
    q[..., 0], k[..., 0] = 1e12, level / 1e12
    found = []
    for strategy in STRATEGIES:
        for backend in BACKENDS:
            kernel = treegen.compile(tree, strategy=strategy, backend=backend, **options)
            found.append(kernel(q, k, v, return_lse=True))
            assert kernel.verify(q, k, v).passed, f"{strategy} {backend}"
    return found


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("sm_scale", others_full([None, 1e-6, 3.0]))
@pytest.mark.parametrize("factor", [0.99, 1.01, 1e3])
def test_products_below_the_least_hide_their_token(factor: float, sm_scale: float | None) -> None:
    for out, lse in scores_of(factor * LEAST_SCORE, sm_scale=sm_scale):
        assert out[:2].eq(0).all()
        assert lse[:2].eq(-math.inf).all()
        assert out[2:].eq(0).all() == (factor > 1)
        assert lse[2:].eq(-math.inf).all() == (factor > 1)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("sm_scale", others_full([1.0, 1e-6, 3.0]))
@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_scores_below_the_least_hide_their_token(factor: float, sm_scale: float) -> None:
    """Where scores are masked or changed: what is compared is the score, times sm_scale."""
    for option in ({"window_left": 100}, {"score_mod": lambda score, b, h, q_idx, kv_idx: score + 1}):
        for out, lse in scores_of(factor * LEAST_SCORE / sm_scale, sm_scale=sm_scale, **option):
            assert out[2:].eq(0).all() == (factor > 1)
            assert lse[2:].eq(-math.inf).all() == (factor > 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_finfo_min_masks(backend: str) -> None:
    tree = Tree.parse("30(5,9)")
    q, k, v = tensors(tree, 44, 1, HEADS, 16, torch.float32, pad_pages=False)
    least = torch.finfo(torch.float32).min

    def by_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where((kv_idx % 3 == 0) & (b == 0), score, least)

    def by_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx % 3 == 0) & (b == 0)

    for strategy in STRATEGIES:
        of_score = treegen.compile(tree, strategy=strategy, backend=backend, score_mod=by_score)
        of_mask = treegen.compile(tree, strategy=strategy, backend=backend, mask_mod=by_mask)
        for found, expected in zip(of_score(q, k, v, return_lse=True), of_mask(q, k, v, return_lse=True), strict=True):
            torch.testing.assert_close(found, expected)
        assert of_mask(q, k, v)[1].eq(0).all()
        assert of_score.verify(q, k, v).passed


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("sm_scale", others_full([None, 0.0, 10.0]))
@pytest.mark.parametrize("sink", others_full([-math.inf, -1e20, 0.99 * LEAST_SCORE, -3e38, 1.01 * LEAST_SCORE]))
def test_sinks_of_rows_that_see_nothing(sink: float, sm_scale: float | None) -> None:
    """Rows that a merge writes, and in a kernel of fixed capacity work items without tiles."""
    tree = Tree.from_parents([-1, -1, 1], [40, 0, 3], rows=[(0, 0), (1, 0), (0, 40), (2, 3)])
    q, k, v = tensors(tree, 43, 1, HEADS, 16, torch.float32, pad_pages=False)
    options = {"sinks": torch.tensor([sink, 0.0]), "sm_scale": sm_scale}
    cases = [(strategy, None) for strategy in STRATEGIES] + [(cohort(), 8), (deft_node(), 8)]
    for strategy, rows in cases:
        for backend in BACKENDS:
            kernel = treegen.compile(tree, strategy=strategy, backend=backend, max_rows=rows, **options)
            out, lse = kernel(q, k, v, return_lse=True)
            assert out[:2].eq(0).all()
            assert out.isfinite().all()
            expected = sink if sink >= LEAST_SCORE else -math.inf
            torch.testing.assert_close(lse[:2], torch.tensor([[expected, 0.0]] * 2))
            assert kernel.verify(q, k, v).passed, f"{strategy} {backend}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_score_that_is_not_a_number_shows_in_out_and_lse(backend: str) -> None:
    tree = Tree.parse("30(5,9)")
    q, k, v = tensors(tree, 44, 1, HEADS, 16, torch.float32, pad_pages=False)
    k[3] = math.nan  # both rows see it
    for strategy in STRATEGIES:
        for sinks in (None, torch.zeros(HEADS[0])):
            kernel = treegen.compile(tree, strategy=strategy, backend=backend, sinks=sinks)
            out, lse = kernel(q, k, v, return_lse=True)
            assert out.isnan().all(), f"{strategy}"
            assert lse.isnan().all(), f"{strategy}"


def test_kernels_have_the_same_least_score() -> None:
    shape = Shape(*HEADS, 16, dtype="fp16")
    partial = emit_partial(
        kernel_key(kernel_config(shape, target_from("h200"), 64), shape, options=KernelOptions(sinks=True))
    )
    merge = emit_merge(invariant_merge_key(shape, sinks=True))
    for source in (partial, merge):
        constants = dict(re.findall(r"^(\w+) = tl\.constexpr\((.*)\)$", source.text, re.MULTILINE))
        assert float(constants["LEAST_SCORE"]) == LEAST_SCORE


def test_the_oracle_keeps_values_from_rows_that_do_not_see_them() -> None:
    tree = Tree.parse("30(5,9)")
    q, k, v = tensors(tree, 44, 1, HEADS, 16, torch.float32, pad_pages=False)
    options = oracle.OracleOptions(scores=ScoreOptions(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx != 3))
    expected = oracle.reference(tree, q, k, v, options)
    v[3], v[31] = math.nan, math.inf
    out, lse = oracle.reference(tree, q, k, v, options)
    assert out[0].eq(math.inf).all()
    assert torch.equal(out[1], expected[0][1])
    assert torch.equal(lse, expected[1])
