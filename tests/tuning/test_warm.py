"""Warming: which policies a deployment needs, what several devices make of them, and that a run can be interrupted."""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from support.h200 import H200
from support.meters import Favourite
from support.processes import in_background, started
from treegen import Shape, Tree, cli, strategies
from treegen.autotune_cache.entry import Entry
from treegen.autotune_cache.policy_cache import POLICY_CACHE
from treegen.codegen.emit import Source
from treegen.ir.errors import InputError
from treegen.runtime import warm_batches
from treegen.runtime.batch_kernel import BatchKernel
from treegen.search.policies import key_of
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.tuning.compile_pool import Compiled
from treegen.tuning.kernel_variants import kernel_sources
from treegen.tuning.tune import Tuning, proposals
from treegen.tuning.warm import Warmed, WarmJob, jobs_of, kernels_of, summary, warm

SHAPE = Shape(32, 8, 128, dtype="fp16")
OTHER = Shape(16, 1, 128, dtype="fp16")
TREES = [("few", Tree.parse("1,8/500,20")), ("flat", Tree.parse("64*300")), ("deep", Tree.parse("1,4,16/512,256,64"))]
pytestmark = pytest.mark.usefixtures("policies_folder")


def entries(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_job_for_every_bucket_and_shape() -> None:
    """Of the trees of a bucket the one in the middle; trees with nothing to compute are left out."""
    alike = [(f"alike {tokens}", Tree.parse(f"1,8/{tokens},20")) for tokens in (530, 490, 510, 520)]
    nothing = [("no rows", Tree.from_parents([-1], [5], rows=[])), ("no tokens", Tree.parse("0(0*3)"))]
    jobs = jobs_of([*TREES, *alike, *nothing], [SHAPE, OTHER, SHAPE], H200)
    assert [(job.name, job.shape, job.trees) for job in jobs] == [
        (name, shape, trees) for shape in (SHAPE, OTHER) for name, trees in (("alike 510", 5), ("flat", 1), ("deep", 1))
    ]
    for job in jobs:
        assert job.key == key_of(Problem(job.tree, job.shape, H200))


def test_every_policy_is_measured_once_and_kept(policies_folder: Path, tmp_path: Path) -> None:
    jobs = jobs_of(TREES, [SHAPE, OTHER], H200)
    noted = tmp_path / "calls"
    tuning = Tuning(most=2, meter=Favourite(noted=str(noted), seconds=0.05))
    seen: list[Warmed] = []
    found = warm(jobs, H200, [None, None], tuning, on_job=seen.append)
    assert found == seen
    assert sorted(each.job.name for each in found) == sorted(job.name for job in jobs)
    assert {each.where for each in found} == {"made"}
    processes = {line.split()[0] for line in noted.read_text().splitlines()}
    assert len(processes) == 2  # one for each device, whatever the number of trees
    assert set(entries(policies_folder)) == {f"{job.key.digest}.json" for job in jobs}
    for job in jobs:
        assert strategies.auto().choose(Problem(job.tree, job.shape, H200)).reason.startswith("measured as the fastest")

    calls = len(noted.read_text().splitlines())
    assert {each.where for each in warm(jobs, H200, [None], tuning)} == {"memory"}
    assert len(noted.read_text().splitlines()) == calls
    assert {each.where for each in warm(jobs[:2], H200, [None], tuning, again=True)} == {"made"}
    assert len(noted.read_text().splitlines()) > calls


def test_a_job_that_fails_does_not_end_the_others(policies_folder: Path) -> None:
    jobs = jobs_of(TREES, [SHAPE], H200)
    best = [str(strategy) for strategy in proposals(Problem(jobs[1].tree, SHAPE, H200), 1)]
    found = warm(jobs, H200, [None], Tuning(most=1, meter=Favourite(wrong=tuple(best))))
    problems = {each.job.name: each.problem for each in found}
    assert "wrong output" in problems["flat"]
    assert set(entries(policies_folder)) == {f"{each.job.key.digest}.json" for each in found if not each.problem}
    text = summary(found, 1.5)
    assert f"1 failed, 1.5 s\n  failed: flat, {jobs[1].key.shape}: " in text


def test_nothing_starts_with_wrong_arguments() -> None:
    with pytest.raises(InputError, match="timeout = -1"):
        warm(jobs_of(TREES, [SHAPE], H200), H200, [None], Tuning(timeout_s=-1, meter=Favourite()))


def test_an_exception_of_the_caller_ends_it_at_once(tmp_path: Path, policies_folder: Path) -> None:
    """With a candidate under way; what is measured in part is not kept."""
    noted = tmp_path / "calls"
    jobs = jobs_of(TREES, [SHAPE], H200)
    POLICY_CACHE.store(_entry_of(jobs[0]))

    def stop(warmed: Warmed) -> None:
        deadline = time.monotonic() + 60
        while not noted.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        warm(jobs, H200, [None], Tuning(meter=Favourite(noted=str(noted), seconds=300.0)), on_job=stop)
    assert time.monotonic() - begin < 60
    assert set(entries(policies_folder)) == {f"{jobs[0].key.digest}.json"}


def _entry_of(job: WarmJob) -> Entry:
    return Entry(job.key, {"strategy": "query"}, 1.0)


RUN = """
from tuning import test_warm
test_warm.deploy(0.2)
"""


def deploy(seconds: float) -> None:
    """Warms a small deployment with a meter that takes so many seconds for a candidate."""
    tuning = Tuning(most=2, meter=Favourite(seconds=seconds))
    warm(jobs_of(TREES, [SHAPE, OTHER], H200), H200, [None, None], tuning)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGKILL])
