"""Reports of results: as JSON, as a table with means, and as a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from treegen.bench.results import ProviderOutcome, Result, geometric_mean
from treegen.ir.errors import FormatError, InputError
from treegen.text_files import parsed_json, read_text, save_text

FORMAT = "treegen bench 1"
_NAMED = 3
"""The most cases to name for a problem."""
LARGE_FLOOR_US = 40.0
"""The least floor, in microseconds, of cases that memory or arithmetic bounds rather than launches."""


def save(path: Path, machine: dict[str, object], results: Sequence[Result]) -> None:
    """Writes results and the machine that they were measured on. Raises FormatError if that fails."""
    value = {"format": FORMAT, "machine": machine, "results": [asdict(result) for result in results]}
    save_text(path, json.dumps(value, indent=1) + "\n")


def load(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """Reads a file of `save`: the machine and the results. Raises FormatError for any other file."""
    value = parsed_json(read_text(str(path)), str(path))
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise FormatError(
            str(path), "its format", f"is not {FORMAT!r}", "name a file that `treegen bench --json` wrote"
        )
    try:
        return dict(value["machine"]), [Result.from_object(entry) for entry in value["results"]]
    except (TypeError, KeyError, ValueError) as cause:
        reason = f"lacks or adds fields ({cause})"
        raise FormatError(str(path), "its results", reason, "measure again with `treegen bench --json`") from cause


def outcome_of(result: Result, provider: str) -> ProviderOutcome | None:
    """Returns the outcome of a provider in a result; None where it did not run."""
    return next((outcome for outcome in result.outcomes if outcome.provider == provider), None)


def time_of(result: Result, provider: str) -> float | None:
    """Returns the provider's time in microseconds; None unless its output was right."""
    outcome = outcome_of(result, provider)
    return None if outcome is None else outcome.best_us


def providers_of(results: Sequence[Result]) -> list[str]:
    """Lists all providers, in the order in which they ran."""
    return list(dict.fromkeys(outcome.provider for result in results for outcome in result.outcomes))


def only(results: Sequence[Result], names: str) -> list[Result]:
    """Keeps the outcomes of some providers, in the order of their names with commas.

    Raises InputError for a provider without results.
    """
    wanted, known = [name.strip() for name in names.split(",")], providers_of(results)
    for name in wanted:
        if name not in known:
            raise InputError("providers", name, "has no results in this file", f"use some of {', '.join(known)}")
    return [
        replace(result, outcomes=tuple(found for name in wanted if (found := outcome_of(result, name)) is not None))
        for result in results
    ]


def speed_ups(results: Sequence[Result], provider: str, over: str) -> list[float]:
    """Returns the speed-up of a provider over another for every case in which both have times."""
    pairs = ((time_of(result, provider), time_of(result, over)) for result in results)
    return [other / own for own, other in pairs if own is not None and other is not None]


def table(results: Sequence[Result]) -> list[list[str]]:
    """Makes a table, a row per case: the time of every provider in microseconds, or its status."""
    providers = providers_of(results)
    rows = [["tree", "heads", "floor", *providers]]
    for result in results:
        cells = [_cell(outcome_of(result, provider)) for provider in providers]
        rows.append([_shortened(result.tree), result.heads, f"{result.floor_us:.1f}", *cells])
    return rows


def summary(results: Sequence[Result]) -> list[list[str]]:
    """Makes a table, a row per provider: the first provider's speed-up over it, and floors over its times."""
    providers = providers_of(results)
    first = providers[0]
    rows = [["provider", "cases", "wrong", f"{first} is faster", "at least", f"of floors >= {LARGE_FLOOR_US:.0f} us"]]
    large = [result for result in results if result.floor_us >= LARGE_FLOOR_US]
    for provider in providers:
        outcomes = [outcome for result in results if (outcome := outcome_of(result, provider)) is not None]
        right, wrong = (sum(outcome.status == status for outcome in outcomes) for status in ("right", "wrong"))
        ratios = speed_ups(results, first, provider)
        times = [(result.floor_us, time_of(result, provider)) for result in large]
        fractions = [floor / time for floor, time in times if time is not None]
        rows.append(
            [
                provider,
                str(right),
                str(wrong),
                f"{geometric_mean(ratios):.2f}x" if ratios else "-",
                f"{min(ratios):.2f}x" if ratios else "-",
                f"{geometric_mean(fractions):.2f} ({len(fractions)})" if fractions else "-",
            ]
        )
    return rows


def problems(results: Sequence[Result]) -> list[str]:
    """Lists why providers have no time: a line per reason, with its cases."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        for outcome in result.outcomes:
            if outcome.detail:
                key = (outcome.provider, outcome.status, outcome.detail)
                cases.setdefault(key, []).append(f"{_shortened(result.tree)} {result.heads}")
    lines = []
    for (provider, status, detail), named in cases.items():
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        lines.append(f"{provider} {status}: {detail}: {', '.join(named[:_NAMED])}{more}")
    return lines


def plot(path: Path, machine: dict[str, Any], results: Sequence[Result]) -> None:
    """Draws the times of every case as multiples of its floor: bars grouped by case, a panel per setting of heads.

    path: the ending chooses the format (.svg, .png, .pdf). Raises InputError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as cause:
        raise InputError("plot", str(path), "needs matplotlib", "pip install '.[plot]'") from cause
    matplotlib.use("agg")
    from matplotlib import pyplot

    providers, heads = providers_of(results), list(dict.fromkeys(result.heads for result in results))
    figure, axes = pyplot.subplots(len(heads), 1, figsize=(12, 3.2 * len(heads)), squeeze=False, layout="constrained")
    for axis, setting in zip(axes[:, 0], heads, strict=True):
        cases = [result for result in results if result.heads == setting]
        width = 0.8 / len(providers)
        for index, provider in enumerate(providers):
            drawn = [(place, time_of(result, provider), result.floor_us) for place, result in enumerate(cases)]
            bars = [(place, time / floor) for place, time, floor in drawn if time is not None]
            places = [place + (index - (len(providers) - 1) / 2) * width for place, _ in bars]
            axis.bar(places, [height for _, height in bars], width, label=provider)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylabel(f"time / floor, {setting} heads")
        axis.set_xticks(range(len(cases)), [_shortened(result.tree, 24) for result in cases], rotation=30, ha="right")
    axes[0, 0].legend(ncols=len(providers), loc="upper right", fontsize="small")
    figure.suptitle(f"{machine.get('device', '')}: lower is better, 1 is the floor")
    figure.savefig(path)
    pyplot.close(figure)


def _cell(outcome: ProviderOutcome | None) -> str:
    if outcome is None or outcome.status == "unavailable":
        return "-"
    if outcome.best_us is None:
        return outcome.status
    return f"{outcome.best_us:.1f}"


def _shortened(text: str, length: int = 44) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
