"""The kernel variants of a shape: all that plans of `auto` launch, and no more."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.enumerated import policies_of
from support.forests import KV_STYLES, ROW_STYLES, examples, forest
from treegen import Shape, Tree
from treegen.codegen.emit import emit
from treegen.codegen.merge_forms import merge_key_of
from treegen.ir.errors import ShapeError
from treegen.ir.keys import KernelKey, MergeKey
from treegen.schedule.lower import lower
from treegen.schedule.passes import single_loop
from treegen.schedule.pipeline import planned_device_schedule
from treegen.search.auto import by_estimate
from treegen.search.weigh import candidates
from treegen.strategies import Strategy, cohort, fasttree
from treegen.strategies.registry import policy_specs
from treegen.target.problem import Problem
from treegen.target.targets import Target, target_from
from treegen.tuning.kernel_variants import kernel_sources

HEADS = ((32, 8), (32, 32), (16, 1), (64, 8), (28, 4), (64, 1))
TARGETS = ("h200", "a100", "b200")
REACHING = (
    (30, 30, "leaves", "default", 2), (30, 30, "leaves", "slots", 0), (2, 30, "inside", "default", 2),
    (30, 30, "every", "default", 0), (2, 30, "inside", "default", 1), (2, 30, "leaves", "slots", 0),
    (2, 300, "inside", "default", 2), (30, 30, "inside", "default", 1), (3, 40, "ends", "runs", 31),
)  # fmt: skip
"""Nodes, most tokens, rows, KV and seed of forests that together need every variant."""


def every_strategy(shape: Shape, target: Target, source: random.Random) -> Iterator[Strategy]:
    """The named strategies, every policy, and of each one with cuts and one that merges last."""
    yield from (spec.factory() for spec in policy_specs().values())
    whole, split = policies_of(shape, target)
    for policy in (*whole, *source.sample(split, 3)):
        apart = source.choice((2, 3, 5))
        yield from (
            policy,
            replace(policy, split_shared_rows=apart),
            replace(policy, split_shared_rows=apart, merge="final"),
        )


def random_forest(seed: int) -> Tree:
    source = random.Random(seed)
    return forest(
        nodes=source.choice((3, 12, 40)),
        most_tokens=source.choice((3, 40, 300)),
        seed=seed,
        rows=source.choice(ROW_STYLES),
        kv=source.choice(KV_STYLES),
        page_size=16,
    )


def keys_of(
    tree: Tree, strategy: Strategy, shape: Shape, target: Target, page_size: int = 1
) -> set[KernelKey | MergeKey]:
    try:
        schedule = planned_device_schedule(strategy.plan(Problem(tree, shape, target)), Problem(tree, shape, target))
    except ShapeError:  # the strategy's own tiles do not fit
        return set()
    return {source.key for source in emit(schedule, shape, page_size)}


@examples(12)
@given(
    seed=st.integers(0, 10**6),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from((64, 128, 256)),
    dtype=st.sampled_from(("bf16", "fp32")),
    page_size=st.sampled_from((1, 16)),
    target_name=st.sampled_from(TARGETS),
)
def test_every_module_that_a_plan_launches_is_among_them(
    seed: int, heads: tuple[int, int], head_dim: int, dtype: str, page_size: int, target_name: str
) -> None:
    shape, tree = Shape(*heads, head_dim, dtype=dtype, page_size=page_size), random_forest(seed)
    target = target_from(target_name)
    keys = {source.key for source in kernel_sources(shape, target)}
    strategies = dict.fromkeys(every_strategy(shape, target, random.Random(seed)))
    if tree.num_rows:
        strategies |= dict.fromkeys(strategy for strategy, _ in candidates(Problem(tree, shape, target), 99))
        strategies[by_estimate(Problem(tree, shape, target)).strategy] = None
    for strategy in strategies:
        for addressing in {1, page_size}:
            assert keys_of(tree, strategy, shape, target, addressing) <= keys, strategy


def test_some_plan_launches_each_of_them() -> None:
    shape, target = Shape(32, 8, 128), target_from("h200")
    missing = {source.key for source in kernel_sources(shape, target)}
    forests = [forest(nodes=n, most_tokens=most, rows=rows, kv=kv, seed=seed) for n, most, rows, kv, seed in REACHING]
    # Few and many rows that end above others, with many partial results; one long row; many rows of two results.
    inside = [
        Tree.from_parents([-1] + [0] * n, [9000] + [10] * n, [*[(0, 9000)] * n, *((v, 10) for v in range(1, n + 1))])
        for n in (4, 40, 100)
    ]
    further = cohort(split=128), cohort(split_shared_rows=100), cohort(split_shared_rows=32, merge="final")
    every = {
        str(one): one for seed in range(3) for one in (*every_strategy(shape, target, random.Random(seed)), *further)
    }
    for tree in (*forests, *inside, Tree.parse("20000"), Tree.parse("50(10*100)"), Tree.parse("1,4,64/40,16,16")):
        for strategy in every.values():
            for most_tiles in (0, single_loop.MOST_TILES):
                with patch.object(single_loop, "MOST_TILES", most_tiles):
                    missing -= keys_of(tree, strategy, shape, target)
    for rounds, rows in product((1, 2), (8, 4096)):  # launches of a fixed capacity
        schedule = SimpleNamespace(fixed=False, num_rounds=rounds)
        capacity = SimpleNamespace(merges=(rows,) * rounds, merge_partials=100)
        missing.discard(merge_key_of(schedule, shape, 0, capacity))  # type: ignore[arg-type]
    assert not missing, missing


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_they_are_few_and_each_is_there_once(heads: tuple[int, int]) -> None:
    target = target_from("h200")
    by_slot = kernel_sources(Shape(*heads, 128), target)
    paged = kernel_sources(Shape(*heads, 128, page_size=16), target)
    assert len(by_slot) <= 61
    assert len({source.digest for source in paged}) == len(paged)
    assert {source.key for source in by_slot} < {source.key for source in paged}
    merges = [source for source in by_slot if source.kernel == "merge"]
    assert len(paged) - len(by_slot) == len(by_slot) - len(merges)
    assert {source.key.page_size for source in paged if isinstance(source.key, KernelKey)} == {1, 16}


def test_a_shape_that_fits_no_tile_has_none() -> None:
    small = replace(target_from("a100"), shared_bytes=4096)
    with pytest.raises(ShapeError, match="shared memory"):
        kernel_sources(Shape(32, 8, 128), small)


def test_auto_leaves_out_a_strategy_whose_tiles_do_not_fit() -> None:
    shape, target = Shape(32, 8, 256, dtype="fp32"), target_from("a100")
    tree = Tree.from_levels([1, 2, 4], [100, 40, 30])
    with pytest.raises(ShapeError, match="tile"):
        lower(fasttree().plan(Problem(tree, shape, target)), Problem(tree, shape, target))
    found = by_estimate(Problem(tree, shape, target), isolated=True).strategy
    assert "fasttree" not in str(found)
    lower(found.plan(Problem(tree, shape, target)), Problem(tree, shape, target))
