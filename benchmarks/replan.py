"""Host time of planning anew for a tree at hand: from its topology to the arena, the array that is copied to the GPU.

    python benchmarks/replan.py [--json]

Medians over trees that are each planned once, in microseconds, on one core: `plan` (the strategy), `lower`, `pack`, and
the whole of them one after another. Strategies are what the search finds, and cohorts of other kinds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from treegen import Shape, Tree
from treegen.lower import lower
from treegen.search.auto import searched
from treegen.strategies import Strategy, cohort
from treegen.targets import Target, target_from

TREES = ("1,256/256,32", "1,4,16,64,256,1024/256,8,256,64,32,256")
SHAPE = Shape(32, 8, 128, dtype="fp16")
REPEATS = 201
PARTS = ("plan", "lower", "pack", "whole")


@dataclass(frozen=True)
class Timing:
    """Median microseconds of every part for one tree and strategy."""

    tree: str
    strategy: str
    microseconds: dict[str, float]

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {taken:.0f}" for part, taken in self.microseconds.items())
        return f"{self.tree} by {self.strategy}: {parts} us"


def median_us(calls: list[Callable[[], object]]) -> float:
    """The median time of calls in microseconds, each made once."""
    times = []
    for call in calls:
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def timing(text: str, strategy: Strategy, target: Target) -> Timing:
    """The times of planning for copies of a tree, none of which was planned for before."""
    trees = [Tree.parse(text) for _ in range(REPEATS)]
    plans = [strategy.plan(tree, SHAPE, target) for tree in trees]
    schedules = [lower(plan, tree, SHAPE, target) for plan, tree in zip(plans, trees, strict=True)]
    fresh = [[Tree.parse(text) for _ in range(REPEATS)] for _ in range(2)]

    def whole(tree: Tree) -> object:
        return lower(strategy.plan(tree, SHAPE, target), tree, SHAPE, target).pack()

    calls: dict[str, list[Callable[[], object]]] = {
        "plan": [lambda tree=tree: strategy.plan(tree, SHAPE, target) for tree in fresh[0]],
        "lower": [
            lambda plan=plan, tree=tree: lower(plan, tree, SHAPE, target)
            for plan, tree in zip(plans, trees, strict=True)
        ],
        "pack": [schedule.pack for schedule in schedules],
        "whole": [lambda tree=tree: whole(tree) for tree in fresh[1]],
    }
    return Timing(text, str(strategy), {part: median_us(calls[part]) for part in PARTS})


def timings() -> list[Timing]:
    """All trees by all strategies."""
    target, made = target_from("h200"), []
    for text in TREES:
        tree = Tree.parse(text)
        usual = [cohort(), cohort(split=128), cohort(apart=64), cohort(apart=64, merge="final")]
        found = searched(tree, SHAPE, target, for_any_tree=True).strategy
        made += [timing(text, strategy, target) for strategy in dict.fromkeys([found, *usual])]
    return made


def main() -> None:
    """Prints one line per tree and strategy, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    chosen = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    made = timings()
    if chosen.json:
        print(json.dumps([{"tree": one.tree, "strategy": one.strategy, **one.microseconds} for one in made], indent=1))
        return
    for one in made:
        print(one)


if __name__ == "__main__":
    main()
