"""Estimates as text: their figures, and the terms of the cost model with their values."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping

from treegen.cost.account import Account, CostModel
from treegen.cost.analytic import WAITING, Times, total_symbol
from treegen.cost.figures import byte_text, count_text, time_text
from treegen.ir.arrays import Floats
from treegen.target.cost_terms import ITEMS, MERGES
from treegen.target.targets import Target
from treegen.target.task_costs import source_of_costs

COLUMNS = 80
"""The most columns of a text, as in terminals."""
_MOST_LAUNCHES = 4  # launches to list values of

_ACCOUNT: tuple[tuple[str, Callable[[Account], str]], ...] = (
    ("KV, each visible token once", lambda e: byte_text(e.kv_unique_bytes)),
    ("KV that the groups read", lambda e: byte_text(e.kv_hbm_bytes)),
    ("KV re-read by tiles and groups", lambda e: byte_text(e.kv_l2_bytes)),
    ("queries", lambda e: byte_text(e.q_bytes)),
    ("out and lse", lambda e: byte_text(e.out_bytes)),
    ("partials, written and read", lambda e: byte_text(e.partial_bytes)),
    ("scores, written and read", lambda e: byte_text(e.score_bytes)),
    ("masks", lambda e: byte_text(e.mask_bytes)),
    ("useful work", lambda e: count_text(e.useful_flops) + "FLOP"),
    ("executed work", lambda e: count_text(e.padded_flops) + "FLOP"),
    ("padding waste", lambda e: f"{100 * e.padding_waste:.1f} %"),
    ("pieces (items x lanes)", lambda e: str(e.items)),
    ("waves", lambda e: f"{e.waves:.2f}"),
    ("launches", lambda e: str(e.launches)),
    ("estimated time", lambda e: time_text(e.time_us)),
)


def account_lines(estimate: Account) -> list[str]:
    """Returns a line for each figure."""
    return [f"  {name:32}{value(estimate):>12}" for name, value in _ACCOUNT]


def time_lines(times: Times, *, terms: bool = False) -> Iterator[str]:
    """Yields the parts of the time in microseconds. terms: adds the values of the model's terms for every launch."""
    yield (
        f"    = launching {times.launching:.1f} + work items {times.items:.1f} + merges {times.merges:.1f}"
        + (f" + unfused traffic {times.unfused:.1f}" if times.unfused else "")
    )
    for title, values in (("work items", times.launch_terms), ("merges", times.merge_terms)) if terms else ():
        if values:
            yield f"    {title}: {', '.join(_values_text(values))}"


def _values_text(terms: Mapping[str, Floats]) -> Iterator[str]:
    for name, values in terms.items():
        shown = " | ".join(f"{value:.3g}" for value in values[:_MOST_LAUNCHES])
        yield f"{name} {shown}" + (
            f" | ... {len(values) - _MOST_LAUNCHES} more" if len(values) > _MOST_LAUNCHES else ""
        )


def model_lines(target: Target, chosen: CostModel) -> Iterator[str]:
    """Yields the formulas of the model, and the source of its constants."""
    own = target.constants_of == target.name
    source = f"fitted on {target.name}" if own else f"of {target.constants_of}, with the SMs and rates of {target.name}"
    yield f"cost model, in microseconds per launch; constants {source}:"
    for title, part in (("work items", ITEMS), ("merges", MERGES)):
        yield f"  {title}"
        yield from (f"    {name} = {term}" for name, term in part.symbols.items())
    yield f"  all launches: {total_symbol()}"
    yield f"  waiting: {WAITING} where final items wait for others in their launch, otherwise 1"
    if chosen == "profiled":
        yield f"  times of work items are profiled instead: {source_of_costs(target)}"


def fitted(lines: Iterable[str], width: int = COLUMNS) -> Iterator[str]:
    """Yields all lines, with lines of more than `width` columns broken at blanks and indented."""
    for line in (line.rstrip() for text in lines for line in text.split("\n")):
        if len(line) <= width:
            yield line
            continue
        margin = line[: len(line) - len(line.lstrip())]
        yield from textwrap.wrap(
            line, width, subsequent_indent=f"{margin}    ", break_long_words=False, break_on_hyphens=False
        )
