"""Isolated kernels: infinities and NaN in K and V reach only the rows that see their tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.attention_inputs import tensors
from support.forests import examples, forests, obeys_law
from support.full_tests import others_full
from support.h200 import H200
from support.page_requests import csr, requests
from treegen import Kernel, Shape, Tree, TreeAttentionWrapper
from treegen.autotune_cache.entry import Entry
from treegen.autotune_cache.policy_cache import POLICY_CACHE
from treegen.ir.errors import InputError, PlanError, StrategyError
from treegen.ir.verify import verify, verify_isolated
from treegen.schedule.lower import lower
from treegen.search.auto import by_estimate, time_of
from treegen.search.policies import key_of
from treegen.strategies import (
    Pipeline,
    Strategy,
    auto,
    batch_invariant,
    cascade,
    cohort,
    deft_flatten,
    deft_node,
    deft_node_chunk,
    fasttree,
    flashforge,
    groupings,
    medusa,
    query,
    specinfer,
)
from treegen.strategies.isolated import SeparateRows
from treegen.target.problem import Problem

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter

FP32 = Shape(4, 2, 16, dtype="fp32")
EVERY = (
    query(), query(16), cohort(), cohort(split=32), cohort(split_shared_rows=3, merge="final"), deft_flatten(32),
    deft_flatten(32, "bits"), specinfer(), medusa(), deft_node(), deft_node_chunk(32), cascade(), fasttree(),
    flashforge(), auto(), batch_invariant(128),
)  # fmt: skip


def masked(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx % 3 != b % 3) | (kv_idx == q_idx)


def hidden(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where((kv_idx % 3 != b % 3) | (kv_idx == q_idx), score * 0.5, -math.inf)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 9},
    "mask_mod": {"mask_mod": masked},
    "score_mod": {"score_mod": hidden},
    "sinks and window": {"window_left": 20, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def seen_slots(tree: Tree, row: int, options: dict[str, Any]) -> np.ndarray:
    """The slots of the tokens that a row sees under OPTIONS."""
    slots = np.asarray(tree.slots(row))
    position = np.arange(len(slots))
    own = len(slots) - 1
    if "window_left" in options:
        return slots[own - position <= options["window_left"]]
    if "mask_mod" in options or "score_mod" in options:
        return slots[(position % 3 != row % 3) | (position == own)]
    return slots


def check_isolation(kernel: Kernel, inputs: tuple[torch.Tensor, ...], row: int, options: dict[str, Any]) -> None:
    """The row has the same bits whatever the tokens hold that it does not see."""
    verify_isolated(kernel.plan)
    q, k, v = inputs
    out, lse = kernel(q, k, v, return_lse=True)
    dim = k.shape[-1]
    others = torch.ones(k.numel() // (k.shape[-2] * dim), dtype=torch.bool)
    others[torch.from_numpy(seen_slots(kernel.tree, row, options).astype(np.int64))] = False
    for value in (math.inf, math.nan):
        poisoned = [cache.clone() for cache in (k, v)]
        for cache in poisoned:
            cache.view(-1, *cache.shape[-2:])[others] = value
        found = kernel(q, *poisoned, return_lse=True)
        assert torch.equal(found[0][row], out[row])
        assert torch.equal(found[1][row], lse[row])


@pytest.mark.parametrize("name", OPTIONS)
@given(
    tree=forests(max_nodes=12, max_tokens=60, salt=15),
    strategy=st.sampled_from(EVERY),
    seed=st.integers(0, 2**20),
    rows=st.sampled_from((None, None, 5)),
)
@examples(40)
def test_rows_keep_their_bits(name: str, tree: Tree, strategy: Strategy, seed: int, rows: int | None) -> None:
    if not tree.num_rows or tree.kv.last_slot < 0:
        return
    options = OPTIONS[name]
    room = None if rows is None or strategy.name == "medusa" else rows + tree.num_rows
    kernel = treegen.compile(
        tree, strategy=strategy, shape=FP32, backend="torch", isolated=True, max_rows=room, **options
    )
    inputs = tensors(tree, tree.kv.last_slot + 2, 1, (4, 2), 16, torch.float32, pad_pages=False)
    check_isolation(kernel, inputs, seed % tree.num_rows, options)
    assert kernel.verify(*inputs).passed


TREE = Tree.from_parents(
    [-1, 0, 0, 2, 1, -1, -1],
    [40, 17, 33, 3, 5, 70, 9],
    rows=[(0, 20), (1, 17), (1, 5), (2, 33), (3, 3), (4, 5), (5, 70), (6, 9), (6, 9)],
)


@pytest.mark.parametrize("strategy", others_full(EVERY, 3), ids=str)
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.full)])
def test_in_kernels(strategy: Strategy, turn: int) -> None:
    """Plain scores for every second strategy, and other options for the rest; the other way around in turn 1."""
    place = EVERY.index(strategy)
    others = [name for name in OPTIONS if name != "plain"]
    for name in ["plain"] if (place + turn) % 2 else [others[place // 2 % len(others)]]:
        options = OPTIONS[name]
        kernel = treegen.compile(TREE, strategy=strategy, shape=FP32, backend="triton", isolated=True, **options)
        inputs = tensors(TREE, 180, 1, (4, 2), 16, torch.float32, pad_pages=False)
        for row in (place % 9, (place + 4) % 9):
            check_isolation(kernel, inputs, row, options)
        assert kernel.verify(*inputs).passed


SHAPES = {
    "fp16, more heads than a tile": Shape(80, 1, 16, dtype="fp16"),
    "bf16": Shape(8, 2, 64, dtype="bf16"),
    "unequal dims": Shape(4, 2, 48, 32, dtype="fp32"),
    "shared": Shape(8, 1, 48, 32, dtype="fp16", shared_kv=True),
    "e5m2": Shape(8, 2, 64, dtype="fp16", kv_dtype="e5m2"),
    "e4m3": Shape(8, 2, 64, dtype="bf16", kv_dtype="e4m3"),
}


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("name", others_full(SHAPES))
def test_shapes(name: str, backend: str) -> None:
    shape = SHAPES[name]
    source = torch.Generator().manual_seed(1)
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    kinds |= {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}
    q = torch.randn(9, shape.num_qo_heads, shape.head_dim, generator=source).to(kinds[shape.dtype])
    caches = torch.randn(2, 180, shape.num_kv_heads, shape.head_dim, generator=source).to(kinds[shape.kv_dtype])
    for options in (OPTIONS["mask_mod"], OPTIONS["plain"]):
        kernel = treegen.compile(TREE, strategy="cohort", shape=shape, backend=backend, isolated=True, **options)
        k = caches[0]
        v = k[..., : shape.head_dim_v] if shape.shared_kv else caches[1][..., : shape.head_dim_v]
        out, lse = kernel(q, k, v, return_lse=True)
        for row in (2, 7):
            others = np.setdiff1d(np.arange(180), seen_slots(TREE, row, options))
            k = caches[0].clone()
            v = k[..., : shape.head_dim_v] if shape.shared_kv else caches[1][..., : shape.head_dim_v].clone()
            for cache in (k, v):
                cache[torch.from_numpy(others)] = math.nan
            found = kernel(q, k, v, return_lse=True)
            assert torch.equal(found[0][row], out[row])
            assert torch.equal(found[1][row], lse[row])


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("option", ["plain", "mask_mod"])
def test_rows_that_see_a_value_show_it(backend: str, option: str) -> None:
    q, k, v = tensors(TREE, 180, 1, (4, 2), 16, torch.float32, pad_pages=False)
    kernel = treegen.compile(TREE, strategy="cohort", backend=backend, isolated=True, **OPTIONS[option])
    v[TREE.slots(6)[4]] = math.nan
    out, lse = kernel(q, k, v, return_lse=True)
    assert out[6].isnan().all()
    assert out[[0, 1, 2, 3, 4, 5, 7, 8]].isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_after_edits_and_in_fixed_capacity(backend: str) -> None:
    for limits in ({}, {"max_rows": 16, "max_items": 200, "max_slots": 200}):
        kernel = treegen.compile(TREE, shape=FP32, backend=backend, isolated=True, **limits)
        inputs = tensors(TREE, 400, 1, (4, 2), 16, torch.float32, pad_pages=False)
        kernel.step(slots=np.arange(200, 209))
        check_isolation(kernel, inputs, 4, {})
        kernel.step(slots=np.arange(300, 309))
        check_isolation(kernel, inputs, 1, {})
        kernel.update(Tree.parse("60(20,9*3)+30"))
        inputs = tensors(kernel.tree, 400, 1, (4, 2), 16, torch.float32, pad_pages=False)
        check_isolation(kernel, inputs, 2, {})


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("window", [-1, 11])
def test_wrapper(graph: bool, window: int) -> None:
    count, page_size, pool = 7, 4, 60
    sizes = {"indptr": count + 1, "indices": 80, "last_page_len": count}
    buffers = {f"paged_kv_{name}_buffer": torch.zeros(size) for name, size in sizes.items()}
    wrapper = TreeAttentionWrapper(isolated=True, use_cuda_graph=graph, **(buffers if graph else {}))
    options = {} if window < 0 else {"window_left": window}
    for seed in range(3):
        table = csr(requests(seed, count, page_size, 5, 0.7, pool), page_size)
        wrapper.plan(*table, 4, 2, 16, page_size, q_data_type="float32", window_left=window)
        q, k, v = tensors(wrapper.kernel.tree, pool, page_size, (4, 2), 16, torch.float32, pad_pages=False)
        out, lse = wrapper.run(q, (k, v), return_lse=True)
        for row in range(count):
            others = np.setdiff1d(np.arange(pool * page_size), seen_slots(wrapper.kernel.tree, row, options))
            poisoned = [cache.clone() for cache in (k, v)]
            for cache in poisoned:
                cache.view(-1, 2, 16)[torch.from_numpy(others)] = math.nan
            found = wrapper.run(q, tuple(poisoned), return_lse=True)
            assert torch.equal(found[0][row], out[row])
            assert torch.equal(found[1][row], lse[row])


def test_in_compiled_code() -> None:
    kernel = treegen.compile(TREE, shape=FP32, backend="torch", isolated=True)
    q, k, v = tensors(TREE, 180, 1, (4, 2), 16, torch.float32, pad_pages=False)
    compiled = torch.compile(lambda *inputs: kernel(*inputs), backend="eager", fullgraph=True)
    out = compiled(q, k, v)
    v[np.setdiff1d(np.arange(180), TREE.slots(3))] = math.nan
    assert torch.equal(compiled(q, k, v)[3], out[3])


@given(tree=forests(max_nodes=40, max_tokens=80, salt=16), strategy=st.sampled_from(EVERY))
@examples(100)
def test_plans_obey_the_law(tree: Tree, strategy: Strategy) -> None:
    kernel = treegen.compile(tree, strategy=strategy, shape=FP32, backend="torch", isolated=True)
    verify(kernel.plan, tree)
    verify_isolated(kernel.plan)
    assert obeys_law(kernel.plan, tree)


@given(tree=forests(max_nodes=30, max_tokens=200, salt=17))
@examples(40)
def test_batch_invariant_bits_do_not_depend_on_isolation(tree: Tree) -> None:
    if not tree.num_rows or tree.kv.last_slot < 0:
        return
    inputs = tensors(tree, tree.kv.last_slot + 1, 1, (4, 2), 16, torch.float32, pad_pages=False)
    options = {"shape": FP32, "backend": "torch", "batch_invariant": True}
    whole, alone = (treegen.compile(tree, isolated=isolated, **options) for isolated in (False, True))
    for found, expected in zip(alone(*inputs, return_lse=True), whole(*inputs, return_lse=True), strict=True):
        assert torch.equal(found, expected)


def test_rows_that_see_the_same_share_groups_in_batch_invariant_mode() -> None:
    tree = Tree.from_parents([-1, 0, 0], [600, 50, 50], rows=[(1, 50), (1, 50), (2, 50)])
    kernel = treegen.compile(tree, shape=FP32, backend="torch", batch_invariant=True, isolated=True)
    assert sorted(kernel.plan.group_rows.tolist()) == [1, 2, 3]


TREES = [
    Tree.parse("1,4,16,512/1024,256,128,32"),
    Tree.parse("1,10/4000,400"),
    Tree.parse("1,4,16,64,256,1024/256,8,256,64,32,256"),
    Tree.from_parents([-1] * 64, [1024] * 64),
]


@pytest.mark.parametrize("tree", TREES, ids=["four levels", "two levels", "six levels", "nothing shared"])
def test_auto_takes_the_best_of_isolated_plans(tree: Tree) -> None:
    shape = Shape(32, 8, 128)
    problem = Problem(tree, shape, H200)
    found = by_estimate(problem, isolated=True).strategy
    plan, found_us = found.plan(problem), time_of(found, problem)
    free_us = time_of(by_estimate(problem).strategy, problem)
    verify(plan, tree)
    verify_isolated(plan)
    assert found_us <= min(time_of(query(), problem), 1.5 * free_us)
    for strategy in (fasttree(), flashforge(), deft_node(), deft_node_chunk(256), cohort(split=512)):
        divided = SeparateRows().apply(strategy.plan(Problem(tree, shape, H200)), tree)
        schedule = lower(divided, Problem(tree, shape, H200))
        assert found_us <= treegen.cost.account.account(divided, schedule, Problem(tree, shape, H200)).time_us * (
            1 + 1e-9
        )


@pytest.mark.parametrize(
    ("policy", "used"), [({"strategy": "cohort", "head_rows": 64}, False), ({"strategy": "query"}, True)]
)
def test_measured_policies_are_used_where_their_plans_are_isolated(policy: dict[str, Any], used: bool) -> None:
    tree, shape = Tree.parse("64(8*12)"), Shape(8, 2, 64)
    POLICY_CACHE.store(Entry(key_of(Problem(tree, shape, H200)), policy, 1.0, (("query", 1.0, "measured"),), "a test"))
    assert treegen.compile(tree, shape=shape, target="h200", backend="torch").choice.reason.startswith("measured")
    kernel = treegen.compile(tree, shape=shape, target="h200", backend="torch", isolated=True)
    assert kernel.choice.reason.startswith("measured") == used
    verify_isolated(kernel.plan)


def test_named_strategies_without_masks_stay_as_they_are() -> None:
    tree = Tree.parse("64(8*12)")
    plan = deft_node().plan(Problem(tree, FP32, H200))
    assert SeparateRows().apply(plan, tree).segments is plan.segments
    kernel = treegen.compile(tree, strategy="query", shape=FP32, backend="torch", isolated=True)
    assert kernel.choice.strategy == query()


def test_a_strategy_that_claims_isolation_is_checked() -> None:
    claims = Pipeline("claims", groupings.whole_tree, isolated=True)
    with pytest.raises(PlanError, match=r"group 0 of plan claims = .*: reads what some of its rows do not see"):
        treegen.compile(Tree.parse("30(5,9)"), strategy=claims, shape=FP32, backend="torch", isolated=True)


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="isolated = 1: is not a bool"):
        treegen.compile(TREE, isolated=1)
    with pytest.raises(InputError, match="isolated = yes: is not a bool"):
        TreeAttentionWrapper(isolated="yes")
    with pytest.raises(StrategyError, match="autotune = True: would measure plans that are not isolated"):
        treegen.compile(TREE, isolated=True, autotune=True)


def test_only_kernels_that_mask_scores_are_guarded() -> None:
    def source(**options: Any) -> str:
        return treegen.compile(TREE, strategy="query", shape=FP32, backend="torch", **options).source

    for options in ({}, {"logits_soft_cap": 3.0}, {"sinks": torch.zeros(4)}):
        assert source(**options) == source(isolated=True, **options)
    assert "spoiled" not in source(window_left=3)
    assert "spoiled" in source(window_left=3, isolated=True)
