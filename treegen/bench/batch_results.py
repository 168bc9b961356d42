"""Results of the suite of batches, as JSON and as short tables that compare treegen with FlashInfer's best."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treegen.bench.results import Status, geometric_mean
from treegen.ir.errors import FormatError
from treegen.text_files import parsed_json, read_text, save_text

BATCH_FORMAT = "treegen bench batches 1"
OWN = "treegen"
"""The name of treegen's provider."""
_PEER = "flashinfer"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds over the steps of a course: the median, the 99th percentile and the mean."""

    p50: float
    p99: float
    mean: float

    @classmethod
    def of(cls, times: Sequence[float]) -> StepTimes:
        """Summarizes at least one time."""
        ranked = sorted(times)
        return cls(statistics.median(times), ranked[math.ceil(0.99 * len(ranked)) - 1], statistics.fmean(times))


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The outcome of a provider on a batch.

    Args:
        provider: The provider's name.
        status: Whether its output is right; only then times are taken.
        error: `max |out - ref| / max |ref|`, the larger of the first and the last step.
        run_us: Microseconds of one layer: the median on a cold L2, replayed as a CUDA graph.
        first_plan_ms: Milliseconds to plan for the batch's first step.
        plan: Milliseconds of the host to plan for a step, over the course.
        step: Milliseconds of whole steps, over the course.
        detail: Why something is missing.
    """

    provider: str
    status: Status
    error: float | None = None
    run_us: float | None = None
    first_plan_ms: float | None = None
    plan: StepTimes | None = None
    step: StepTimes | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outcomes of all providers on a batch with one setting of heads.

    Args:
        batch, family, seed: Which batch of the suite this is.
        heads: "query heads:KV heads"; a head dim other than 128, and types of q and KV other than bf16, follow.
        page_size: Tokens of a page.
        requests: Requests at the first step.
        tokens: Tokens of all requests at the first step.
        unique_tokens: The same, where a shared token counts once.
        steps: Steps of the course.
        layers: Attention layers of a step.
        floor_us: Microseconds to move a layer's unique KV, q and out once.
        outcomes: One outcome for each provider.
        measured_on: The rank and the GPU, where several ranks share the cases.
    """

    batch: str
    family: str
    seed: int
    heads: str
    page_size: int
    requests: int
    tokens: int
    unique_tokens: int
    steps: int
    layers: int
    floor_us: float
    outcomes: tuple[BatchOutcome, ...]
    measured_on: str = ""

    @classmethod
    def from_object(cls, entry: dict[str, Any]) -> BatchResult:
        """Returns the result of a JSON object with its fields. Raises TypeError or KeyError for any other."""
        return cls(**{**entry, "outcomes": tuple(map(_outcome, entry["outcomes"]))})

    def best(self, figure: Callable[[BatchOutcome], float | None], provider: str) -> float | None:
        """Returns the least figure of right outcomes of providers whose names begin with `provider`."""
        found = [
            value
            for outcome in self.outcomes
            if outcome.status == "right" and outcome.provider.startswith(provider)
            if (value := figure(outcome)) is not None
        ]
        return min(found, default=None)


def run_us(outcome: BatchOutcome) -> float | None:
    """Returns microseconds of a layer."""
    return outcome.run_us


def plan_p50(outcome: BatchOutcome) -> float | None:
    """Returns the median milliseconds to plan."""
    return None if outcome.plan is None else outcome.plan.p50


def step_p50(outcome: BatchOutcome) -> float | None:
    """Returns the median milliseconds of a step."""
    return None if outcome.step is None else outcome.step.p50


def step_p99(outcome: BatchOutcome) -> float | None:
    """Returns the 99th percentile of a step in milliseconds."""
    return None if outcome.step is None else outcome.step.p99


FIGURES: tuple[tuple[str, Callable[[BatchOutcome], float | None], int], ...] = (
    ("run us", run_us, 1),
    ("plan ms", plan_p50, 2),
    ("step p50", step_p50, 2),
    ("step p99", step_p99, 2),
)
"""Titles, figures and decimals of the table's columns."""
_COMPARED = ("run us", "step p50", "step p99")
"""Columns with a ratio of FlashInfer's figure to treegen's."""


