"""The analytic cost model: the time of all launches of a schedule on a target (treegen.target.cost_terms)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treegen.cost.launch_counts import ItemLaunches, MergeLaunches
from treegen.ir.arrays import Floats
from treegen.target.cost_terms import ITEMS, MERGES, Symbols, facts_of, term_values
from treegen.target.targets import Constants, Target

if TYPE_CHECKING:
    import sympy

WAITING = 1.08
"""Time of a launch in which some items wait for others, over that of the same items in a launch without waiting.

Measured on an H200 (fp16, head dim 128): 266 plans of FastTree's 45 cases took 1.077 times the time that the terms
give.
"""


_PARTS: Mapping[str, Callable[[Any], Any]] = {
    "launching": lambda v: v.launch_us + (v.launches - 1) * v.next_launch_us,
    "items": lambda v: v.items_us * v.waiting,
    "merges": lambda v: v.merge_us,
    "unfused": lambda v: v.unfused_bytes / (v.memory_bytes_per_us * v.memory_fraction),
}
"""The parts of the time of all launches. They read a target's facts, the summed times of the launches, the number of
launches, the traffic of unfused operations, and `waiting`: WAITING where items wait for others, else 1."""


def total_symbol() -> sympy.Expr:
    """Returns the time of all launches as an expression of symbols; imports sympy."""
    return sum(part(Symbols()) for part in _PARTS.values())


def terms_of(
    launches: ItemLaunches | MergeLaunches, target: Target, constants: Constants | None = None
) -> dict[str, Floats]:
    """Returns the values of all terms of one kind of launches in microseconds, with an entry for each launch.

    constants: by default the target's.
    """
    part = ITEMS if isinstance(launches, ItemLaunches) else MERGES
    counts = {name: getattr(launches, name).astype(np.float64) for name in part.counts}
    return term_values(part, counts, target, constants)


@dataclass(frozen=True, slots=True)
class Times:
    """The parts of an estimated time, in microseconds.

    Attributes:
        launching: Starting the launches.
        items: Launches of work items.
        merges: Launches of merges.
        unfused: Unfused operations.
        launch_terms: The values of the model's terms for launches of work items, with an entry for each launch.
        merge_terms: The same for launches of merges.
    """

    launching: float
    items: float
    merges: float
    unfused: float
    launch_terms: Mapping[str, Floats]
    merge_terms: Mapping[str, Floats]

    @property
    def total(self) -> float:
        """Microseconds from the start of the first launch to the end of the last one."""
        return self.launching + self.items + self.merges + self.unfused


class ScheduleLaunches(NamedTuple):
    """All launches of a schedule.

    Attributes:
        items: Launches of work items.
        merges: Launches of merges.
        launches: The number of launches, unfused operations included.
        unfused_bytes: Traffic of unfused operations, which are not among `items`.
        waiting: Whether some of `items` wait for others in their launch.
    """

    items: ItemLaunches
    merges: MergeLaunches
    launches: int
    unfused_bytes: int = 0
    waiting: bool = False


def times(
    launches: ScheduleLaunches,
    target: Target,
    constants: Constants | None = None,
    items_us: Floats | None = None,
) -> Times:
    """Returns the times of all launches.

    Args:
        launches: The launches.
        target: The target that runs them.
        constants: The constants of the model; by default the target's.
        items_us: Microseconds of the launches of work items; by default this model's.
    """
    items, merges, number, unfused_bytes, waiting = launches
    launch_terms = terms_of(items, target, constants) if len(items.pieces) else {}
    merge_terms = terms_of(merges, target, constants) if len(merges.rows) else {}
    if items_us is None:
        items_us = launch_terms.get("items_us", np.zeros(0))
    facts = SimpleNamespace(
        **facts_of(target, constants),
        launches=number,
        items_us=float(items_us.sum()),
        merge_us=float(merge_terms.get("merge_us", np.zeros(0)).sum()),
        unfused_bytes=unfused_bytes,
        waiting=WAITING if waiting else 1.0,
    )
    parts = {name: part(facts) if number else 0.0 for name, part in _PARTS.items()}
    return Times(**parts, launch_terms=launch_terms, merge_terms=merge_terms)
