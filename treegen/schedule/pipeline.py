"""The pipeline of schedule passes, from a lowered plan to the schedule that is launched.

    lower ──▶ stagger ──▶ [empty-rows] ──▶ fuse-merge ──▶ single-loop ──▶ launches
                     fixed capacity        └─ not in a fixed capacity ─┘

Passes change nothing but the order of sums. Accounts and estimates read the schedule before `fuse-merge`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from treegen.ir.plan import Plan
from treegen.ir.positions import Positions
from treegen.ir.schedule import Schedule
from treegen.schedule.arrangement import Frame
from treegen.schedule.lower import lower
from treegen.schedule.passes.empty_rows import with_empty_row_items
from treegen.schedule.passes.fuse_merge import with_fused_merge
from treegen.schedule.passes.single_loop import in_single_loop
from treegen.schedule.passes.stagger import staggered
from treegen.target.problem import Problem


class Lowering(NamedTuple):
    """A plan and its schedule, which passes take and return."""

    plan: Plan
    schedule: Schedule


class SchedulePass(NamedTuple):
    """A named function that rewrites the lowering of a problem."""

    name: str
    apply: Callable[[Lowering, Problem], Lowering]


def _empty_rows(lowering: Lowering, problem: Problem) -> Lowering:
    return Lowering(*with_empty_row_items(lowering.plan, lowering.schedule, problem.shape))


STAGGER = SchedulePass("stagger", lambda made, problem: Lowering(made.plan, staggered(made.schedule, problem)))
EMPTY_ROWS = SchedulePass("empty-rows", _empty_rows)
FUSE_MERGE = SchedulePass("fuse-merge", lambda made, _: Lowering(made.plan, with_fused_merge(made.schedule)))
SINGLE_LOOP = SchedulePass("single-loop", lambda made, _: Lowering(made.plan, in_single_loop(made.schedule)))

COUNTED = (STAGGER,)
"""The passes before accounts and estimates."""
COUNTED_FIXED = (STAGGER, EMPTY_ROWS)
"""The same in a fixed capacity."""
LAUNCHED = (FUSE_MERGE, SINGLE_LOOP)
"""The passes after that. A fixed capacity has none, because its launches never change."""


def run(passes: Iterable[SchedulePass], lowering: Lowering, problem: Problem) -> Lowering:
    """Applies passes one after another."""
    for step in passes:
        lowering = step.apply(lowering, problem)
    return lowering


def lowered(plan: Plan, problem: Problem, frame: Frame | None = None, positions: Positions | None = None) -> Lowering:
    """Lowers a plan, up to the schedule that accounts count. Arguments and errors are those of `lower`."""
    made = Lowering(plan, lower(plan, problem, frame, positions))
    return run(COUNTED if frame is None else COUNTED_FIXED, made, problem)


def device_schedule(lowering: Lowering, problem: Problem) -> Schedule:
    """Makes the schedule that a kernel without a fixed capacity launches, of a lowered plan."""
    return run(LAUNCHED, lowering, problem).schedule


def planned_device_schedule(plan: Plan, problem: Problem) -> Schedule:
    """Makes the schedule that a kernel without a fixed capacity launches, of a plan."""
    return device_schedule(lowered(plan, problem), problem)
