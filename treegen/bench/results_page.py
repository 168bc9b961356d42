"""Results of runs as a page: times over the floor of every case, provider by provider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treegen.bench.batch_results import FIGURES, BatchResult, batch_problems, batch_summary, run_us
from treegen.bench.result_tables import problems, summary
from treegen.bench.results import Result
from treegen.report.page.html_page import html_page

PANELS = ("results", "machine")
"""The panels of a page of results, from the top down."""


def results_html(machine: dict[str, Any], results: Sequence[Result] | Sequence[BatchResult], title: str) -> str:
    """Writes results as a page: one HTML file, which needs no other file and no network.

    Args:
        machine: The machine, with versions and the command line (treegen.bench.bench_runs.machine).
        results: Results of trees, or of batches.
        title: The page's heading.
    """
    return html_page(title, results_object(machine, results), PANELS)


def results_object(machine: dict[str, Any], results: Sequence[Result] | Sequence[BatchResult]) -> dict[str, Any]:
    """Returns the data of a page of results, for JSON forms.

    - machine: the machine;
    - results: providers; figures, each {name, unit, over_floor}; cases, each with its name, heads, facts in words,
      floor in microseconds, and outcomes; summary, a table of texts; problems, lines of text.

    An outcome has a status, a detail in words, and a number or null for each figure. A figure
    that is `over_floor` may be divided by the case's floor.
    """
    trees = [result for result in results if isinstance(result, Result)]
    batches = [result for result in results if isinstance(result, BatchResult)]
    figures = [("time", "us", True)] if trees else [_figure(title) for title, _, _ in FIGURES]
    return {
        "machine": {name: str(value) for name, value in machine.items()},
        "results": {
            "providers": list(dict.fromkeys(outcome.provider for result in results for outcome in result.outcomes)),
            "figures": [{"name": name, "unit": unit, "over_floor": over} for name, unit, over in figures],
            "cases": [*map(_tree_case, trees), *map(_batch_case, batches)],
            "summary": [] if not results else summary(trees) if trees else batch_summary(batches),
            "problems": problems(trees) if trees else batch_problems(batches),
        },
    }


_NAMES = {"run us": "layer", "plan ms": "plan", "step p50": "step, median", "step p99": "step, 99th percentile"}


def _figure(title: str) -> tuple[str, str, bool]:
    """Returns name, unit and whether the floor is of the same kind."""
    return (_NAMES[title], "us", True) if title == "run us" else (_NAMES[title], "ms", False)


def _tree_case(result: Result) -> dict[str, Any]:
    pages = f", pages of {result.page_size}" if result.page_size > 1 else ""
    facts = f"{result.rows:,} rows, {result.unique_tokens:,} tokens, {result.dtype}, head dim {result.head_dim}{pages}"
    outcomes = {
        each.provider: {"status": each.status, "detail": each.detail, "values": [each.best_us]}
        for each in result.outcomes
    }
    return _case(result.tree, result.heads, facts, result.floor_us, outcomes)


def _batch_case(result: BatchResult) -> dict[str, Any]:
    shared = f"{result.requests} requests, {result.tokens:,} tokens, {result.unique_tokens:,} of them distinct"
    facts = f"{result.family}: {shared}, pages of {result.page_size}, {result.layers} layers, {result.steps} steps"
    outcomes = {
        each.provider: {
            "status": each.status,
            "detail": each.detail,
            "values": [figure(each) if each.status == "right" else None for _, figure, _ in FIGURES],
        }
        for each in result.outcomes
    }
    assert FIGURES[0][1] is run_us
    return _case(result.batch, result.heads.replace(":", "/"), facts, result.floor_us, outcomes)


def _case(name: str, heads: str, facts: str, floor_us: float, outcomes: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "heads": heads, "facts": facts, "floor_us": floor_us, "outcomes": outcomes}
