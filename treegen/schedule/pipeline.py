"""The pipeline of schedule passes: what turns a lowered plan into what is launched.

    lower ──▶ stagger ──▶ [empty-rows] ──▶ fuse-merge ──▶ single-loop ──▶ launches
                     fixed capacity        └─ not in a fixed capacity ─┘

Passes leave results as they are, but for the order of sums. Accounts and estimates read the schedule before
`fuse-merge`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from treegen.ir.plan import Plan
from treegen.ir.positions import Positions
from treegen.ir.schedule import Schedule
from treegen.schedule.arrangement import Frame
from treegen.schedule.lower import lower
from treegen.schedule.passes.empty_rows import with_unseeing_items
from treegen.schedule.passes.fuse_merge import in_one_launch
from treegen.schedule.passes.single_loop import in_one_loop
from treegen.schedule.passes.stagger import staggered
from treegen.target.problem import Problem


class Lowering(NamedTuple):
    """What passes take and give: a plan and its schedule."""

    plan: Plan
    schedule: Schedule


class SchedulePass(NamedTuple):
    """A named rewriting of a lowering, for the problem that it solves."""

    name: str
    apply: Callable[[Lowering, Problem], Lowering]


OnSchedulePass: TypeAlias = Callable[[str, Lowering], None]


def _empty_rows(lowering: Lowering, problem: Problem) -> Lowering:
    return Lowering(*with_unseeing_items(lowering.plan, lowering.schedule, problem.shape))


STAGGER = SchedulePass("stagger", lambda made, problem: Lowering(made.plan, staggered(made.schedule, problem)))
EMPTY_ROWS = SchedulePass("empty-rows", _empty_rows)
FUSE_MERGE = SchedulePass("fuse-merge", lambda made, _: Lowering(made.plan, in_one_launch(made.schedule)))
SINGLE_LOOP = SchedulePass("single-loop", lambda made, _: Lowering(made.plan, in_one_loop(made.schedule)))

COUNTED = (STAGGER,)
"""Up to the schedule that accounts and estimates count."""
COUNTED_FIXED = (STAGGER, EMPTY_ROWS)
"""The same where launches are those of a capacity."""
LAUNCHED = (FUSE_MERGE, SINGLE_LOOP)
"""From there to what is launched. In a fixed capacity launches stay as they are."""


def run(
    passes: Iterable[SchedulePass], lowering: Lowering, problem: Problem, on_pass: OnSchedulePass | None = None
) -> Lowering:
    """The lowering after these passes, one after another; `on_pass(name, lowering)` is called after each."""
    for step in passes:
        lowering = step.apply(lowering, problem)
        if on_pass:
            on_pass(step.name, lowering)
    return lowering


def lowered(
    plan: Plan,
    problem: Problem,
    frame: Frame | None = None,
    positions: Positions | None = None,
    on_pass: OnSchedulePass | None = None,
) -> Lowering:
    """A plan lowered, up to the schedule that accounts count. Arguments and errors as of treegen.schedule.lower."""
    made = Lowering(plan, lower(plan, problem, frame, positions))
    return run(COUNTED if frame is None else COUNTED_FIXED, made, problem, on_pass)


def launched(lowering: Lowering, problem: Problem, on_pass: OnSchedulePass | None = None) -> Schedule:
    """The schedule that is launched for a plan that is lowered, of a kernel without a fixed capacity."""
    return run(LAUNCHED, lowering, problem, on_pass).schedule


def launch_schedule(
    plan: Plan, problem: Problem, positions: Positions | None = None, on_pass: OnSchedulePass | None = None
) -> Schedule:
    """The schedule that is launched for a plan, of a kernel without a fixed capacity."""
    return launched(lowered(plan, problem, positions=positions, on_pass=on_pass), problem, on_pass)