def save_batches(path: Path, machine: dict[str, object], results: Sequence[BatchResult]) -> None:
    """Writes results and the machine that they were measured on. Raises FormatError if that fails."""
    value = {"format": BATCH_FORMAT, "machine": machine, "results": [asdict(result) for result in results]}
    save_text(path, json.dumps(value, indent=1) + "\n")


def load_batches(path: Path) -> tuple[dict[str, Any], list[BatchResult]]:
    """Reads a file of `save_batches`: the machine and the results. Raises FormatError for any other file."""
    value = parsed_json(read_text(str(path)), str(path))
    if not isinstance(value, dict) or value.get("format") != BATCH_FORMAT:
        fix = "name a file that `treegen bench --table batches --json` wrote"
        raise FormatError(str(path), "its format", f"is not {BATCH_FORMAT!r}", fix)
    try:
        return dict(value["machine"]), [BatchResult.from_object(entry) for entry in value["results"]]
    except (TypeError, KeyError, ValueError) as cause:
        raise FormatError(str(path), "its results", f"lacks or adds fields ({cause})", "measure again") from cause


def _outcome(entry: dict[str, Any]) -> BatchOutcome:
    times = {name: None if entry[name] is None else StepTimes(**entry[name]) for name in ("plan", "step")}
    return BatchOutcome(**{**entry, **times})


def batch_table(results: Sequence[BatchResult]) -> list[list[str]]:
    """Makes a table, a row per batch: treegen's figures, FlashInfer's best, and treegen's speed-ups over it."""
    titles = ["batch", "heads", "floor", "exact", "invariant"]
    for title, _, _ in FIGURES:
        titles += [title, "FI", *(["x"] if title in _COMPARED else [])]
    rows = [titles]
    for result in results:
        cells = [result.batch, result.heads, f"{result.floor_us:.1f}"]
        cells += [_number(result.best(run_us, provider), 1) for provider in ("exact", "batch-invariant")]
        for title, figure, decimals in FIGURES:
            own, peer = result.best(figure, OWN), result.best(figure, _PEER)
            cells += [_number(own, decimals), _number(peer, decimals)]
            if title in _COMPARED:
                cells.append(_number(ratio(own, peer), 2))
        rows.append(cells)
    return rows


def batch_summary(results: Sequence[BatchResult]) -> list[list[str]]:
    """Makes a table, a row per family and one for all: geometric mean and least of the ratios to FlashInfer's best."""
    rows = [["family", "cases", *(f"{title} {kind}" for title in _COMPARED for kind in ("mean x", "least x"))]]
    figures = [figure for title, figure, _ in FIGURES if title in _COMPARED]
    for family in [*dict.fromkeys(result.family for result in results), "all"]:
        chosen = [result for result in results if family in (result.family, "all")]
        cells = [family, str(len(chosen))]
        for figure in figures:
            every = (ratio(result.best(figure, OWN), result.best(figure, _PEER)) for result in chosen)
            ratios = [value for value in every if value is not None]
            cells += [_number(geometric_mean(ratios) if ratios else None, 2), _number(min(ratios, default=None), 2)]
        rows.append(cells)
    return rows


def batch_problems(results: Sequence[BatchResult]) -> list[str]:
    """Lists why providers were wrong, failed, or were unavailable for every batch: a line per reason."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    served = {outcome.provider for result in results for outcome in result.outcomes if outcome.status == "right"}
    for result in results:
        for outcome in result.outcomes:
            if outcome.detail and (outcome.status != "unavailable" or outcome.provider not in served):
                key = (outcome.provider, outcome.status, outcome.detail)
                cases.setdefault(key, []).append(f"{result.batch} {result.heads}")
    return [
        f"{provider} {status}: {detail}: {named[0]}{f' and {len(named) - 1} more' if len(named) > 1 else ''}"
        for (provider, status, detail), named in cases.items()
    ]


def ratio(own: float | None, peer: float | None) -> float | None:
    """Returns the speed-up of `own` over `peer`, two times in the same unit."""
    return None if own is None or peer is None else peer / own


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"
