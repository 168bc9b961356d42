"""Runs of decodings as a page: KV, sharing and time of decoding steps, provider by provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treegen.bench.bench_runs import checkout_commit
from treegen.bench.decoding_runs import DecodingOutcome, decoding_table
from treegen.bench.kv_reads import StepFigures
from treegen.report.page.html_page import html_page
from treegen.version import VERSION

PANELS = ("course", "outcomes", "machine")
"""The panels of a run's page, from the top down."""


def decoding_html(outcomes: Sequence[DecodingOutcome], words: str) -> str:
    """Writes a page on the runs of a decoding: one HTML file, which needs no other file and no network.

    Args:
        outcomes: One outcome for each provider.
        words: What was run, in a line; its part before a colon is the heading.
    """
    return html_page(words.partition(":")[0], decoding_object(outcomes, words), PANELS)


def decoding_object(outcomes: Sequence[DecodingOutcome], words: str) -> dict[str, Any]:
    """Returns the data of a run's page, for JSON forms.

    - course: words, steps, charts and facts, as those of a workload (treegen.report.decode_course.course_object), with
      a line for each provider; null for steps without figures of it;
    - outcomes: the table of the command, as texts;
    - machine: version and commit.
    """
    ran = [found for found in outcomes if found.course]
    longest = max((found.course for found in ran), key=len, default=())
    commit = checkout_commit()

    def chart(title: str, unit: str, figure: Callable[[DecodingOutcome, StepFigures], float | None]) -> dict[str, Any]:
        lines = []
        for found in ran:
            values = {each.step: figure(found, each) for each in found.course}
            lines.append({"name": found.provider, "values": [values.get(each.step) for each in longest]})
        return {"title": title, "unit": unit, "lines": lines}

    charts = [
        chart("Time of a step", "ms", lambda _, each: round(each.ms, 4)),
        chart("KV read", "bytes", lambda found, each: each.read * found.token_bytes),
        chart("Sharing: KV on all paths over KV read", "ratio", lambda _, each: _ratio(each.paths, each.read)),
    ]
    facts = {
        "branches": ("count", [each.branches for each in longest]),
        "KV if each branch reads its own": ("bytes", [each.paths * ran[0].token_bytes for each in longest]),
    }
    return {
        "course": {
            "words": words,
            "steps": [each.step for each in longest],
            "charts": charts,
            "facts": [{"name": name, "unit": unit, "values": values} for name, (unit, values) in facts.items()],
        },
        "outcomes": decoding_table(outcomes),
        "machine": {"treegen": VERSION, **({"commit": commit} if commit else {})},
    }


def _ratio(paths: int, read: int) -> float | None:
    return round(paths / read, 3) if read else None
