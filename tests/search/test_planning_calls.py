"""Planning takes few array operations: no Python loop over tokens, rows or segments."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.call_counts import calls
from support.h200 import H200
from treegen import Shape, Tree
from treegen.schedule.lower import lower
from treegen.strategies import Strategy, cohort, deft_node
from treegen.target.problem import Problem

SHAPE = Shape(32, 8, 128, dtype="fp16")
SMALL, LARGE = "1,4,16,64/256,8,256,64", "1,4,16,64,256,1024/256,8,256,64,32,256"


def launch_arrays(strategy: Strategy, tree: Tree) -> Callable[[], object]:
    """From a tree to the arrays that are copied to a device."""
    problem = Problem(tree, SHAPE, H200)
    return lambda: lower(strategy.plan(problem), problem).pack()


@pytest.mark.parametrize(("strategy", "most"), [(deft_node(), 600), (cohort(), 450)], ids=str)
def test_operations_do_not_grow_with_rows(strategy: Strategy, most: int) -> None:
    few, many = (calls(launch_arrays(strategy, Tree.parse(text))) for text in (SMALL, LARGE))
    print(f"{few} calls for 64 rows, {many} for 1,024")
    assert many < most
    assert many < 1.1 * few


@pytest.mark.parametrize("strategy", [deft_node(), cohort()], ids=str)
def test_operations_do_not_grow_with_tokens(strategy: Strategy) -> None:
    few, many = (calls(launch_arrays(strategy, Tree.from_levels([1, 64], [tokens, 10]))) for tokens in (10, 10**8))
    assert many < 1.1 * few
