"""Planning is fast: no Python loop over tokens, rows or segments."""

import time
from collections.abc import Callable

import pytest

from treegen import Shape, Tree
from treegen.schedule.lower import lower
from treegen.strategies import cohort, deft_node
from treegen.target.problem import Problem
from treegen.target.targets import target_from


def fastest(call: Callable[[], object], repeats: int = 40) -> float:
    """The least time of a call, in milliseconds: what it takes when nothing else runs on the core."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def test_a_tree_becomes_launch_arrays_in_under_5_ms() -> None:
    tree = Tree.parse("1,4,16,64,256,1024/256,8,256,64,32,256")
    shape, target, strategy = Shape(32, 8, 128), target_from("h200"), deft_node()

    def plan() -> None:
        lower(strategy.plan(Problem(tree, shape, target)), Problem(tree, shape, target)).pack()

    milliseconds = fastest(plan)
    print(f"{milliseconds:.2f} ms")
    assert milliseconds < 5


def test_planning_grows_with_groups_not_with_tokens() -> None:
    shape, target, strategy = Shape(32, 8, 128), target_from("h200"), deft_node()

    def plan(tokens: int) -> Callable[[], object]:
        tree = Tree.from_levels([1, 64], [tokens, 10])
        return lambda: strategy.plan(Problem(tree, shape, target))

    assert fastest(plan(100_000_000)) < 3 * fastest(plan(10))


@pytest.mark.parametrize(("text", "most_ms"), [("1,256/256,32", 2.0), ("1,4,16,64,256,1024/256,8,256,64,32,256", 3.0)])
def test_replanning_by_cohorts_takes_few_array_operations(text: str, most_ms: float) -> None:
    tree = Tree.parse(text)
    shape, target, strategy = Shape(32, 8, 128, dtype="fp16"), target_from("h200"), cohort()
    milliseconds = fastest(
        lambda: lower(strategy.plan(Problem(tree, shape, target)), Problem(tree, shape, target)).pack()
    )
    print(f"{milliseconds:.2f} ms")
    assert milliseconds < most_ms
