"""The analytic cost model: how long all launches of a schedule take on a target (treegen.target.cost_terms)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treegen.cost.launch_counts import ItemLaunches, MergeLaunches
from treegen.target.cost_terms import ITEMS, MERGES, Symbols, term_values
from treegen.target.targets import Constants, Target

if TYPE_CHECKING:
    import sympy

Floats = npt.NDArray[np.float64]
WAITING = 1.08
"""Time of a launch in which some items wait for others, over that of the same items in a launch where none does:
measured on an H200 (fp16, head dim 128), 266 plans of FastTree's 45 cases took 1.077 times what the terms give them.
"""


def _total(v: Any) -> Any:
    """Of the launches' summed times, the traffic of unfused operations, the number of launches, and WAITING where items
    wait for others, else 1.
    """
    launching = v.launch_us + (v.launches - 1) * v.next_launch_us
    unfused = v.unfused_bytes / (v.memory_bytes_per_us * v.memory_fraction)
    return launching + v.items_us * v.waiting + v.merge_us + unfused


def total_symbol() -> sympy.Expr:
    """The time of all launches as an expression of symbols; imports sympy."""
    return _total(Symbols())


def terms_of(
    launches: ItemLaunches | MergeLaunches, target: Target, constants: Constants | None = None
) -> dict[str, Floats]:
    """The values of all terms of one kind of launches in microseconds, an entry for each launch.

    constants: the target's by default.
    """
    part = ITEMS if isinstance(launches, ItemLaunches) else MERGES
    counts = {name: getattr(launches, name).astype(np.float64) for name in part.counts}
    return term_values(part, counts, target, constants)


@dataclass(frozen=True, slots=True)
class Times:
    """What an estimated time is made of, in microseconds.

    launch_terms, merge_terms: the values of the model's terms, an entry for each launch.
    """

    launching: float
    items: float
    merges: float
    unfused: float
    launch_terms: Mapping[str, Floats]
    merge_terms: Mapping[str, Floats]

    @property
    def total(self) -> float:
        """Microseconds from the first launch's start to the last one's end."""
        return self.launching + self.items + self.merges + self.unfused


def times(
    items: ItemLaunches,
    merges: MergeLaunches,
    launches: int,
    unfused_bytes: int,
    target: Target,
    constants: Constants | None = None,
    items_us: Floats | None = None,
    *,
    waiting: bool = False,
) -> Times:
    """The times of all launches.

    unfused_bytes: traffic of unfused operations, which are not among `items`. items_us: the times of `items`, by
    default this model's. waiting: whether some of them wait for others.
    """
    chosen = constants or target.constants
    launch_terms = terms_of(items, target, constants) if len(items.turns) else {}
    merge_terms = terms_of(merges, target, constants) if len(merges.rows) else {}
    if items_us is None:
        items_us = launch_terms.get("items_us", np.zeros(0))
    return Times(
        launching=chosen.launch_us + (launches - 1) * chosen.next_launch_us if launches else 0.0,
        items=float(items_us.sum()) * (WAITING if waiting else 1.0),
        merges=float(merge_terms.get("merge_us", np.zeros(0)).sum()),
        unfused=unfused_bytes / (target.memory_bytes_per_us * chosen.memory_fraction),
        launch_terms=launch_terms,
        merge_terms=merge_terms,
    )
