"""Timelines in explanations: lines, JSON, classes of work with the model's error, and traces for viewers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from support.made_up_recordings import SHAPE, explained
from treegen import Tree
from treegen.cli import main
from treegen.report.chrome_trace import chrome_trace
from treegen.report.explain import Explanation, explain
from treegen.report.timelines import MOST_BLOCKS

COLUMNS = ["launch", "sm", "start_us", "end_us", "first_item", "items", "group", "rows", "tokens", "kv_bytes", "slot"]


def timelines_of(told: Explanation) -> list[dict[str, Any]]:
    return [entry["timeline"] for entry in json.loads(told.to_json())["strategies"]]


def test_json_has_the_documented_form() -> None:
    told = explained("deft-flatten", measured=True)
    (value,) = timelines_of(told)
    assert list(value) == ["predicted", "measured", "classes"]
    fields = ["sms", "slots", "total_us", "tail_us", "imbalance", "idle_sms", "all_blocks", "launches", "blocks"]
    assert list(value["predicted"]) == fields
    assert list(value["measured"]) == [*fields, "plain_us", "recorded_us", "resolution_ns"]
    timeline = told.entries[0].timeline.predicted
    assert list(value["predicted"]["blocks"]) == COLUMNS
    assert {len(column) for column in value["predicted"]["blocks"].values()} == {len(timeline.blocks.sm)}
    assert value["predicted"]["total_us"] == pytest.approx(told.entries[0].estimate.time_us, abs=1e-3)
    assert value["predicted"]["tail_us"] == pytest.approx(timeline.tail_us, abs=1e-3)
    assert list(value["classes"][0]) == ["name", "items", "predicted_us", "measured_us", "error"]
    assert list(value["predicted"]["launches"][0]) == ["name", "start_us", "end_us"]


def test_nothing_is_measured_unless_asked_for() -> None:
    (value,) = timelines_of(explained("deft-flatten"))
    assert value["measured"] is None
    assert {each["measured_us"] for each in value["classes"]} == {each["error"] for each in value["classes"]} == {None}


def test_classes_compare_the_same_work() -> None:
    (value,) = timelines_of(explained("deft-flatten", measured=True))
    of_items = [each for each in value["classes"] if not each["name"].startswith("merge")]
    assert len(of_items) > 1
    for each in of_items:
        assert each["measured_us"] == pytest.approx(2 * each["predicted_us"], abs=2e-3)
        assert each["error"] == pytest.approx(-0.5)
    assert sum(each["items"] for each in value["classes"]) == value["predicted"]["all_blocks"]
    assert [each["error"] for each in value["classes"] if each["name"].startswith("merge")] == [None]


def test_lines_name_tail_imbalance_and_what_was_measured() -> None:
    text = " ".join(explained("deft-flatten", measured=True).text().split())
    timeline = explained("deft-flatten").entries[0].timeline.predicted
    assert (
        f"timeline: ends at {timeline.total_us:.1f} us; tail {timeline.tail_us:.1f} us from the first idle SM" in text
    )
    assert f"the busiest SM works {timeline.imbalance:.2f} times the mean" in text
    assert f"measured: ends at {2 * timeline.total_us:.1f} us; tail {2 * timeline.tail_us:.1f} us" in text
    assert "kernels that record take 51.0 us, the usual ones 50.0 us (+2.0 %)" in text
    assert "(-50 %)" in text
    assert "measured" not in explained("deft-flatten").text().partition("strategy")[2]


def test_timelines_of_large_plans_are_folded() -> None:
    told = explain(Tree.from_levels([1, 16, 8000], [700, 130, 40]), ["query"], SHAPE, "h200")
    (value,) = timelines_of(told)
    assert value["predicted"]["all_blocks"] == 64_000
    assert len(value["predicted"]["blocks"]["sm"]) <= MOST_BLOCKS
    assert sum(value["predicted"]["blocks"]["items"]) == 64_000


def test_traces_have_a_process_for_each_launch_and_threads_without_overlaps() -> None:
    told = explained("deft-flatten", "query", measured=True)
    value = json.loads(chrome_trace(told.entries))
    named = {event["pid"]: event["args"]["name"] for event in value["traceEvents"] if event["name"] == "process_name"}
    assert list(named.values())[:2] == [
        "deft-flatten, predicted: work items, 64x64 tiles",
        "deft-flatten, predicted: merge",
    ]
    assert len(named) == 2 * sum(len(entry.timeline.predicted.launches) for entry in told.entries)
    blocks = [event for event in value["traceEvents"] if event["ph"] == "X"]
    assert len(blocks) == 2 * sum(len(entry.timeline.predicted.blocks.sm) for entry in told.entries)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in blocks:
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        ordered = np.array(sorted(spans))
        assert (ordered[1:, 0] >= ordered[:-1, 1] - 3e-3).all()


def test_a_command_writes_the_trace(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert main(["explain", "1,4/100,10", "--chrome-trace", str(path)]) == 0
    assert json.loads(path.read_text())["displayTimeUnit"] == "ns"
    assert capsys.readouterr().out == f"{path}\n"
    assert main(["explain", "1,4/100,10", "--diff", "query", "cohort", "--chrome-trace", str(path)]) == 2
    assert "excludes --measure and --chrome-trace" in capsys.readouterr().err


def test_measuring_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["explain", "1,4/100,10", "--measure"]) == 2
    assert "is not a CUDA device to measure timelines on; run it on a machine with an NVIDIA" in capsys.readouterr().err
