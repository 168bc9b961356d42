"""Trees, plans and schedules made in C against those made in NumPy."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.differences import check
from support.forests import examples
from support.random_batches import random_batch
from treegen import Shape
from treegen.compiled import c_library
from treegen.compiled.cohort_plan import plan_of
from treegen.compiled.item_tables import tables_of
from treegen.compiled.tree_by_request import tree_of
from treegen.ir.errors import TreeError
from treegen.ir.live_batch import LiveBatch
from treegen.ir.plan import Plan
from treegen.ir.positions import windowed_requests
from treegen.ir.tree import Tree
from treegen.runtime.batch_room import RESERVE, batch_config
from treegen.schedule.by_request import ItemRoom
from treegen.schedule.query_runs import lower_requests
from treegen.strategies import Strategy, cohort, deft_node, query
from treegen.strategies.groupings import by_row, by_row_whole_tree
from treegen.strategies.strategy import Pipeline
from treegen.target.problem import Problem
from treegen.target.targets import target_from

TARGET = target_from("h200")


def random_strategy(source: random.Random) -> Strategy:
    rows, split = source.choice([1, 4, 16, 64, 512]), source.choice([50, 64, 100, 448, 3000])
    shared_rows = source.choice([None, 1, 2, 3, 8, 100])
    return source.choice(
        [
            query(),
            query(split),
            cohort(rows, split_shared_rows=shared_rows),
            cohort(rows, split, split_shared_rows=shared_rows),
            cohort(rows, shares=source.choice([0.5, 1, 3, 5, 8.25, 12, 20, 40, 264]), split_shared_rows=shared_rows),
            cohort(rows, tile=(64, 32)),
        ]
    )


@given(st.integers(0, 2**32))
@examples(300)
def test_c_makes_what_numpy_makes(seed: int) -> None:
    if c_library.c_compiler() is None:
        pytest.skip("there is no C compiler")
    assert c_library.library() is not None
    source = random.Random(seed)
    batch = random_batch(source)
    shared = source.random() < 0.9
    tree, known = tree_of(batch, shared=shared), batch.tree(shared=shared)
    check(tree, known)
    for name in ("levels", "unique_tokens", "path_tokens", "private_tokens"):
        assert getattr(tree.topology, name) == getattr(known.topology, name), name

    heads, dim = source.choice([(4, 2), (8, 1), (32, 8), (80, 1)]), source.choice([64, 256])
    shape, config = Shape(*heads, dim, page_size=batch.page_size), batch_config(Shape(*heads, dim), TARGET)
    if len(batch) and source.random() < 0.3:
        tree = windowed_requests(tree, source.choice([0, 100, 1000]), max(config.tokens, batch.page_size))
    problem, strategy = Problem(tree, shape, TARGET), random_strategy(source)
    plan = plan_of(strategy, problem)
    check(plan, strategy.plan(problem))

    room = ItemRoom(batch_config(shape, TARGET), shape.page_size, RESERVE)
    plan = source.choice([plan, cohort(512).plan(problem), deft_node().plan(problem)])
    check(tables_of(plan, problem, room), lower_requests(plan, problem, room))


@given(st.integers(0, 2**32))
@examples(100)
def test_parts_that_would_end_late(seed: int) -> None:
    """There are more parts than thread blocks, and the last ones are cut further."""
    if c_library.c_compiler() is None:
        pytest.skip("there is no C compiler")
    source = random.Random(seed)
    batch, count = LiveBatch(max_seats=64), source.randint(2, 60)
    for _ in range(count):
        batch.add(source.randint(64, source.choice([200, 700, 3000])))
    problem = Problem(batch.tree(), Shape(8, 1, 64), TARGET)
    strategy = cohort(source.choice([8, 16]), shares=max(count * source.uniform(0.2, 1.0), 0.5))
    check(plan_of(strategy, problem), strategy.plan(problem))


def test_too_many_tokens_are_refused() -> None:
    batch = LiveBatch()
    for _ in range(3):
        batch.add(2**30)
    with pytest.raises(TreeError, match="2\\^31"):
        tree_of(batch)


@dataclass
class Unhashable:
    """A caller's pass."""

    name: str = "unhashable"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        return plan


@pytest.mark.parametrize("strategy", [
    cohort(shares=1e10), cohort(shares=1e300), query(1), Pipeline("query", by_row, (Unhashable(),)),
    Pipeline("mine", by_row_whole_tree), cohort(shares=33.0), cohort(shares=33),
], ids=str)  # fmt: skip
def test_what_c_does_not_plan_numpy_does(strategy: Strategy) -> None:
    """Or C plans it as NumPy does."""
    batch = LiveBatch(page_size=16)
    first = batch.add(3000)
    for _ in range(20):
        batch.add(2000, first, 1600)
    shape = Shape(8, 1, 64, page_size=16)
    problem, room = Problem(batch.tree(), shape, TARGET), ItemRoom(batch_config(shape, TARGET), 16, RESERVE)
    plan = plan_of(strategy, problem)
    check(plan, strategy.plan(problem))
    check(tables_of(plan, problem, room), lower_requests(plan, problem, room))


@pytest.mark.parametrize("shares", [1e-18, 1e-310])
def test_shares_that_are_too_small_are_refused(shares: float) -> None:
    batch = LiveBatch()
    batch.add(3000)
    problem = Problem(batch.tree(), Shape(8, 1, 64), TARGET)
    with pytest.raises(OverflowError):
        cohort(shares=shares).plan(problem)
    with pytest.raises(OverflowError):
        plan_of(cohort(shares=shares), problem)
