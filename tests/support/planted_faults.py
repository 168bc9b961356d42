"""Faults that checks have to find: a strategy whose plans miss tokens, and items with other slots."""

from __future__ import annotations

import dataclasses

import numpy as np

from treegen import strategies
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.strategies import Strategy
from treegen.target.problem import Problem


class Wrong(Strategy):
    """Sees no last tokens."""

    name = "wrong"

    def plan(self, problem: Problem, on_pass: object = None) -> Plan:
        plan = strategies.deft_node().plan(problem)
        return dataclasses.replace(plan, stop=plan.stop - 1)


def with_slot(schedule: Schedule, item: int, slot: int) -> np.ndarray:
    """Returns the items of a schedule, with another partial slot for one of them."""
    items = schedule.items.copy()
    items[item, 6] = slot
    return items