def test_an_interrupted_run_goes_on_to_the_same_cache(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / name / "policies").glob("[0-9a-f]*.json")}

    environment = {"TREEGEN_CACHE_DIR": str(tmp_path / "interrupted")}
    with in_background():
        process = started(RUN, environment=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(kept("interrupted")) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert 2 <= len(kept("interrupted")) < 6
    for name in ("interrupted", "whole"):
        monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / name))
        deploy(0.0)
    assert len(kept("whole")) == 6
    assert kept("interrupted") == kept("whole")


def test_the_command_says_what_it_would_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('"1,8/500,20"\n"1,8/505,20"\n"64*300"\n')
    arguments = ["warm", str(tmp_path / "trace.jsonl"), "--heads", "32:8", "--heads", "16/1", "--dtype", "fp16"]
    POLICY_CACHE.store(_entry_of(jobs_of(TREES[:1], [SHAPE], H200)[0]))
    assert cli.main([*arguments, "--dry-run"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    kernels = sum(len(kernel_sources(shape, H200)) for shape in (SHAPE, OTHER))
    assert first == f"kernels: {kernels} for 2 shapes on h200"
    assert [line.split()[0] for line in lines] == ["policy", "known", "measure", "measure", "measure"]
    assert "  2      rows 2^3, levels 2" in lines[1]
    assert "32:8 heads" in lines[2]
    assert "16:1 heads" in lines[3]
    assert cli.main([*arguments, "--dry-run", "--again"]) == 0
    assert "known" not in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warm", "1,4/5,5"]) == 2
    assert "not a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_command_s_summary_and_exit_code(
    interrupted: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(
        kernels: Sequence[tuple[Source, Shape]], target: Target, on_variant: Callable[[Compiled], None]
    ) -> list[Compiled]:
        assert kernels == kernels_of([Shape(32, 8, 128)], target)
        found = [Compiled(*kernel, 0.1, cached=number > 0) for number, kernel in enumerate(kernels)]
        for outcome in found:
            on_variant(outcome)
        return found

    def measured(
        jobs: Sequence[WarmJob], *arguments: object, on_job: Callable[[Warmed], None], **options: object
    ) -> list[Warmed]:
        found = [Warmed(jobs[0], "made", "", 1, 2.0), Warmed(jobs[1], "none", "all failed", 0, 1.0)]
        for warmed in found[: 1 if interrupted else 2]:
            on_job(warmed)
        if interrupted:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr("treegen.tuning.compile_pool.compile_all", compiled)
    monkeypatch.setattr("treegen.tuning.warm.warm", measured)
    monkeypatch.setattr("treegen.backends.devices.devices_of", lambda target: [0, 1])
    code = cli.main(["warm", "1,8/500,20", "64*300"])
    printed = capsys.readouterr().out
    kernels = len(kernels_of([Shape(32, 8, 128)], H200))
    assert f"kernels: 1 compiled, {kernels - 1} known, 0 failed" in printed
    assert "  cuda:1: 1 measured in 2.0 s" in printed
    if interrupted:
        assert code == 130
        assert f"interrupted after {kernels} of {kernels} kernels and 1 of 2 policies" in printed
        assert "policies: 1 measured, 0 known, 0 failed" in printed
    else:
        assert code == 1
        assert "policies: 1 measured, 0 known, 1 failed" in printed


@pytest.mark.parametrize("shapes", [
    [Shape(4, 2, 16, dtype="fp32", page_size=16)],
    pytest.param([Shape(4, 1, 32, 16, dtype="fp32", shared_kv=True), Shape(4, 2, 16)], marks=pytest.mark.full),
], ids=len)  # fmt: skip
def test_batches_are_served_once_with_every_form_of_page_table(
    shapes: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[bool, bool, bool, int]] = []

    class Kernel(BatchKernel):
        def step(self) -> None:
            pages = self.form.pages
            given = (part is not None for part in (pages.table_rows, pages.indptr, pages.qo_indptr))
            served.append((*given, self.form.room.chunk))
            super().step()

    monkeypatch.setattr(warm_batches, "ROWS", (1,))
    monkeypatch.setattr(warm_batches, "BatchKernel", Kernel)
    done = list(warm_batches.warm_batches([*shapes, shapes[0]], H200, torch.device("cpu")))
    assert done == [(shape, 0) for shape in shapes]  # the interpreter compiles nothing
    forms = [(False, False), (True, False), (False, True)]
    modes = [(False, 0), (True, 0), (False, 512)]  # one query row for each request, several, and batch-invariant
    assert served == [(*form, *mode) for mode in modes for form in forms] * len(shapes)


@pytest.mark.parametrize("arguments", [["warm"], ["warm", "1,4/100,10", "--serving"]])
def test_warm_takes_trees_or_serving(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments, "--dry-run"]) == 2
    assert "--serving alone" in capsys.readouterr().err
