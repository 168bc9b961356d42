"""The terms of the analytic cost model: the time of a launch on a target, written symbolically.

A launch of work items takes the soft maximum of three times: its longest thread block alone (a chain of dependent
tiles, and of partials that it joins before it writes), all thread blocks on full SMs, and its traffic with memory. The
last two assume that every SM has the thread blocks of the busiest one, unless `even_pieces` is `pieces`. A launch of
merges takes its longest list or its traffic. Constants are a target's, fitted to its measurements or those of another
target (treegen.target.targets).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from treegen.ir.arrays import Floats
from treegen.target.targets import Constants, Target

if TYPE_CHECKING:
    import sympy

DEVICE_FACTS = ("sms", "sm_flops_per_us", "memory_bytes_per_us")


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of launch: its counts, and its terms in microseconds. The last term is the launch's time.

    A term reads counts, DEVICE_FACTS, Constants and earlier terms from a namespace, whose values may be numbers, arrays
    or symbols.
    """

    counts: tuple[str, ...]
    terms: Mapping[str, Callable[[Any], Any]]

    def values(self, namespace: SimpleNamespace) -> dict[str, Any]:
        """Returns the values of all terms, and puts them into the namespace, too."""
        found = {}
        for name, term in self.terms.items():
            found[name] = term(namespace)
            setattr(namespace, name, found[name])
        return found

    @property
    def symbols(self) -> Mapping[str, sympy.Expr]:
        """The terms as expressions of symbols; imports sympy."""
        symbols = Symbols()
        return {name: term(symbols) for name, term in self.terms.items()}


def _joined(v: Any, *times: Any) -> Any:
    """Returns the soft maximum of times."""
    return sum(time**v.sharpness for time in times) ** (1 / v.sharpness)


ITEMS = Part(
    (
        "pieces", "even_pieces", "full", "packed", "longest_pieces", "longest_full", "longest_packed", "longest_merges",
        "tile_flops", "tile_bytes", "tile_rows", "memory_bytes",
    ),
    {
        "lone_tile": lambda v: v.lone_tile_us + v.tile_flops / (v.sm_flops_per_us * v.lone_flop_fraction),
        "full_tile": lambda v: (
            v.full_tile_us
            + v.tile_flops / (v.sm_flops_per_us * v.full_flop_fraction)
            + v.tile_bytes / v.full_bytes_per_us
        ),
        "chain": lambda v: (
            v.longest_pieces * v.lone_block_us
            + (v.longest_full + v.longest_packed) * v.lone_tile
            + v.longest_packed * v.lone_packed_us
            + v.longest_merges * v.merge_step_us
        ),
        "unevenness": lambda v: v.even_pieces / v.pieces,
        "throughput": lambda v: (
            (
                v.pieces * (v.full_block_us + v.tile_rows * v.full_row_us)
                + (v.full + v.packed) * v.full_tile
                + v.packed * v.full_packed_us
            )
            * v.unevenness
            / v.sms
        ),
        "traffic": lambda v: v.memory_bytes * v.unevenness / (v.memory_bytes_per_us * v.memory_fraction),
        "items_us": lambda v: _joined(v, v.chain, v.throughput, v.traffic),
    },
)  # fmt: skip
MERGES = Part(
    ("read_bytes", "written_bytes", "longest"),
    {
        "merge_chain": lambda v: v.longest * v.merge_step_us,
        "merge_traffic": lambda v: (v.read_bytes + v.written_bytes) / (v.memory_bytes_per_us * v.merge_fraction),
        "merge_us": lambda v: _joined(v, v.merge_chain, v.merge_traffic),
    },
)


class Symbols:
    """A namespace in which every name is a symbol."""

    def __getattr__(self, name: str) -> sympy.Symbol:
        import sympy

        return sympy.Symbol(name, positive=True)


@cache
def facts_of(target: Target, constants: Constants | None = None) -> Mapping[str, float]:
    """Returns the facts about a target that terms read, by name. constants: by default the target's."""
    facts = {name: float(getattr(target, name)) for name in DEVICE_FACTS}
    return {**facts, **asdict(constants or target.constants)}


def term_values(
    part: Part, counts: Mapping[str, Floats], target: Target, constants: Constants | None = None
) -> dict[str, Floats]:
    """Returns the values of all terms of one kind of launches in microseconds, with an entry for each launch.

    counts: the part's counts, by name. constants: by default the target's.
    """
    values = part.values(SimpleNamespace(**counts, **facts_of(target, constants)))
    length = len(next(iter(counts.values())))
    return {name: np.broadcast_to(value, length) for name, value in values.items()}
