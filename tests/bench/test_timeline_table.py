"""The benchmark of timelines: its last table has a line for each plan, with the errors of blocks and the overhead."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from support.made_up_recordings import explained
from support.paths import ROOT


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import timelines

    sys.path.remove(str(ROOT / "benchmarks"))
    return timelines


def test_the_last_table_has_a_line_for_each_plan(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    told = {name: explained(name, measured=True) for name in ("query", "deft-flatten")}
    benchmark.report(list(told.items()))
    classes, launches, plans, words = capsys.readouterr().out.strip().split("\n\n")
    titles, *lines = plans.split("\n")
    assert titles.split()[:3] == ["plan", "estimate", "us"]
    for line, (name, explanation) in zip(lines, told.items(), strict=True):
        estimate_us = explanation.entries[0].estimate.time_us
        assert line.startswith(name)
        assert f"  {estimate_us:.1f}  " in line
        assert f"  {100 * (estimate_us / 50 - 1):+.0f} %  " in line
        assert "  51.0          +2.0 %    -50 %        50 %  " in line
    assert max(map(len, plans.split("\n"))) < 160
    assert "merge" in classes
    assert launches.startswith("plan")
    assert words.endswith("resolution of the clock: 32 ns")


def test_there_are_six_plans_with_recorded_traces(benchmark: ModuleType) -> None:
    assert len(list(benchmark.cases(None))) == 5
