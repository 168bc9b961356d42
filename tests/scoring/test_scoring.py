"""Scores changed and masked on their way to the softmax: functions traced, and right on both backends."""

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.attention_inputs import EVERY, tensors
from support.forests import examples, forests
from support.kv_caches import in_pages
from support.score_functions import BIAS, GRID, gridded
from treegen import Shape, Tree
from treegen.ir.errors import InputError
from treegen.scoring.options import ScoreOptions, Scoring
from treegen.strategies import Strategy, batch_invariant

HEADS = (4, 2)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.0, 2.0, -1.0, 5.0])
WORDS = torch.tensor([0x12345679, -0x789ABCDE, -1], dtype=torch.int32)
DOCUMENT = (torch.arange(400) // 9 % 3 == 0) | (torch.arange(400) < 3)


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (q_idx - kv_idx) // 8 - (kv_idx - q_idx) % 3 + 0.1 * SLOPES[torch.floor(kv_idx / 100).int() - h]


def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where((kv_idx % 5 == 0) | (b == 1), score * 0.5, score) + BIAS[kv_idx, h]


def hiding(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where((kv_idx + h) % 3 > 0, score, -math.inf)


def functions(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    x = torch.sigmoid(score) + torch.exp(-score.abs()) + torch.sqrt(kv_idx + 1.0) / (1 + b)
    y = torch.maximum(x, score).clamp(min=-2, max=30) + torch.sin(score) * torch.cos(1.0 * h) + torch.erf(score)
    return y + torch.log(1 + score**2) + torch.floor(score) - torch.rsqrt(q_idx + 2.0) + (kv_idx + 1) ** 0.3


def constant(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 0.25 * h


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENT[kv_idx]


def bits(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (((WORDS[b % 3] >> (kv_idx & 31)) & 1) == 1) | ((torch.bitwise_right_shift(kv_idx, 6) & (b + 1)) > 0)


def nobody(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (b % 2 == 0) & (q_idx >= 0)


OPTIONS: dict[str, dict[str, Any]] = {
    "soft-cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "window": {"window_left": 12},
    "own token alone": {"window_left": 0},
    "sinks": {"sinks": SINKS},
    "relative": {"score_mod": relative},
    "biased": {"score_mod": biased},
    "hiding": {"score_mod": hiding},
    "functions": {"score_mod": functions},
    "constant": {"score_mod": constant},
    "document": {"mask_mod": document},
    "gridded": {"mask_mod": gridded},
    "bits": {"mask_mod": bits},
    "nobody": {"mask_mod": nobody},
    "all": {
        "logits_soft_cap": 3.0, "alibi_slopes": SLOPES, "window_left": 40, "sinks": SINKS,
        "score_mod": biased, "mask_mod": gridded,
    },
}  # fmt: skip


def verified(tree: Tree, pages: int, page_size: int, **options: Any) -> treegen.Kernel:
    q, k, v = tensors(tree, pages, page_size, HEADS, 64, torch.float32, pad_pages=False)
    kernel = treegen.compile(tree, **options)
    report = kernel.verify(q, k, v)
    assert report.passed, str(report)
    return kernel


@pytest.mark.parametrize("strategy", [*EVERY, "flashforge", "cohort", "auto", batch_invariant(128)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_torch_backend_with_every_strategy(name: str, strategy: str | Strategy) -> None:
    rows = [(0, 20), (1, 0), (1, 40), (2, 33), (2, 7), (3, 0), (4, 1), (5, 2), (6, 50), (6, 50)]
    tree = Tree.from_parents([-1, 0, 0, 2, 1, 1, -1], [20, 40, 33, 0, 1, 7, 50], rows=rows)
    tree, pages = in_pages(tree, 4, seed=1)
    verified(tree, pages, 4, strategy=strategy, backend="torch", **OPTIONS[name])


SOME = (*EVERY, batch_invariant(128))
TRITON = [(name, SOME[index % 10]) for index, name in enumerate(OPTIONS)]
TRITON += [pytest.param(name, SOME[-index % 10], marks=pytest.mark.full) for index, name in enumerate(OPTIONS)]


@pytest.mark.parametrize(("name", "strategy"), TRITON, ids=str)
def test_triton_backend(name: str, strategy: Strategy) -> None:
    rows = [(0, 20), (1, 0), (1, 40), (2, 33), (2, 7), (3, 70)]
    tree = Tree.from_parents([-1, 0, 0, -1], [20, 40, 33, 70], rows=rows)
    tree, pages = in_pages(tree, 16, seed=2)
    verified(tree, pages, 16, strategy=strategy, backend="triton", **OPTIONS[name])


@pytest.mark.parametrize("strategy", ["query", "deft-node", "cohort", "fasttree", "deft-flatten", "medusa"])
@given(forest=forests(max_nodes=12, max_tokens=40), window=st.integers(0, 60))
@examples(25)
def test_windows_on_random_forests(strategy: str, forest: Tree, window: int) -> None:
    if not forest.num_rows:
        return
    slots = forest.kv.last_slot + 1
    kernel = verified(forest, max(slots, 1), 1, strategy=strategy, backend="torch", window_left=window)
    whole = treegen.compile(forest, strategy=strategy, backend="torch", shape=kernel.shape)
    assert kernel.estimate.kv_hbm_bytes <= whole.estimate.kv_hbm_bytes


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "own token alone"])
def test_each_changes_the_result(name: str) -> None:
    tree = Tree.parse("60(40*3)")
    q, k, v = tensors(tree, 180, 1, HEADS, 64, torch.float32, pad_pages=False)
    plain = treegen.compile(tree, backend="torch")(q, k, v)
    assert not torch.allclose(treegen.compile(tree, backend="torch", **OPTIONS[name])(q, k, v), plain, atol=1e-3)


def test_a_window_is_not_read_outside_of() -> None:
    tree = Tree.parse("4000(100*16)")
    kernel = verified(tree, 5600, 1, strategy="deft-node", backend="torch", window_left=149)
    whole = treegen.compile(tree, strategy="deft-node", backend="torch", shape=kernel.shape)
    per_token = kernel.shape.kv_token_bytes
    assert whole.estimate.kv_hbm_bytes == (4000 + 1600) * per_token
    assert kernel.estimate.kv_hbm_bytes == (50 + 1600) * per_token
    assert "scores: window of 149 tokens before a row's own (3950 of 5600 tokens are in no window)" in kernel.explain()
    # Rows of different depths: what a group reads begins where the first of its rows' windows does.
    ragged = Tree.from_parents([-1, 0, 0], [1000, 10, 300])
    alone = verified(ragged, 1310, 1, strategy="query", backend="torch", window_left=20)
    assert alone.estimate.kv_hbm_bytes == 2 * 21 * alone.shape.kv_token_bytes


def test_tuning_is_for_what_the_window_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tree] = []
    monkeypatch.setattr("treegen.api.compile.check_tuning", lambda *arguments: None)
    monkeypatch.setattr("treegen.runtime.planner.tuned", lambda problem: given.append(problem.tree))
    shape = treegen.Shape(4, 2, 64)
    treegen.compile(Tree.parse("4000(100*16)"), shape=shape, autotune=True, window_left=149)
    assert [tree.unique_tokens for tree in given] == [50 + 1600]


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.full)])
def test_updates_capacity_and_edits(backend: str) -> None:
    trees = [Tree.parse("40(9*3)"), Tree.parse("33(50*2)+7"), Tree.parse("90"), Tree.parse("1(2(3*2)*2)")]
    options = {"window_left": 30, "score_mod": biased, "sinks": SINKS, "backend": backend}
    for limits in ({}, {"max_rows": 8}):
        kernel = treegen.compile(trees[0], strategy="deft-node", **options, **limits)
        for tree in trees:
            kernel.update(tree)
            q, k, v = tensors(tree, 400, 1, HEADS, 64, torch.float32, pad_pages=False)
            assert kernel.verify(q, k, v).passed
        for step in range(3):
            fresh = 100 + 10 * np.arange(4)[:, None] + 3 * step + np.arange(1 + step)
            kernel.append(tokens=1 + step, slots=fresh)
            assert kernel.tree.unique_tokens > trees[-1].unique_tokens
            assert kernel.verify(q, k, v).passed
        kernel.step(slots=[200, 300, 17, 250])
        kernel.branch(1, 2)
        q = torch.cat([q, q[:1]])
        assert kernel.verify(q, k, v).passed


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_is_written_into_tensors_counts(backend: str) -> None:
    tree, slopes = Tree.parse("30(9*3)"), SLOPES.clone()
    kernel = treegen.compile(tree, backend=backend, alibi_slopes=slopes)
    q, k, v = tensors(tree, 57, 1, HEADS, 64, torch.float32, pad_pages=False)
    before = kernel(q, k, v)
    slopes *= -3
    assert kernel.verify(q, k, v).passed
    assert not torch.equal(kernel(q, k, v), before)


def test_kernels_know_scalars_and_no_sizes() -> None:
    def scaled(factor: float, table: torch.Tensor) -> treegen.Kernel:
        return treegen.compile(
            Tree.parse("30(9*3)"),
            score_mod=lambda score, b, h, q_idx, kv_idx: score * factor + table[b] + torch.tensor(0.5),
        )

    first = scaled(2.0, torch.zeros(3)).source
    assert "captured_0_size_0" in first
    assert scaled(2.0, torch.zeros(30)).source == first
    assert scaled(3.0, torch.zeros(3)).source != first
    assert scaled(2.0, torch.zeros(3, dtype=torch.int64)).source != first


def branching(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    if q_idx > kv_idx:
        return score
    return 0 * score


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "branch": ({"score_mod": branching}, r"score_mod = test_scoring.py:\d+ `if q_idx > kv_idx:`: needs a value"),
    "and": ({"mask_mod": lambda b, h, q_idx, kv_idx: q_idx > 3 and kv_idx > 3}, "mask_mod = test_scoring.py"),
    "math": ({"score_mod": lambda score, *_: math.tanh(score)}, "needs a value"),
    "unknown": ({"score_mod": lambda score, *_: torch.nn.functional.gelu(score)}, "calls gelu"),
    "method": ({"score_mod": lambda score, *_: score.round()}, "calls round"),
    "tensor": ({"score_mod": lambda score, *_: score + SLOPES}, r"takes a tensor of shape \(4,\) as a whole"),
    "indices": ({"score_mod": lambda score, b, h, q, t: score + GRID[b]}, "with 1 indices"),
    "float index": ({"score_mod": lambda score, b, h, q, t: score + SLOPES[score]}, "not an integer"),
    "float64": ({"score_mod": lambda score, b, h, q, t: score + SLOPES.double()[h]}, "torch.float64"),
    "bits of numbers": ({"mask_mod": lambda b, h, q, t: (b | 1) == 0}, "takes bitwise or of numbers"),
    "bits of a score": (
        {"score_mod": lambda score, *_: score & 1},
        "takes bitwise and of numbers that are not",
    ),
    "shifted score": ({"score_mod": lambda score, *_: score >> 1}, "takes bitwise right_shift of numbers that"),
    "string": ({"score_mod": lambda score, *_: "score"}, "uses str"),
    "error inside": ({"score_mod": lambda score, *_: [][1]}, "IndexError"),
    "arity": ({"score_mod": lambda score: score}, "TypeError"),
    "no function": ({"mask_mod": 3}, "is not a function"),
    "cap": ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
    "infinite cap": ({"logits_soft_cap": math.inf}, "logits_soft_cap"),
    "window": ({"window_left": -2}, "window_left"),
    "half a window": ({"window_left": 1.5}, "window_left"),
    "slopes": ({"alibi_slopes": [0.5]}, "alibi_slopes"),
    "whole sinks": ({"sinks": torch.zeros(4, dtype=torch.int32)}, "sinks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        treegen.compile(Tree.parse("30(9*3)"), **options)


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_heads_have_to_match(name: str) -> None:
    tree = Tree.parse("30(9*3)")
    with pytest.raises(InputError, match="4 query heads"):
        treegen.compile(tree, shape=treegen.Shape(4, 2, 64), **{name: torch.zeros(3)})
    kernel = treegen.compile(tree, **{name: torch.zeros(3)})
    with pytest.raises(InputError, match="4 query heads"):
        kernel(*tensors(tree, 57, 1, HEADS, 64, torch.float32, pad_pages=False))


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
@pytest.mark.parametrize("made", [torch.Tensor.to_sparse, lambda dense: dense.to("meta")], ids=["sparse", "meta"])
def test_tensors_have_to_be_dense(name: str, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(InputError, match=f"{name} = a .*tensor.*: has no values"):
        treegen.compile(Tree.parse("30(9*3)"), shape=treegen.Shape(4, 2, 64), **{name: made(torch.ones(4))})


def test_options_that_do_nothing_make_the_plain_kernel() -> None:
    tree = Tree.parse("30(9*3)")
    plain = treegen.compile(tree).source
    identity = treegen.compile(tree, logits_soft_cap=0, window_left=-1, score_mod=lambda score, *_: score * 1)
    assert identity.source == plain
    everything = treegen.compile(tree, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx >= 0)
    q, k, v = tensors(tree, 57, 1, HEADS, 64, torch.float32, pad_pages=False)
    assert everything.verify(q, k, v).passed


def test_source(golden: Any) -> None:
    tree = Tree.parse("30(9*3)")
    shape = treegen.Shape(4, 2, 64, dtype="fp16")
    options = {"logits_soft_cap": 30.0, "window_left": 100, "sinks": SINKS, "score_mod": biased}
    golden(treegen.compile(tree, strategy="deft-node", shape=shape, **options).source)


@pytest.mark.parametrize("function", [treegen.compile, treegen.compile_batch])
def test_both_functions_take_every_score_option(function: Callable[..., Any]) -> None:
    taken = inspect.signature(function).parameters
    assert {field.name: field.default for field in fields(ScoreOptions)} == {
        field.name: taken[field.name].default for field in fields(ScoreOptions) if field.name in taken
    }


PREFIX = torch.tensor([3, 40, 70, 140, 0, 16, 200, 64])


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q_idx, kv_idx: (kv_idx < PREFIX[b]) | ((kv_idx + h) % 3 == 0),
        lambda b, h, q_idx, kv_idx: (PREFIX[b] + h > kv_idx) | (kv_idx % 2 == 0),
        lambda b, h, q_idx, kv_idx: (kv_idx - q_idx + 20 < 0) | (kv_idx == q_idx),
    ],
)
def test_masks_that_are_true_below_a_position(mask: Callable[..., Any]) -> None:
    scoring = Scoring.of(ScoreOptions(mask_mod=mask))
    assert scoring is not None
    assert scoring.code is not None
    assert scoring.code.seen_below
    tree, pages = in_pages(Tree.from_levels([1, 2, 8], [128, 64, 21]), 16, 1)
    for strategy in ("query", "deft-node", "cohort"):
        verified(tree, pages, 16, strategy=strategy, backend="triton", mask_mod=mask)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q_idx, kv_idx: (kv_idx > PREFIX[b]) | (kv_idx % 3 == 0),
        lambda b, h, q_idx, kv_idx: (2 * kv_idx < PREFIX[b]) | (kv_idx % 3 == 0),
        lambda b, h, q_idx, kv_idx: (kv_idx < PREFIX[b]) & (kv_idx % 3 == 0),
        lambda b, h, q_idx, kv_idx: kv_idx < PREFIX[torch.clamp(kv_idx, max=7)],
    ],
)
def test_other_masks_are_read_for_all_tiles(mask: Callable[..., Any]) -> None:
    scoring = Scoring.of(ScoreOptions(mask_mod=mask))
    assert scoring is not None
    assert scoring.code is not None
    assert not scoring.code.seen_below


POWERS: dict[str, Callable[..., Any]] = {
    "of two": lambda score, b, h, q_idx, kv_idx: score + 2 ** (kv_idx % 5),
    "slopes": lambda score, b, h, q_idx, kv_idx: score + 2 ** (-8 * (h + 1) / 4) * (kv_idx - q_idx),
    "signs": lambda score, b, h, q_idx, kv_idx: score * (-1) ** kv_idx,
    "of positions": lambda score, b, h, q_idx, kv_idx: score + (kv_idx + 1) ** h,
    "below 0": lambda score, b, h, q_idx, kv_idx: score + (kv_idx - 3) ** h,
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", POWERS)
def test_powers(name: str, backend: str) -> None:
    tree, shape = Tree.from_levels([1, 3], [10, 3]), Shape(4, 2, 16, dtype="fp32")
    kernel = treegen.compile(tree, shape=shape, score_mod=POWERS[name], backend=backend)
    torch.manual_seed(0)
    q, keys, values = torch.randn(3, 4, 16), *torch.randn(2, 20, 2, 16)
    out, lse = kernel(q, keys, values, return_lse=True)
    rows = [[*range(10), *range(10 + 3 * row, 13 + 3 * row)] for row in range(3)]
    for row, slots in enumerate(rows):
        for head in range(4):
            scores = keys[slots, head // 2] @ q[row, head] / 4
            changed = [
                POWERS[name](score, row, head, len(slots) - 1, place) for place, score in enumerate(scores.tolist())
            ]
            weights = torch.tensor(changed, dtype=torch.float64)
            torch.testing.assert_close(lse[row, head].double(), weights.logsumexp(0), rtol=1e-5, atol=1e-5)
            expected = weights.softmax(0) @ values[slots, head // 2].double()
            torch.testing.assert_close(out[row, head].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("base", [2, 3, 5, 10])
def test_powers_of_whole_numbers_are_whole(base: int, backend: str) -> None:
    """Masks may compare them."""
    tree, shape = Tree.from_parents([-1], [130], rows=[(0, 130)]), Shape(4, 2, 16, dtype="fp32")
    masks = (lambda b, h, q_idx, kv_idx: kv_idx == base**h, lambda b, h, q_idx, kv_idx: kv_idx < base ** (h - 1))
    torch.manual_seed(0)
    q, keys, values = torch.randn(1, 4, 16), *torch.randn(2, 130, 2, 16)
    for mask in masks:
        out = treegen.compile(tree, shape=shape, mask_mod=mask, backend=backend)(q, keys, values)
        for head in range(4):
            seen = [place for place in range(130) if mask(0, head, 129, place)]
            weights = (keys[seen, head // 2] @ q[0, head] / 4).softmax(0)
            torch.testing.assert_close(out[0, head], weights @ values[seen, head // 2], rtol=1e-4, atol=1e-4)


def test_sinks_lie_one_after_another() -> None:
    tree, shape = Tree.from_levels([1, 3], [10, 3]), Shape(4, 2, 16, dtype="fp32")
    with pytest.raises(InputError, match=r"sinks = strides \(2,\): is not contiguous; give sinks.contiguous"):
        treegen.compile(tree, shape=shape, sinks=torch.zeros(8)[::2])


def test_copies_of_isolated_kernels_are_isolated() -> None:
    tree, shape = Tree.from_parents([-1], [12], rows=[(0, 12)] * 4), Shape(2, 1, 16, dtype="fp32")
    kernel = treegen.compile(tree, isolated=True, mask_mod=_hides_another, shape=shape)
    q, keys, values = torch.randn(4, 2, 16), torch.randn(12, 1, 16), torch.randn(12, 1, 16)
    values[9] = float("nan")  # hidden from row 2 alone
    for made in (kernel, copy.copy(kernel), copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert made(q, keys, values)[2].isfinite().all()


def _hides_another(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx != q_idx - b
