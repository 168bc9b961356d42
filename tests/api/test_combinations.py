"""Everything that a kernel may be asked for, in any combination: right against the oracle, or refused as documented."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import examples
from support.kv_caches import in_pages, normal
from support.score_functions import BIAS, gridded
from treegen import Shape, Tree, strategies
from treegen.ir.errors import InputError, ShapeError, StrategyError, TreegenError

# Head dims of 40 elements of 8 bits are not aligned, as a warning says once.
pytestmark = pytest.mark.filterwarnings("ignore::treegen.ir.errors.PerformanceWarning")
NAMES = (*strategies.strategy_names(), "auto")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
TREES = {
    "leaves": Tree.parse("40(30(5*2),17)+9"),
    "inside": Tree.from_parents([-1, 0, 0], [20, 40, 33], rows=[(0, 3), (1, 5), (1, 5), (2, 0), (2, 33), (1, 40)]),
    "drafts": Tree.parse("50(9*2)").with_drafts([[-1, 0, 0, 1], [-1, -1]], list(range(68, 74))),
    "causal": Tree.parse("30(20*2)").with_causal_queries([3, 1]),
    "none": Tree.from_parents([-1], [5], rows=[]),
}


def by_heads(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where((kv_idx % 5 == 0) | (b == 1), score * 0.5, score) + BIAS[kv_idx, h % 4]


@dataclass(frozen=True)
class Setup:
    """What is asked for: for every field some of VALUES, the first of which is plain."""

    rows: str = "leaves"
    strategy: str = "auto"
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    shared_kv: bool = False
    dtype: str = "fp32"
    kv_dtype: str = ""
    partial_dtype: str = "fp32"
    page_size: int = 1
    kv_layout: str = "NHD"
    scales: str = "none"
    sm_scale: float | None = None
    logits_soft_cap: float | None = None
    alibi: bool = False
    window_left: int = -1
    sinks: bool = False
    score_mod: bool = False
    mask_mod: bool = False
    capacity: bool = False
    batch_invariant: bool = False
    given_shape: bool = True
    lse_base: str = "ln"


VALUES: dict[str, tuple[Any, ...]] = {
    "rows": tuple(TREES),
    "strategy": ("auto", *NAMES[:-1]),
    "heads": ((4, 2), (2, 2), (6, 2), (4, 1), (3, 2)),
    "dims": ((32, 32), (48, 80), (192, 128), (40, 32)),
    "shared_kv": (False, True),
    "dtype": ("fp32", "fp16", "bf16"),
    "kv_dtype": ("", "e4m3", "e5m2"),
    "partial_dtype": ("fp32", "fp16", "bf16"),
    "page_size": (1, 4, 16),
    "kv_layout": ("NHD", "HND"),
    "scales": ("none", "numbers", "tensors", "negative"),
    "sm_scale": (None, 0.3, 0.0, -1.0),
    "logits_soft_cap": (None, 0.7, -1.0),
    "alibi": (False, True),
    "window_left": (-1, 6, 0, -2),
    "sinks": (False, True),
    "score_mod": (False, True),
    "mask_mod": (False, True),
    "capacity": (False, True),
    "batch_invariant": (False, True),
    "given_shape": (True, False),
    "lse_base": ("ln", "log2", "log10"),
}
REFUSED: dict[str, tuple[tuple[Any, ...], type[TreegenError], str]] = {
    "heads": (((3, 2),), ShapeError, "num_qo_heads"),
    "scales": (("negative",), InputError, "k_scale"),
    "sm_scale": ((-1.0,), InputError, "sm_scale"),
    "logits_soft_cap": ((-1.0,), InputError, "logits_soft_cap"),
    "window_left": ((-2,), InputError, "window_left"),
    "lse_base": (("log10",), InputError, "lse_base"),
}
"""Values that are never right, and what says so."""


def refusals(setup: Setup) -> set[tuple[type[TreegenError], str]]:
    """The errors that a setup may raise, by argument (docs/limits.md, first table). It has to raise one of them."""
    found = {(error, argument) for name, (values, error, argument) in REFUSED.items() if getattr(setup, name) in values}
    if setup.kv_dtype and setup.dtype == "fp32":
        found.add((ShapeError, "kv_dtype"))
    if setup.partial_dtype not in ("fp32", setup.dtype):
        found.add((ShapeError, "partial_dtype"))
    if setup.shared_kv and setup.dims[0] < setup.dims[1]:
        found.add((ShapeError, "shared_kv"))
    if setup.capacity and setup.strategy == "medusa":
        found.add((StrategyError, "strategy"))
    if setup.batch_invariant and setup.strategy != "auto":
        found.add((StrategyError, "strategy"))
    return found


def run(setup: Setup, backend: str) -> None:
    """Compiles and calls a kernel; raises AssertionError for a wrong result, and for one that is not refused."""
    expected = refusals(setup)
    if not expected:
        check(setup, backend)
        return
    with pytest.raises(TreegenError) as caught:
        check(setup, backend)
    assert (type(caught.value), caught.value.argument) in expected, f"{setup}: {caught.value}"


def check(setup: Setup, backend: str) -> None:
    heads, kv_heads = setup.heads
    shape = Shape(
        heads, kv_heads, *setup.dims, dtype=setup.dtype, kv_dtype=setup.kv_dtype, page_size=setup.page_size,
        kv_layout=setup.kv_layout, partial_dtype=setup.partial_dtype, shared_kv=setup.shared_kv,
    )  # fmt: skip
    tree, pages = in_pages(TREES[setup.rows], setup.page_size)
    k_sizes, v_sizes = shape.cache_sizes(pages)
    k, v = normal(*k_sizes, seed=1), normal(*v_sizes, seed=2)
    k, v = (cache.to(DTYPES.get(shape.kv_dtype, torch.float32)) for cache in (k, v))
    if setup.shared_kv:
        v = k[..., : shape.head_dim_v]
    q = normal(tree.num_rows, heads, shape.head_dim).to(DTYPES.get(shape.dtype, torch.float32))
    scales: dict[str, Any] = {
        "none": {},
        "numbers": {"k_scale": 0.5, "v_scale": 3.0},
        "tensors": {"k_scale": torch.linspace(0.5, 1, kv_heads), "v_scale": torch.linspace(1, 2, kv_heads)},
        "negative": {"k_scale": -1.0},
    }[setup.scales]
    # A shape that is not given is read off the tensors, which do not tell all of it.
    known = setup.given_shape or setup.kv_layout != "NHD" or setup.partial_dtype != "fp32" or setup.shared_kv
    kernel = treegen.compile(
        tree, strategy=setup.strategy, shape=shape if known else None, backend=backend, sm_scale=setup.sm_scale,
        logits_soft_cap=setup.logits_soft_cap, window_left=setup.window_left,
        alibi_slopes=torch.linspace(0.1, 0.6, heads) if setup.alibi else None,
        sinks=torch.linspace(-1, 2, heads) if setup.sinks else None,
        score_mod=by_heads if setup.score_mod else None, mask_mod=gridded if setup.mask_mod else None,
        max_rows=9 if setup.capacity else None, batch_invariant=setup.batch_invariant, **scales,
    )  # fmt: skip
    out, lse = kernel(q, k, v, return_lse=True, lse_base=setup.lse_base)
    assert out.shape == (tree.num_rows, heads, shape.head_dim_v)
    if not tree.num_rows:
        return
    report = kernel.verify(q, k, v)
    assert report.passed, f"{setup}: {report}"
    again, natural = kernel(q, k, v, return_lse=True)
    assert torch.equal(again, out)
    torch.testing.assert_close(lse, natural if setup.lse_base == "ln" else natural / math.log(2))


PLAIN = Setup()
ALONE = [
    replace(PLAIN, **{name: value}) for name, values in VALUES.items() if name != "strategy" for value in values[1:]
] + [
    replace(PLAIN, dims=(40, 32), shared_kv=True),
    replace(PLAIN, dtype="fp16", kv_dtype="e4m3"),
    replace(PLAIN, dtype="bf16", kv_dtype="e5m2", scales="tensors"),
    replace(PLAIN, dtype="fp16", partial_dtype="fp16"),
]  # fmt: skip


def label(setup: Setup) -> str:
    changed = {f.name: getattr(setup, f.name) for f in fields(setup) if getattr(setup, f.name) != f.default}
    return " ".join(f"{name}={value}" for name, value in changed.items()).replace(" ", ",") or "plain"


@pytest.mark.parametrize("alone", ALONE, ids=label)
def test_each_with_every_strategy(alone: Setup) -> None:
    for strategy in NAMES:
        run(replace(alone, strategy=strategy), "torch")


@pytest.mark.full
@pytest.mark.parametrize("strategy", NAMES)
def test_each_with_every_strategy_in_kernels(strategy: str) -> None:
    for alone in ALONE:
        run(replace(alone, strategy=strategy), "triton")


def covering(seed: int = 0) -> list[Setup]:
    """Setups among which every two values of different fields occur together, without values that are never right."""
    source = random.Random(seed)
    right = {
        name: [value for value in values if value not in REFUSED.get(name, ((),))[0]]
        for name, values in VALUES.items()
        if name != "rows"
    } | {"rows": [name for name in TREES if name != "none"]}

    def pairs(setup: Setup) -> set[tuple[str, Any, str, Any]]:
        return {(a, getattr(setup, a), b, getattr(setup, b)) for a, b in itertools.combinations(sorted(right), 2)}

    def drawn() -> Setup:
        while True:
            setup = Setup(**{name: source.choice(values) for name, values in right.items()})
            if not refusals(setup):
                return setup

    drawings = [drawn() for _ in range(4000)]
    missing = set().union(*map(pairs, drawings))
    chosen = []
    while missing:
        best = max(source.sample(drawings, 150), key=lambda setup: len(missing & pairs(setup)))
        if not missing & pairs(best):
            best = next(setup for setup in drawings if missing & pairs(setup))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def test_every_pair() -> None:
    setups = covering()
    assert len(setups) < 150
    for setup in setups:
        run(setup, "torch")


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_every_pair_in_kernels(part: int) -> None:
    for setup in covering()[part::4]:
        run(setup, "triton")


SETUPS = st.builds(Setup, **{name: st.sampled_from(values) for name, values in VALUES.items()})
LIKELY = st.builds(Setup, **{name: st.sampled_from((values[0], values[0], *values)) for name, values in VALUES.items()})


@given(setup=st.one_of(SETUPS, LIKELY))
@examples(200)
def test_random_combinations(setup: Setup) -> None:
    run(setup, "torch")


@pytest.mark.full
@given(setup=st.one_of(SETUPS, LIKELY, LIKELY))
@examples(5000)
def test_five_thousand_random_combinations(setup: Setup) -> None:
    run(setup, "torch")


@pytest.mark.full
@given(setup=LIKELY)
@examples(150)
def test_random_combinations_in_kernels(setup: Setup) -> None:
    run(setup, "triton")
