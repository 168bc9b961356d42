"""Ranking of strategies by estimated time, with the reason for each one's place in a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from treegen.cost.account import Account
from treegen.cost.analytic import Times
from treegen.cost.figures import byte_text, time_text
from treegen.report.estimate_text import COLUMNS

_CLOSE = 1.02  # times within 2 % of the fastest count as equal: the model is not more exact


@dataclass(frozen=True, slots=True)
class Ranked:
    """A strategy's place, 1 for the least estimated time, and the reason."""

    place: int
    name: str
    estimate: Account
    reason: str


def ranked(entries: Sequence[tuple[str, Account, Times]]) -> list[Ranked]:
    """Ranks strategies by estimated time; equal ones keep their order. entries: (name, estimate, times) of each."""
    order = sorted(entries, key=lambda entry: entry[1].time_us)
    _, best, best_times = order[0]
    result = []
    for place, (name, estimate, made_of) in enumerate(order, start=1):
        if place == 1:
            reason = f"fastest: {bound_text(estimate, made_of)}"
        elif estimate.time_us <= _CLOSE * best.time_us:
            reason = f"as fast as {order[0][0]}: {bound_text(estimate, made_of)}"
        else:
            reason = f"{estimate.time_us / best.time_us:.2f}x: {_excess(estimate, made_of, best, best_times)}"
        result.append(Ranked(place, name, estimate, reason))
    return result


def bound_text(estimate: Account, made_of: Times) -> str:
    """Names what takes most of the time: `bound by the longest thread block`."""
    if not estimate.launches:
        return "nothing to do"
    if made_of.unfused > made_of.items:
        return f"bound by the traffic of {byte_text(estimate.score_bytes + estimate.mask_bytes)} of scores and masks"
    if made_of.launching > max(made_of.items, made_of.merges):
        return f"bound by {_launches(estimate)}"
    if made_of.merges > made_of.items:
        return f"bound by merging {byte_text(estimate.partial_bytes)} of partials"
    return f"bound by {_items_bound(made_of)}"


def _items_bound(made_of: Times) -> str:
    sums = {name: float(made_of.launch_terms[name].sum()) for name in ("chain", "throughput", "traffic")}
    texts = {
        "chain": "the longest thread block",
        "throughput": "the work of full SMs",
        "traffic": "traffic with memory",
    }
    return texts[max(sums, key=lambda name: sums[name])]


def _launches(estimate: Account) -> str:
    return "1 launch" if estimate.launches == 1 else f"{estimate.launches} launches"


def _excess(estimate: Account, made_of: Times, best: Account, best_times: Times) -> str:
    """Names the largest loss against the fastest strategy."""
    more = {
        "unfused": made_of.unfused - best_times.unfused,
        "items": made_of.items - best_times.items,
        "merges": made_of.merges - best_times.merges,
        "launching": made_of.launching - best_times.launching,
    }
    worst = max(more, key=lambda name: more[name])
    lost = time_text(more[worst])
    if worst == "unfused":
        return f"{lost} more for {byte_text(estimate.score_bytes)} of scores that pass through memory"
    if worst == "merges":
        return f"{lost} more to merge {byte_text(estimate.partial_bytes)} of partials"
    if worst == "launching":
        return f"{lost} more for {_launches(estimate)}"
    cause = _items_bound(made_of)
    if "full SMs" in cause:
        loads = estimate.kv_unique_bytes + estimate.kv_l2_bytes
        best_loads = best.kv_unique_bytes + best.kv_l2_bytes
        if loads * best.padded_flops > best_loads * estimate.padded_flops:
            cause = f"{cause}, which load {byte_text(loads)} of KV ({loads / best_loads:.1f} times as much)"
        else:
            cause = f"{cause}, {100 * estimate.padding_waste:.0f} % of it padding"
    return f"{lost} more for {cause}"


_COLUMNS: tuple[tuple[str, Callable[[Account], str]], ...] = (
    ("time", lambda e: time_text(e.time_us)),
    ("KV read", lambda e: byte_text(e.kv_hbm_bytes)),
    ("KV re-read", lambda e: byte_text(e.kv_l2_bytes)),
    ("partials", lambda e: byte_text(e.partial_bytes)),
    ("padding", lambda e: f"{100 * e.padding_waste:.1f} %"),
    ("launches", lambda e: str(e.launches)),
    ("pieces", lambda e: str(e.items)),
    ("waves", lambda e: f"{e.waves:.2f}"),
    ("queries", lambda e: byte_text(e.q_bytes)),
    ("scores", lambda e: byte_text(e.score_bytes)),
    ("masks", lambda e: byte_text(e.mask_bytes)),
)
_LONGEST_NAME = 18  # characters of a strategy's name in the table; reasons have the full name


def ranking_lines(entries: Sequence[Ranked]) -> Iterator[str]:
    """Yields a table sorted by estimated time with a line of titles, and then the reason for each strategy's place.

    The table names strategies without options. Columns that exceed COLUMNS characters are left out.
    """
    names = ["strategy", *(_short(entry.name.partition("(")[0]) for entry in entries)]
    places = ["", *(f"{entry.place}." for entry in entries)]
    widths = [max(map(len, column)) for column in (places, names)]
    table = [f"{place:>{widths[0]}}  {name:<{widths[1]}}" for place, name in zip(places, names, strict=True)]
    for title, value in _COLUMNS:
        cells = [title, *(value(entry.estimate) for entry in entries)]
        wide = max(map(len, cells))
        if len(table[0]) + 2 + wide > COLUMNS:
            break
        table = [f"{line}  {cell:>{wide}}" for line, cell in zip(table, cells, strict=True)]
    yield from table
    yield ""
    yield from (f"{entry.place:>{widths[0] - 1}}. {entry.name}: {entry.reason}" for entry in entries)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
