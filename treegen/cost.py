"""The analytic cost model: how long a schedule's launches take on a target, written symbolically.

A launch of work items takes the longest of three, softly joined: its longest thread block alone (a chain of dependent
tiles, and of partials that it merges before it writes), all blocks on full SMs, and its traffic with memory. A launch
of merges takes its longest list or its traffic.
Constants are a target's, fitted to measurements or scaled from a target that has been measured (treegen.targets).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treegen.launches import ItemLaunches, MergeLaunches
from treegen.targets import Constants, Target

if TYPE_CHECKING:
    import sympy

Floats = npt.NDArray[np.float64]
DEVICE_FACTS = ("sms", "sm_flops_per_us", "memory_bytes_per_us")


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of launch: what is counted of it, and its terms in microseconds; the last one is the launch's time.

    A term may use those before it by name.
    """

    counts: tuple[str, ...]
    terms: Mapping[str, sympy.Expr]


@dataclass(frozen=True, slots=True)
class Model:
    """The symbolic model. total: of the launches' summed times `items_us` and `merge_us`, the traffic of unfused
    operations, and the number of launches.
    """

    items: Part
    merges: Part
    total: sympy.Expr


@cache
def model() -> Model:
    """The model's expressions; imports sympy on first use."""
    import sympy

    def symbols(names: str) -> list[sympy.Symbol]:
        return [_symbol(name) for name in names.split()]

    def joined(*times: sympy.Expr) -> sympy.Expr:
        return sympy.Add(*(time**sharpness for time in times)) ** (1 / sharpness)

    sharpness = _symbol("sharpness")
    flops, loaded, sm_rate, packing = symbols("tile_flops tile_bytes sm_flops_per_us packed_factor")

    tile_us, lone_fraction, full_fraction, load_rate = symbols(
        "lone_tile_us lone_flop_fraction full_flop_fraction full_bytes_per_us"
    )
    lone_tile, full_tile, chain, throughput, traffic = symbols("lone_tile full_tile chain throughput traffic")
    turns, full, packed, sms, block_us = symbols("turns full packed sms full_block_us")
    rows, row_us = symbols("tile_rows full_row_us")
    long_turns, long_full, long_packed, lone_us = symbols("longest_turns longest_full longest_packed lone_block_us")
    memory, rate, fraction = symbols("memory_bytes memory_bytes_per_us memory_fraction")
    long_merges, step = symbols("longest_merges merge_step_us")
    items = {
        "lone_tile": tile_us + flops / (sm_rate * lone_fraction),
        "full_tile": flops / (sm_rate * full_fraction) + loaded / load_rate,
        "chain": long_turns * lone_us + (long_full + long_packed * packing) * lone_tile + long_merges * step,
        "throughput": (turns * (block_us + rows * row_us) + (full + packed * packing) * full_tile) / sms,
        "traffic": memory / (rate * fraction),
        "items_us": joined(chain, throughput, traffic),
    }
    longest, merge_chain, merge_traffic = symbols("longest merge_chain merge_traffic")
    read, written, merge_fraction = symbols("read_bytes written_bytes merge_fraction")
    merges = {
        "merge_chain": longest * step,
        "merge_traffic": (read + written) / (rate * merge_fraction),
        "merge_us": joined(merge_chain, merge_traffic),
    }
    launch, following, launches, items_us, merge_us = symbols("launch_us next_launch_us launches items_us merge_us")
    unfused = _symbol("unfused_bytes") / (rate * fraction)
    return Model(
        Part(
            (
                "turns", "full", "packed", "longest_turns", "longest_full", "longest_packed",
                "longest_merges", "tile_flops", "tile_bytes", "tile_rows", "memory_bytes",
            ),
            items,
        ),
        Part(("read_bytes", "written_bytes", "longest"), merges),
        launch + (launches - 1) * following + items_us + merge_us + unfused,
    )  # fmt: skip


def _symbol(name: str) -> sympy.Symbol:
    import sympy

    return sympy.Symbol(name, positive=True)


@cache
def _compiled(kind: str) -> Callable[..., Any]:
    """A function of a part's counts, DEVICE_FACTS and the Constants that gives the values of all its terms."""
    import sympy

    part: Part = getattr(model(), kind)
    values: dict[sympy.Symbol, sympy.Expr] = {}
    for name, term in part.terms.items():
        values[_symbol(name)] = term.subs(values)
    names = (*part.counts, *DEVICE_FACTS, *(field.name for field in fields(Constants)))
    function: Callable[..., Any] = sympy.lambdify([_symbol(n) for n in names], list(values.values()), "numpy", cse=True)
    return function


def term_values(
    launches: ItemLaunches | MergeLaunches, target: Target, constants: Constants | None = None
) -> dict[str, Floats]:
    """The values of all terms of one kind of launches in microseconds, an entry for each launch.

    constants: the target's by default.
    """
    kind = "items" if isinstance(launches, ItemLaunches) else "merges"
    part: Part = getattr(model(), kind)
    counts = [getattr(launches, name).astype(np.float64) for name in part.counts]
    facts = [getattr(target, name) for name in DEVICE_FACTS]
    of_target = [getattr(constants or target.constants, field.name) for field in fields(Constants)]
    values = _compiled(kind)(*counts, *facts, *of_target)
    return {name: np.broadcast_to(value, counts[0].shape) for name, value in zip(part.terms, values, strict=True)}


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
) -> Times:
    """The times of all launches.

    unfused_bytes: traffic of unfused operations, which are not among `items`. items_us: the times of `items`, by
    default this model's.
    """
    chosen = constants or target.constants
    launch_terms = term_values(items, target, constants) if len(items.turns) else {}
    merge_terms = term_values(merges, target, constants) if len(merges.rows) else {}
    if items_us is None:
        items_us = launch_terms.get("items_us", np.zeros(0))
    return Times(
        launching=chosen.launch_us + (launches - 1) * chosen.next_launch_us if launches else 0.0,
        items=float(items_us.sum()),
        merges=float(merge_terms.get("merge_us", np.zeros(0)).sum()),
        unfused=unfused_bytes / (target.memory_bytes_per_us * chosen.memory_fraction),
        launch_terms=launch_terms,
        merge_terms=merge_terms,
    )
