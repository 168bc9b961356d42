"""Pages of runs: figures of steps, which add up to those of the whole run, and their panels in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.browsers import Visits
from support.tiny_models import VOCABULARY, tiny
from treegen.bench.decoding_cases import decoding_case
from treegen.bench.decoding_page import decoding_html, decoding_object
from treegen.bench.decoding_runs import DecodingOutcome, DecodingSettings, run_decoding
from treegen.bench.kv_reads import StepFigures
from treegen.cli import main
from treegen.integrations import HFModel
from treegen.workloads.served_decodings import served_decoding

BRANCHES, TOKENS = 6, 9
STEPS = tuple(StepFigures(step, 4, 100 * step, 300 * step, 0.5 + step) for step in range(1, 6))
TWO = (
    DecodingOutcome("query", tokens=9, seconds=1.0, parts=(1.0, 1.0, 1.0, 1.0), course=STEPS, token_bytes=64),
    DecodingOutcome("auto", tokens=9, seconds=0.5, parts=(1.0, 1.0, 1.0, 1.0), course=STEPS[:3], token_bytes=64),
)


def test_steps_add_up_to_the_run() -> None:
    case = decoding_case(served_decoding(f"40({TOKENS}*{BRANCHES})", None), VOCABULARY, 0, 4)
    outcome = run_decoding(HFModel(tiny()), case, "cohort", DecodingSettings(4, 512))
    course = outcome.course
    assert [each.step for each in course] == list(range(1, outcome.decoding_steps))
    assert {each.branches for each in course} == {BRANCHES}
    read, paths = (sum(getattr(each, name) for each in course) * outcome.token_bytes for name in ("read", "paths"))
    assert read < outcome.read_bytes < read * outcome.decoding_steps / len(course) * 1.5
    assert paths < outcome.path_bytes
    seconds = sum(each.ms for each in course) / 1e3
    assert 0 < seconds < outcome.decoding_seconds


def test_figures_of_a_step_are_in_the_data() -> None:
    value = decoding_object(TWO, "few-shot: 80 prompt tokens")
    course = value["course"]
    assert course["steps"] == [1, 2, 3, 4, 5]
    time, read, sharing = (chart["lines"] for chart in course["charts"])
    assert time[1] == {"name": "auto", "values": [1.5, 2.5, 3.5, None, None]}
    assert read[0] == {"name": "query", "values": [6400, 12800, 19200, 25600, 32000]}
    assert sharing[0]["values"] == [3.0] * 5
    assert course["facts"][0]["values"] == [4] * 5
    assert course["facts"][1]["values"][4] == 300 * 5 * 64
    assert value["outcomes"][1][0] == "query"


def test_providers_that_did_not_run_leave_no_course() -> None:
    value = decoding_object([DecodingOutcome("flashinfer", "is not installed")], "few-shot: none")
    assert value["course"]["steps"] == []
    assert decoding_html([DecodingOutcome("flashinfer", "is not installed")], "few-shot: none").startswith("<!DOCTYPE")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(visit: Visits, width: int) -> None:
    tab = visit(decoding_html(TWO, "few-shot: 80 prompt tokens"), width=width)
    assert tab.inner_text("h1") == "few-shot"
    tab.press("#course-step", "Home")
    lines = [row.locator("th, td").all_inner_texts() for row in tab.locator("table.course tbody tr").all()]
    assert lines == [["query", "1.50 ms", "6.2 KiB", "3.00x"], ["auto", "1.50 ms", "6.2 KiB", "3.00x"]]
    tab.press("#course-step", "End")
    assert tab.locator("table.course tbody tr").nth(1).locator("td").all_inner_texts() == ["-", "-", "-"]
    assert tab.locator("#outcomes tbody tr").count() == 2
    assert tab.evaluate("document.documentElement.scrollWidth") == width


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main(["run", "40(6*3)", "--compare", "query", "--page-size", "4", "--html", str(path)]) == 0
    assert "<h1>40(6*3)</h1>" in path.read_text("utf-8")
    assert capsys.readouterr().out.startswith("40(6*3): 40 prompt tokens")
