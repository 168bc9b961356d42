"""Scores changed and masked on their way to the softmax: functions traced, and right on both backends."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from forests import examples, forests
from test_kernels import EVERY, shuffled_pages, tensors
from treegen import Tree
from treegen.ir.errors import InputError
from treegen.strategies import Strategy

HEADS = (4, 2)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.0, 2.0, -1.0, 5.0])
DOCUMENT = (torch.arange(400) // 9 % 3 == 0) | (torch.arange(400) < 3)
BIAS = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
GRID = (torch.arange(64)[:, None] * 7 + torch.arange(400)[None, :]) % 5 != 0


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (q_idx - kv_idx) // 8 - (kv_idx - q_idx) % 3


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


def gridded(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return GRID[b, kv_idx] & ~((h == 1) ^ (kv_idx < 7)) | (kv_idx == q_idx)


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


@pytest.mark.parametrize("strategy", [*EVERY, "flashforge", "cohort", "auto"], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_torch_backend_with_every_strategy(name: str, strategy: str | Strategy) -> None:
    rows = [(0, 20), (1, 0), (1, 40), (2, 33), (2, 7), (3, 0), (4, 1), (5, 2), (6, 50), (6, 50)]
    tree = Tree.from_parents([-1, 0, 0, 2, 1, 1, -1], [20, 40, 33, 0, 1, 7, 50], rows=rows)
    tree, pages = shuffled_pages(tree, 4, seed=1)
    verified(tree, pages, 4, strategy=strategy, backend="torch", **OPTIONS[name])


TRITON = [(name, strategy) for index, name in enumerate(OPTIONS) for strategy in (EVERY[index % 9], EVERY[-index % 9])]


@pytest.mark.parametrize(("name", "strategy"), TRITON, ids=str)
def test_triton_backend(name: str, strategy: Strategy) -> None:
    rows = [(0, 20), (1, 0), (1, 40), (2, 33), (2, 7), (3, 70)]
    tree = Tree.from_parents([-1, 0, 0, -1], [20, 40, 33, 70], rows=rows)
    tree, pages = shuffled_pages(tree, 16, seed=2)
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
