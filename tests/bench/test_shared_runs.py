"""Runs on several ranks: the results are those of one process, with the rank that measured each case."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.test_batch_runs import Reference
from bench.test_bench import PROVIDERS, SHAPE, TREES
from support.crews import crew_in
from support.small_batches import BATCH, CHUNKS, CPU, settings
from treegen.bench.batch_case import BatchShapes
from treegen.bench.batch_results import BatchResult
from treegen.bench.bench_runs import RunSettings, Timers, run
from treegen.bench.results import Result
from treegen.bench.shared_runs import SharedRun, batch_run, tree_run
from treegen.distributed.tasks import MOST_TRIES, Tasks
from treegen.ir.errors import RankError
from treegen.target.targets import target_from

SETTINGS = RunSettings(3, 64, 4000.0, Timers(lambda call, repeats: 10.0, None))


def test_trees(tmp_path: Path) -> None:
    """Two ranks, here threads, share two cases; both know both results."""
    expected = list(run(TREES, [SHAPE], PROVIDERS, target_from("h200"), SETTINGS))
    found: dict[int, list[Result]] = {}

    def work(rank: int) -> None:
        with crew_in(tmp_path, rank, 2, lease_s=60) as crew:
            found[rank] = tree_run(TREES, [SHAPE], PROVIDERS, SETTINGS).results(crew)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1]
    assert [replace(result, measured_on="") for result in found[0]] == expected
    assert all(result.measured_on in ("rank 0 on host 0, cuda:0", "rank 1 on host 0, cuda:1") for result in found[0])


def test_batches(tmp_path: Path) -> None:
    shapes = BatchShapes(["4:2"], 16, "fp32")
    cases = [(batch, shape) for batch in (BATCH, CHUNKS) for shape in shapes.of(batch)]
    shared = batch_run(cases, [Reference()], settings(), 1000.0, CPU)
    seen: list[int] = []
    with crew_in(tmp_path, 0, 1) as crew:
        found = shared.results(crew, lambda results: seen.append(len(results)))
    assert seen == [1, 2]
    assert [(result.batch, result.measured_on) for result in found] == [
        (batch.name, "rank 0 on host 0, cuda:0") for batch, _ in cases
    ]
    assert found[0].outcomes[0].run_us == 10.0
    assert found[0].outcomes[0].plan is not None


@pytest.mark.parametrize("kind", ["trees", "batches"])
def test_a_case_with_which_ranks_died_has_failed(kind: str, tmp_path: Path) -> None:
    shape = BatchShapes(["4:2"], 16, "fp32").of(BATCH)[0]
    shared: SharedRun[Result] | SharedRun[BatchResult]
    if kind == "trees":
        shared = tree_run(TREES[:1], [SHAPE], PROVIDERS[:2], SETTINGS)
    else:
        shared = batch_run([(BATCH, shape)], [Reference(), Reference("flashinfer")], settings(), 1000.0, CPU)
    for _ in range(MOST_TRIES):
        with crew_in(tmp_path, 0, 1) as crew:
            assert Tasks(crew, "cases", 1).next_task() == 0
    with crew_in(tmp_path, 0, 1) as crew:
        (result,) = shared.results(crew)
    assert [(outcome.status, outcome.detail) for outcome in result.outcomes] == [
        ("failed", "3 processes died with this case")
    ] * 2
    assert result.floor_us > 0
    assert shared.read(json.loads(json.dumps(asdict(result)))) == result


def test_ranks_with_other_cases_are_refused(tmp_path: Path) -> None:
    with crew_in(tmp_path, 0, 2, start_s=0.0) as crew:
        tree_run(TREES, [SHAPE], PROVIDERS[1:2], SETTINGS).results(crew)
        with pytest.raises(RankError, match="cases = 1: few shot"):
            tree_run(TREES[:1], [SHAPE], PROVIDERS[1:2], SETTINGS).results(crew)
        with pytest.raises(RankError, match=r"settings = .*differs"):
            tree_run(TREES, [SHAPE], PROVIDERS[:1], SETTINGS).results(crew)
