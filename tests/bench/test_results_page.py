"""Pages of results in a browser: the numbers of the file, sorting, filters, statuses, and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.browsers import Visits
from support.paths import ROOT
from treegen.bench import batch_results, bench_runs, result_tables
from treegen.bench.results import ProviderOutcome, Result
from treegen.bench.results_page import results_html, results_object
from treegen.cli import main

TREES, BATCHES = (ROOT / "benchmarks" / "results" / f"h200_{name}.json" for name in ("fasttree", "batches"))
HOSTILE = "<img src=x onerror=alert(1)>"


def cells(tab: Any) -> list[list[str]]:
    """The texts of the results' lines, without the marks."""
    rows = tab.locator("table.results tbody tr").all()
    return [[text for text in row.locator("th, td").all_inner_texts() if text.strip()] for row in rows]


def test_numbers_are_those_of_the_file(visit: Visits) -> None:
    machine, found = result_tables.load(TREES)
    tab = visit(results_html(machine, found, TREES.name))
    shown = cells(tab)
    assert len(shown) == len(found)
    for row, result in zip(shown, found, strict=True):
        others = {each.provider: each.status if each.status == "wrong" else "-" for each in result.outcomes}
        best = {each.provider: each.best_us for each in result.outcomes}
        times = [others[name] if time is None else f"{time:.1f}" for name, time in best.items()]
        assert row == [result.tree, result.heads, f"{result.floor_us:.1f}", *times]
    assert machine["device"] in tab.inner_text("#machine")
    assert machine["command"] in tab.inner_text("#machine")
    assert result_tables.summary(found)[1][3] in tab.inner_text("#results")


def test_titles_sort_and_sort_back(visit: Visits) -> None:
    machine, found = result_tables.load(TREES)
    tab = visit(results_html(machine, found, "results"))
    title = tab.locator("table.results thead button", has_text="floor us")
    for told, place in (("ascending", 0), ("descending", -1)):
        title.click()
        floors = [float(row[2]) for row in cells(tab)]
        assert floors == sorted(floors, reverse=place == -1)
        assert tab.locator(f"th[aria-sort={told}]").count() == 1
    tab.locator("table.results thead button", has_text="auto").press("Enter")
    ratios = {(r.tree, r.heads): r.outcomes[0].best_us / r.floor_us for r in found if r.outcomes[0].best_us}
    order = [ratios[row[0], row[1]] for row in cells(tab)]
    assert order == sorted(order)


def test_a_setting_of_heads_is_chosen(visit: Visits) -> None:
    machine, found = result_tables.load(TREES)
    tab = visit(results_html(machine, found, "results"))
    tab.select_option("#results-heads", label="32/8")
    assert {row[1] for row in cells(tab)} == {"32/8"}


def test_marks_lie_at_multiples_of_the_floor(visit: Visits) -> None:
    machine, found = result_tables.load(TREES)
    tab = visit(results_html(machine, found, "results"))
    tab.locator("table.results tbody svg").first.hover()
    best = found[0].outcomes[0].best_us
    assert best is not None
    assert f"{best:.1f} us, {best / found[0].floor_us:.2f}x the floor" in tab.inner_text("#tip")
    assert tab.locator("table.results tbody tr").first.locator("svg .provider").count() == len(found[0].outcomes)


def test_figures_of_batches(visit: Visits) -> None:
    machine, found = batch_results.load_batches(BATCHES)
    tab = visit(results_html(machine, found, BATCHES.name))
    own = found[0].outcomes[0]
    assert own.run_us is not None
    assert own.step is not None
    assert cells(tab)[0][:4] == [found[0].batch, "32/8", f"{found[0].floor_us:.1f}", f"{own.run_us:.1f}"]
    tab.select_option("#results-figure", label="step, median, ms")
    assert cells(tab)[0][:3] == [found[0].batch, "32/8", f"{own.step.p50:.2f}"]


def test_hostile_names_are_text(visit: Visits) -> None:
    outcome = ProviderOutcome(HOSTILE, "failed", detail=HOSTILE)
    result = Result(HOSTILE, "4/2", 64, "fp16", 1, 3, 9, 1.5, (outcome,))
    tab = visit(results_html({"device": HOSTILE}, [result], HOSTILE))
    assert cells(tab) == [[HOSTILE, "4/2", "1.5", "failed"]]
    assert tab.locator("img").count() == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_not_wider_than_the_screen(visit: Visits, width: int) -> None:
    machine, found = result_tables.load(TREES)
    tab = visit(results_html(machine, found, "results"), width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") == width


def test_no_results_are_a_page_too() -> None:
    assert results_object({}, [])["results"]["summary"] == []


@pytest.mark.parametrize(("table", "path"), [([], TREES), (["--table", "batches"], BATCHES)])
def test_the_command_writes_a_page(table: list[str], path: Path, tmp_path: Path) -> None:
    main(["bench", *table, "--from", str(path), "--html", str(tmp_path / "page.html")])
    assert f"<h1>{path.name}</h1>" in (tmp_path / "page.html").read_text("utf-8")


def test_a_checkout_knows_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = bench_runs.checkout_commit()
    assert known == "" or len(known.rstrip("+")) == 12
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench_runs.checkout_commit() == ""
