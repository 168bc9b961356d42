"""Whole paths in halves that one launch merges (treegen.schedule.passes.fuse_merge): outside of the space, as what they
take follows from their schedules alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.schedule.lower import lower
from treegen.schedule.passes.fuse_merge import in_one_launch, waits
from treegen.search.space import heights_of
from treegen.strategies.cohort import Cohort
from treegen.strategies.strategy import Strategy
from treegen.target.problem import Problem
from treegen.target.tile_config import SMALL_ROWS, resident_blocks

_PARTS = (3 / 4, 1 / 2)
"""Most tokens of half a path, over those of the longest: the first leaves room for paths that grow, the second for
shorter ones.
"""


class Lowered(NamedTuple):
    """A strategy with its plan and schedule."""

    strategy: Strategy
    plan: Plan
    schedule: Schedule

    @classmethod
    def of(cls, strategy: Strategy, problem: Problem) -> Lowered:
        """The plan for a tree."""
        plan = strategy.plan(problem)
        return cls(strategy, plan, lower(plan, problem))

    @property
    def takes_one_launch(self) -> bool:
        """Whether final items wait for partial ones in their launch."""
        return waits(in_one_launch(self.schedule))


def large_cohorts(shape: Shape) -> list[Cohort]:
    """Whole paths of every height that has a large tile."""
    return [Cohort(head_rows) for head_rows in heights_of(shape.group) if head_rows > SMALL_ROWS]


def halved(whole: Cohort, problem: Problem, *, where_room: bool = False) -> Lowered | None:
    """These paths by the first split into halves that one launch merges. where_room: only where the thread blocks of
    whole paths, all at a time, leave SMs without work.
    """
    shape, target = problem.shape, problem.target
    schedule = Lowered.of(whole, problem).schedule
    tile, blocks = schedule.classes[0], len(schedule.items) * shape.num_kv_heads
    if where_room and blocks > target.sms * resident_blocks(tile, shape, target):
        return None
    tiles = (schedule.column("tiles") + schedule.column("block_tiles")).max(initial=1)
    splits = (replace(whole, split=math.ceil(tiles * part) * tile.tokens, merge="final") for part in _PARTS)
    found = (Lowered.of(split, problem) for split in splits)
    return next((each for each in found if each.takes_one_launch), None)
