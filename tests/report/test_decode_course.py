"""Pages of decodings: chosen steps with the figures of accounts, and their panels in a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.browsers import Visits
from treegen import Shape
from treegen.cli import main
from treegen.cost.account import account
from treegen.report.decode_course import MOST_STEPS, course_object, decode_html
from treegen.report.decode_io import decode_io
from treegen.schedule.lower import lower
from treegen.strategies import strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import targets
from treegen.workloads.traces import Workload, few_shot, workload_from

SHAPE = Shape(8, 2, 64)
NAMES = ("query", "deft-node", "auto")
WORKLOAD = Workload("few-shot", (few_shot(100, 4, 200),))


def page_of(workload: Workload = WORKLOAD, name: str = "") -> str:
    course = course_object(workload, NAMES, SHAPE, layers=2)
    found = decode_io(Workload(name or workload.name, workload.decodes), NAMES, SHAPE, layers=2)
    return decode_html(found, course)


def test_steps_are_spread_from_the_first_to_the_last() -> None:
    course = course_object(WORKLOAD, NAMES, SHAPE, layers=2)
    assert len(course["steps"]) == MOST_STEPS == len(course["drawings"])
    assert (course["steps"][0], course["steps"][-1]) == (1, 200)
    assert course["steps"] == sorted(set(course["steps"]))
    short = course_object(Workload("short", (few_shot(10, 2, 3),)), NAMES, SHAPE, layers=2)
    assert short["steps"] == [1, 2, 3]


def test_figures_are_those_of_accounts() -> None:
    course = course_object(WORKLOAD, NAMES, SHAPE, "l40s", layers=3)
    (segment,) = WORKLOAD.decodes[0].segments()
    for index in (0, 17, MOST_STEPS - 1):
        tree = segment.at(course["steps"][index])
        problem = Problem(tree, SHAPE, targets()["l40s"])
        plan = strategy_from("deft-node").plan(problem)
        estimate = account(plan, lower(plan, problem), problem)
        kv, beside, time = (chart["lines"][1]["values"][index] for chart in course["charts"])
        assert kv == 3 * estimate.kv_hbm_bytes
        assert beside == 3 * (estimate.partial_bytes + estimate.score_bytes + estimate.mask_bytes)
        assert time == pytest.approx(3 * estimate.time_us, abs=1e-3)
        rows, tokens, sharing = (fact["values"][index] for fact in course["facts"])
        assert (rows, tokens) == (tree.num_rows, tree.unique_tokens)
        assert sharing == pytest.approx(tree.path_tokens / tree.unique_tokens, abs=1e-3)


def test_steps_of_several_segments_have_their_trees() -> None:
    workload = workload_from("reasoning")
    course = course_object(workload, ["query"], SHAPE, layers=1)
    segments = list(workload.decodes[0].segments())
    for index in (0, 9, 25, -1):
        step = course["steps"][index]
        (segment,) = [each for each in segments if each.first <= step <= each.last]
        assert course["facts"][1]["values"][index] == segment.at(step).unique_tokens


@pytest.fixture
def tab(visit: Visits) -> Any:
    return visit(page_of())


def told(tab: Any) -> list[str]:
    return tab.locator("table.course tbody tr").first.locator("th, td").all_inner_texts()


def test_the_slider_shows_the_figures_of_a_step(tab: Any) -> None:
    course = course_object(WORKLOAD, NAMES, SHAPE, layers=2)
    slider = tab.locator("#course-step")
    for key, index in (("Home", 0), ("End", MOST_STEPS - 1), ("ArrowLeft", MOST_STEPS - 2)):
        slider.press(key)
        kv = course["charts"][0]["lines"][0]["values"][index]
        assert told(tab)[:2] == ["query", f"{kv / 1024:.1f} KiB" if kv < 2**20 else f"{kv / 2**20:.1f} MiB"]
        assert tab.inner_text("#course output") == f"{course['steps'][index]} of 200"
        tokens = course["facts"][1]["values"][index]
        assert f"rows: 4; distinct tokens: {tokens:,}" in tab.inner_text(".facts-of-step")
    assert slider.get_attribute("aria-valuetext") == f"step {course['steps'][-2]} of 200"


def test_pointing_at_a_chart_chooses_a_step(tab: Any) -> None:
    chart = tab.locator("#course .curve svg").first
    chart.scroll_into_view_if_needed()
    chart.hover(position={"x": 66, "y": 60})
    assert tab.input_value("#course-step") == "0"


def test_the_nearest_line_is_named(tab: Any) -> None:
    chart = tab.locator("#course .curve svg").first
    chart.scroll_into_view_if_needed()
    course = course_object(WORKLOAD, NAMES, SHAPE, layers=2)["charts"][0]
    lines = {line["name"]: line["values"][0] for line in course["lines"]}
    for y, name in ((4, max(lines, key=lambda each: lines[each])), (150, min(lines, key=lambda each: lines[each]))):
        chart.hover(position={"x": 66, "y": y})
        assert lines[tab.inner_text("#tip strong")] == lines[name]
        assert chart.locator(".near").count() == 1
    ticks = chart.locator("text.tick[text-anchor=end]").all_text_contents()
    assert len(ticks) > 1
    assert all(re.fullmatch(r"\d+(\.\d)? ([KMG]i)?B", tick) for tick in ticks)


def test_totals_are_those_of_the_account(tab: Any) -> None:
    found = decode_io(WORKLOAD, NAMES, SHAPE, layers=2)
    rows = tab.locator("#totals tbody tr").all()
    assert len(rows) == len(found.strategies)
    for row, entry in zip(rows, found.strategies, strict=True):
        texts = row.locator("th, td").all_inner_texts()
        assert (texts[0], texts[-1]) == (entry.name, f"{100 * found.kv_reduction(entry):.1f} %")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_not_wider_than_the_screen(visit: Visits, width: int) -> None:
    assert visit(page_of(), width=width).evaluate("document.documentElement.scrollWidth") == width


def test_hostile_names_are_text(visit: Visits) -> None:
    name = "<img src=x onerror=alert(1)>"
    tab = visit(page_of(name=name))
    assert tab.inner_text("h1") == name
    assert tab.locator("img").count() == 0


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main(["io", "few-shot:width=3,steps=9", "--strategy", "query", "--html", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert "<h1>few-shot:width=3,steps=9</h1>" in path.read_text("utf-8")
