"""Explanations with recordings that are made up, for tests without a GPU."""

from __future__ import annotations

from dataclasses import replace

from treegen import Shape, Tree
from treegen.cost.account import assess
from treegen.cost.predicted_timeline import predicted_timeline
from treegen.cost.timeline import Recording
from treegen.ir.plan import Plan
from treegen.report.explain import Explanation, explain
from treegen.schedule.lower import lower
from treegen.schedule.passes.fuse_merge import with_fused_merge
from treegen.target.problem import Problem

TREE = Tree.parse("1,16,64/1024,256,32")
SHAPE = Shape(32, 8, 128, dtype="fp16")


def twice_as_slow(plan: Plan, problem: Problem) -> Recording:
    """A recording in which everything takes twice as long as predicted."""
    lowered = lower(plan, problem)
    fused, times = with_fused_merge(lowered), assess(plan, lowered, problem)[1]
    found = predicted_timeline(fused, problem, times)
    blocks = found.blocks._replace(start_us=2 * found.blocks.start_us, end_us=2 * found.blocks.end_us)
    launches = tuple(each._replace(start_us=2 * each.start_us, end_us=2 * each.end_us) for each in found.launches)
    return Recording(replace(found, total_us=2 * found.total_us, blocks=blocks, launches=launches), 50.0, 51.0, 32.0)


def explained(*names: str, measured: bool = False) -> Explanation:
    return explain(TREE, names, SHAPE, "h200", recorder=twice_as_slow if measured else None)
