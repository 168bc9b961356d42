"""Trees, plans and schedules made in C against those made in NumPy."""

from __future__ import annotations

import random

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
from treegen.runtime.batch_room import RESERVE, batch_config
from treegen.schedule.by_request import ItemRoom
from treegen.schedule.query_runs import lower_requests
from treegen.strategies import Strategy, cohort, deft_node, query
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
            cohort(rows, shares=source.choice([0.5, 1, 3, 8.25, 40, 264]), split_shared_rows=shared_rows),
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

    shape = Shape(*source.choice([(4, 2), (8, 1), (32, 8), (80, 1)]), 64, page_size=batch.page_size)
    problem, strategy = Problem(tree, shape, TARGET), random_strategy(source)
    plan = plan_of(strategy, problem)
    check(plan, strategy.plan(problem))

    room = ItemRoom(batch_config(shape, TARGET), shape.page_size, RESERVE)
    plan = source.choice([plan, cohort(512).plan(problem), deft_node().plan(problem)])
    check(tables_of(plan, problem, room), lower_requests(plan, problem, room))
