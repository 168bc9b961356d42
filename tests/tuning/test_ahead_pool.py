"""Compilation ahead of time in processes: launches find what it left in Triton's cache, and no failure is fatal."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.paths import ROOT
from treegen import Shape, Tree
from treegen.codegen.emit import Source, emit, emit_merge
from treegen.codegen.merge_forms import merge_key
from treegen.ir.errors import BackendError
from treegen.ir.schedule import Schedule
from treegen.schedule.lower import lower
from treegen.strategies import Strategy, cascade, cohort, deft_flatten, flashforge, query
from treegen.target.problem import Problem
from treegen.target.targets import target_from
from treegen.tuning import compile_pool
from treegen.tuning.compile_pool import Compiled, compile_all

TARGET = target_from("h200")
TREE = Tree.from_parents([-1, 0, 0, 1], [70, 40, 33, 20], rows=[(3, 20), (3, 7), (2, 33), (2, 20), (1, 40)])
SHAPES = {
    "32:8": (Shape(32, 8, 64, dtype="fp16"), False),
    "16:1, by page": (Shape(16, 1, 64, page_size=16), True),
    "12:4, dims that 16 does not divide": (Shape(12, 4, 72), False),
}
MERGE = emit_merge(merge_key(Shape(12, 4, 80), several_rounds=False, rows=512, longest=9))

LAUNCHES = """
import json, sys, torch
from triton.runtime.jit import JITFunction
import treegen
from treegen.codegen.aot import device_of
from treegen.backends.triton_program import TritonProgram
from tuning.test_ahead_pool import SHAPES, STRATEGIES, TREE, schedule_of

name, strategy_name = sys.argv[1:]
shape, by_page = SHAPES[name]
dtype = torch.float16 if shape.dtype == "fp16" else torch.bfloat16
JITFunction.__getitem__ = lambda self, grid: lambda *a, **k: self.run(*a, grid=grid, warmup=True, **k)
q = torch.zeros(TREE.num_rows, shape.num_qo_heads, shape.head_dim, dtype=dtype)
if by_page:  # keys and values of a page lie behind one another
    k, v = torch.zeros(12, 2, shape.page_size, shape.num_kv_heads, shape.head_dim, dtype=dtype).unbind(1)
else:
    k, v = torch.zeros(2, 170, shape.num_kv_heads, shape.head_dim, dtype=dtype)
lse = torch.zeros(TREE.num_rows, shape.num_qo_heads)
with device_of(90):
    for strategy in STRATEGIES[strategy_name]:
        program = TritonProgram(schedule_of(strategy, shape), shape, q.device)
        program.capability = 90  # as on such a GPU
        program(q, k, v, torch.empty_like(q), lse, shape.head_dim**-0.5, 1.0)
counts = treegen.kernel_counts()
print(json.dumps([counts.loaded, counts.compiled]))
"""
"""Launches on real tensors through Triton's launcher, up to the point where machine code would run."""

STRATEGIES: dict[str, tuple[Strategy, ...]] = {
    "usual": (query(),),
    "all": (
        query(),
        flashforge(),
        deft_flatten(40, "bits"),
        deft_flatten(),
        cascade(),
        cohort(16, split_shared_rows=3, merge="final"),
        cohort(64, split_shared_rows=3, merge="final"),
        cohort(64, split=96, merge="final"),
    ),
}


def schedule_of(strategy: Strategy, shape: Shape) -> Schedule:
    return lower(strategy.plan(Problem(TREE, shape, TARGET)), Problem(TREE, shape, TARGET))


def sources_of(name: str, strategies: str) -> list[Source]:
    shape, by_page = SHAPES[name]
    schedules = (schedule_of(strategy, shape) for strategy in STRATEGIES[strategies])
    emitted = (emit(schedule, shape, shape.page_size if by_page else 1) for schedule in schedules)
    return list({source.digest: source for sources in emitted for source in sources}.values())


def launch(name: str, strategies: str) -> list[int]:
    """Modules loaded and kernels compiled by launches in a process of their own."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-W", "error::UserWarning", "-c", LAUNCHES, name, strategies]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded, compiled = json.loads(done.stdout)
    return [loaded, compiled]


def check_launches(name: str, strategies: str) -> None:
    told: list[Compiled] = []
    sources = sources_of(name, strategies)
    kernels = [(source, SHAPES[name][0]) for source in sources]
    outcomes = compile_all(kernels, TARGET, processes=2, on_variant=told.append)
    assert [(outcome.problem, outcome.cached) for outcome in outcomes] == [(None, False)] * len(sources)
    assert [outcome.source for outcome in outcomes] == sources
    assert sorted(told, key=outcomes.index) == outcomes
    assert launch(name, strategies) == [len(sources), 0]
    assert [outcome.cached for outcome in compile_all(kernels[:1], TARGET)] == [True]


@pytest.fixture(autouse=True)
def _triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of Triton's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def test_launches_find_what_was_compiled_ahead() -> None:
    check_launches("32:8", "usual")


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
def test_launches_of_all_kinds_find_what_was_compiled_ahead(name: str) -> None:
    check_launches(name, "all")


def test_a_kernel_that_fails_or_dies_or_hangs_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "TIMEOUT_S", 8.0)
    texts = {
        "fails": "raise RuntimeError('no such\\nkernel')",
        "dies": "import os\nprint('last words', flush=True)\nos._exit(3)",
        "hangs": "import time\ntime.sleep(60)",
        "lacks": "import triton",
    }
    sources = [replace(MERGE, text=text, digest=name) for name, text in texts.items()]
    taken: list[str] = []

    def kernels() -> Iterator[tuple[Source, Shape]]:
        for source in sources:
            taken.append(source.digest)
            yield source, Shape(12, 4, 80)

    taken_when_one_ends: list[int] = []
    outcomes = compile_all(
        kernels(), TARGET, processes=2, on_variant=lambda outcome: taken_when_one_ends.append(len(taken))
    )
    assert taken_when_one_ends[0] <= 3  # of two processes the other has one, and the next was taken for this one
    assert [outcome.source.digest for outcome in outcomes] == list(texts)
    problems = [str(outcome.problem) for outcome in outcomes]
    assert problems[0] == "RuntimeError: no such kernel"
    assert problems[1] == "process died: exit status 3 (last words)"
    assert problems[2] == "timed out after 8 s"
    assert problems[3].startswith("AttributeError: ")


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from dataclasses import replace\n"
        "from treegen import Shape\n"
        "from treegen.tuning.compile_pool import compile_all\n"
        "from treegen.codegen.emit import emit_merge\n"
        "from treegen.codegen.merge_forms import merge_key\n"
        "from treegen.target.targets import target_from\n"
        "shape = Shape(8, 8, 64)\n"
        "key = merge_key(shape, several_rounds=False, rows=512, longest=9)\n"
        "source = replace(emit_merge(key), text='1 / 0', digest='script')\n"
        "print([outcome.problem for outcome in compile_all([(source, shape)], target_from('h200'), 1)])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "['ZeroDivisionError: division by zero']\n", done.stderr


def test_nothing_to_compile_and_nothing_to_compile_for() -> None:
    assert compile_all([], TARGET) == []
    with pytest.raises(BackendError, match="has no GPU"):
        compile_all([(MERGE, Shape(8, 8, 64))], replace(TARGET, capability=0))
    with pytest.raises(BackendError, match="processes"):
        compile_all([(MERGE, Shape(8, 8, 64))], TARGET, processes=0)
