"""Plans and schedules that treegen makes unchecked are those that the public constructors make of the same arrays."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, forests, plan_by_row_classes
from treegen import Shape, Tree
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.schedule.lower import lower
from treegen.strategies import Strategy, cohort, query, strategy_from, strategy_names
from treegen.strategies.passes import LevelRounds, MergeLast, SplitContext, TrimRows
from treegen.target.problem import Problem
from treegen.target.targets import target_from

SHAPE, H200 = Shape(32, 8, 128, dtype="fp16"), target_from("h200")
STRATEGIES = (
    *(strategy_from(name) for name in strategy_names()),
    query(split=7),
    cohort(head_rows=8),
    cohort(head_rows=16, split=20),
    cohort(head_rows=16, split_shared_rows=3),
    cohort(head_rows=8, split_shared_rows=2, merge="final", split=9),
    cohort(head_rows=200, tile=(16, 32)),
)


def check(made: Plan | Schedule) -> None:
    """What was made unchecked passes the checks, and the constructor finds nothing to convert or to add."""
    checked = replace(made)
    for field in fields(made):
        own, expected = getattr(made, field.name), getattr(checked, field.name)
        if isinstance(expected, np.ndarray):
            assert (own.dtype, own.flags.c_contiguous, own.flags.writeable) == (np.int32, True, False), field.name
            assert np.array_equal(own, expected), field.name
        else:
            assert own == expected, field.name
    assert made.__dict__.keys() == checked.__dict__.keys()


@examples(150)
@given(tree=forests(30, salt=41), strategy=st.sampled_from(STRATEGIES))
def test_of_strategies(tree: Tree, strategy: Strategy) -> None:
    plan = strategy.plan(Problem(tree, SHAPE, H200))
    check(plan)
    check(lower(plan, Problem(tree, SHAPE, H200)))


@examples(60)
@given(tree=forests(20, salt=42), seed=st.integers(0, 2**32), configs=st.integers(1, 3))
def test_of_passes_over_groups_of_several_intervals(tree: Tree, seed: int, configs: int) -> None:
    plan = plan_by_row_classes(tree, seed, configs, unseen=True)
    for step in (SplitContext(5), TrimRows(), LevelRounds()):
        plan = step.apply(plan, tree)
        check(plan)
        check(lower(plan, Problem(tree, SHAPE, H200)))
    check(MergeLast().apply(plan, tree))
