"""Warming on several ranks and hosts: each policy is measured once, and every host has all policies and kernels."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.crew_warming import SHAPE, TREES
from support.crews import crew_in
from support.h200 import H200
from support.meters import Favourite
from support.paths import TESTS
from support.processes import run_function
from treegen.bench.result_tables import load
from treegen.distributed.tasks import MOST_TRIES, Tasks
from treegen.distributed.warm_together import WarmWork, serve_together, warm_together
from treegen.ir.shape import Shape
from treegen.target.targets import Target
from treegen.tuning.tune import Tuning
from treegen.tuning.warm import jobs_of, kernels_of


def test_two_hosts_end_with_the_same_caches(tmp_path: Path) -> None:
    printed = run_function(f"support.crew_warming:hosts({str(tmp_path)!r})")
    runs = {name: value for line in printed.splitlines() for name, value in json.loads(line).items()}
    kernels, jobs = kernels_of([SHAPE], H200), jobs_of(TREES, [SHAPE], H200)
    first, third, again = runs["first"], runs["third host"], runs["again"]

    assert first["where"] == again["where"] == ["made"] * len(jobs)
    assert set(first["ranks"]) <= {0, 1, 2, 3}
    assert [host[:2] for host in first["hosts"]] == [["0", len(kernels)], ["1", len(kernels)]]
    assert sum(taken for *_, taken, _ in first["hosts"]) == len(jobs)  # each from one host by the other
    caches = [{path.name: path.read_bytes() for path in (tmp_path / host / "policies").iterdir()} for host in "012"]
    assert caches[0] == caches[1] == caches[2]
    assert caches[0].keys() == {f"{job.key.digest}.json" for job in jobs}
    for host, times in (("0", 3), ("1", 3), ("2", 1)):  # runs, each with all kernels
        lines = (tmp_path / host / "kernels").read_text().splitlines()
        assert sorted(lines) == sorted(times * [f"{source.digest} {shape}" for source, shape in kernels])

    assert third["where"] == ["user"] * len(jobs)
    assert third["hosts"][2] == ["2", len(kernels), len(jobs), ""]
    assert not (tmp_path / "third host" / "calls").exists()
    assert [host[2:] for host in again["hosts"]] == [[0, ""], [0, ""]]  # the same policies


@pytest.mark.usefixtures("policies_folder")
def test_a_host_whose_ranks_died_is_reported(tmp_path: Path) -> None:
    with crew_in(tmp_path, 1, 2, "1", start_s=0.0):
        pass
    with crew_in(tmp_path, 0, 2, "0") as crew:
        hosts, warmed = warm_together(crew, WarmWork([], [], H200, Tuning(meter=Favourite())), None)
    assert [(host.host, host.problem) for host in hosts] == [("0", ""), ("1", "its ranks died")]
    assert warmed == []


def test_a_job_with_which_ranks_died_has_a_problem(tmp_path: Path, policies_folder: Path) -> None:
    jobs = jobs_of(TREES[:1], [SHAPE], H200)
    for _ in range(MOST_TRIES):
        with crew_in(tmp_path, 0, 1) as crew:
            assert Tasks(crew, "policies", 1).next_task() == 0
    with crew_in(tmp_path, 0, 1) as crew:
        _, (warmed,) = warm_together(crew, WarmWork([], jobs, H200, Tuning(meter=Favourite())), None)
    assert (warmed.where, warmed.problem, warmed.place) == ("none", "3 processes died with it", "")
    assert not policies_folder.exists()


def test_kernels_of_batches_are_compiled_on_every_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Shape] = []

    def compiled(shapes: list[Shape], target: Target, device: torch.device) -> Iterator[tuple[Shape, int]]:
        made.extend(shapes)
        yield shapes[0], 7

    monkeypatch.setattr("treegen.distributed.warm_together.warm_batches", compiled)
    shapes, cpu = [SHAPE, Shape(16, 1, 128), SHAPE], torch.device("cpu")
    with crew_in(tmp_path, 1, 2, "1", start_s=0.0) as crew:
        assert serve_together(crew, shapes, H200, cpu) == []
    with crew_in(tmp_path, 0, 2, "0") as crew:
        found = serve_together(crew, shapes, H200, cpu)
    assert made == shapes[:2] * 2
    assert [(host, shape) for host, shape, _ in found] == [(host, shape) for host in "01" for shape in shapes[:2]]
    assert all(outcome.startswith("7 kernels compiled, 0.") for *_, outcome in found)


def test_warm_and_bench_under_torchrun(tmp_path: Path) -> None:
    """With stand-ins for the compiler and the GPU; rank 0 prints and writes files."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "support.crew_warming", str(tmp_path)),
    ]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "TREEGEN_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    kernels, here = len(kernels_of([SHAPE], H200)), f"host 0 ({socket.gethostname()})"
    assert f"kernels of {here}: {kernels} compiled, 0 known, 0 failed" in done.stdout
    assert f"policies: {len(TREES)} measured, 0 known, 0 failed" in done.stdout
    assert done.stdout.count("policies: ") == 1
    assert f"  {here}: took 0 policies from others" in done.stdout

    machine, results = load(tmp_path / "results.json")
    assert machine["ranks"] == 2
    assert [result.rows for result in results] == [tree.num_rows for _, tree in TREES]
    assert all(result.measured_on.startswith(f"rank {result.measured_on[5]} on {here}") for result in results)
    assert {outcome.best_us for result in results for outcome in result.outcomes} == {10.0}
    assert done.stdout.count("is faster") == 1
