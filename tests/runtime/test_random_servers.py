"""Kernels for batches that live, against float64 attention over each request's own pages, whatever happens to them.

What no request may read holds NaN, or impossible page ids; the host is told late, wrong or nothing of what happens.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from support.batch_loops import (
    FORMS,
    HEADS,
    PAGE_SIZES,
    STRATEGIES,
    Case,
    any_case,
    scored_cases,
    serve,
    shaped_cases,
)
from support.full_tests import others_full
from support.paths import ROOT
from treegen import Shape
from treegen.backends.request_program import RequestProgram
from treegen.compiled.batch_tables import BatchTables
from treegen.ir.arrays import Ints
from treegen.strategies import Strategy, batch_invariant, cohort, query

# An impossible page id makes items of the plan read any page; nothing that they compute is written then.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

SPLIT = cohort(32, split=50)
INTERPRETED = (
    Case(Shape(4, 2, 16, dtype="fp32", page_size=16), "block", -1, SPLIT, 9),
    Case(Shape(8, 1, 16, dtype="fp32"), "ragged", 37, cohort(64, split=64), 6),
    Case(Shape(4, 2, 16, dtype="bf16", page_size=64, kv_layout="HND"), "named", 0, cohort(64), 6),
    Case(Shape(2, 2, 16, dtype="fp32", page_size=128), "named", -1, query(split=128), 6, 300),
    Case(Shape(4, 1, 16, dtype="fp32", page_size=2, kv_layout="HND"), "ragged", -1, "auto", 6),
    Case(Shape(4, 2, 16, dtype="fp32", page_size=8), "named", 37, query(), 6),
    Case(Shape(4, 2, 16, dtype="fp32", page_size=4), "block", -1, cohort(16, shares=3.5), 7),
    Case(Shape(4, 2, 16, dtype="fp32", page_size=32), "block", 37, cohort(64, split=100, split_shared_rows=2), 9),
)
"""Every form of table, page size and kind of plan once, with and without windows."""
SEVERAL = (
    Case(Shape(4, 1, 16, dtype="fp32", page_size=16), "block", -1, SPLIT, 6, 400, sms=12, queries=4),
    Case(Shape(8, 1, 16, dtype="fp32"), "ragged", 37, cohort(64, split=64), 5, queries=9),
    Case(Shape(4, 2, 16, dtype="bf16", page_size=64, kv_layout="HND"), "named", -1, cohort(64), 3, queries=40),
    Case(Shape(2, 2, 16, dtype="fp32", page_size=8), "block", -1, query(split=128), 6, 400, queries=7),
    Case(Shape(4, 1, 16, dtype="fp32", page_size=128), "ragged", 200, "auto", 5, 400, queries=5),
)
"""Requests of several query rows with every form of table, in pages of blocks and of tokens."""
MOST_QUERIES = (1, 4, 9, 40)


@pytest.mark.parametrize("begin", range(0, 40, 10))
def test_the_torch_backend(begin: int) -> None:
    counted: Counter[str] = Counter()
    for seed in range(begin, begin + 10):
        counted += serve(any_case(seed), seed, 30, "torch")
    assert counted["planned"] > counted["new"] > 0
    assert counted["refuted"] > 0
    assert counted["invalid"] > 0


@pytest.mark.full
@pytest.mark.parametrize("begin", range(40, 540, 50))
def test_the_torch_backend_at_length(begin: int) -> None:
    for seed in range(begin, begin + 50):
        serve(any_case(seed), seed, 30, "torch")


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]


@pytest.mark.parametrize("begin", range(0, 40, 20))
def test_several_query_rows_on_the_torch_backend(begin: int) -> None:
    """Also where the host is told late, or not, that their number is another."""
    counted: Counter[str] = Counter()
    for seed in range(begin, begin + 12):
        counted += serve(any_case(seed, queries=MOST_QUERIES[seed % 4]), seed, 20, "torch")
    assert counted["planned"] > counted["new"] > 0
    assert counted["refuted"] > 0


@pytest.mark.full
@pytest.mark.parametrize("begin", range(40, 540, 50))
def test_several_query_rows_at_length(begin: int) -> None:
    for seed in range(begin, begin + 50):
        serve(any_case(seed, queries=MOST_QUERIES[seed % 4]), seed, 30, "torch")


@pytest.mark.parametrize("number", others_full(range(len(SEVERAL)), 4))
def test_interpreted_kernels_of_several_query_rows(number: int) -> None:
    counted = serve(SEVERAL[number], 103 + number, 5, "triton")
    assert counted["planned"] > 0


@pytest.mark.parametrize(
    ("strategy", "queries"),
    [
        (cohort(16, split=64), 4),
        (batch_invariant(128), None),
        pytest.param(cohort(16, split=64), None, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("events", [7, pytest.param(20, marks=pytest.mark.full)])
def test_thread_blocks_take_several_turns(
    strategy: Strategy, queries: int | None, events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take one item or two merges at a time, and there are more of both."""
    monkeypatch.setattr("treegen.runtime.batch_room.items_at_once", lambda held, lanes: 1)
    most = [0, 0]
    load = RequestProgram.load

    def noted(self: RequestProgram, made: BatchTables | None, requests: Ints) -> None:
        assert self.form.room.at_once == 1
        assert self.form.room.lone_items > 2
        if made is not None:
            schedule = made.schedule.schedule
            most[:] = map(max, most, (len(schedule.items), len(schedule.merge_rows)))
        load(self, made, requests)

    monkeypatch.setattr(RequestProgram, "load", noted)
    case = Case(Shape(4, 2, 16, dtype="fp32", page_size=16), strategy=strategy, most_tokens=400, sms=8, queries=queries)
    counted = serve(case, 7, events, "triton")
    assert counted["planned"] > 0
    # In batch-invariant mode lone items do most of the work, and step kernels list the merges.
    assert (most[0] > 1 and most[1] > 2) or strategy.name == "batch-invariant"


@pytest.mark.parametrize("strategy", [cohort(16, split=64), pytest.param(batch_invariant(128), marks=pytest.mark.full)])
@pytest.mark.parametrize("events", [6, pytest.param(20, marks=pytest.mark.full)])
def test_each_item_may_have_its_own_thread_block(
    strategy: Strategy, events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Blackwell. Merges are taken in turn there, too."""
    monkeypatch.setattr("treegen.backends.request_program.takes_turns", lambda capability: False)
    case = Case(Shape(4, 2, 16, dtype="fp32", page_size=16), strategy=strategy, most_tokens=400, sms=8)
    assert serve(case, 7, events, "triton")["planned"] > 0


@pytest.mark.full
@pytest.mark.parametrize("begin", range(0, 24, 4))
def test_interpreted_kernels_of_several_query_rows_at_length(begin: int) -> None:
    for seed in range(begin, begin + 4):
        case = any_case(seed, random.Random(seed).choice(["fp32", "bf16"]), MOST_QUERIES[seed % 4])
        serve(replace(case, rows=min(case.rows, 6), sms=random.Random(seed).choice([2, 16])), seed, 12, "triton")


@pytest.mark.parametrize("name", others_full(sorted(scored_cases())))
def test_options_of_scores_with_several_query_rows(name: str) -> None:
    case = replace(scored_cases()[name], queries=6)
    for seed in range(3):
        serve(case, seed, 20, "torch")
    serve(replace(case, rows=4), 7, 2, "triton")


def test_random_cases_cover_everything() -> None:
    cases = [any_case(seed) for seed in range(60)]
    assert {case.shape.page_size for case in cases} == set(PAGE_SIZES)
    assert {(case.shape.num_qo_heads, case.shape.num_kv_heads) for case in cases} == set(HEADS)
    assert {case.form for case in cases} == set(FORMS)
    assert {case.window for case in cases} == {-1, 0, 37}
    assert {str(case.strategy) for case in cases} == set(map(str, STRATEGIES))
    assert {case.shape.kv_layout for case in cases} == {"NHD", "HND"}


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.full] * (number % 2)) for number in range(len(INTERPRETED))]
)
def test_interpreted_kernels(number: int) -> None:
    counted = serve(INTERPRETED[number], 100 + number, 6, "triton")
    assert counted["planned"] > 0


@pytest.mark.full
@pytest.mark.parametrize("begin", range(0, 60, 4))
def test_interpreted_kernels_at_length(begin: int) -> None:
    for seed in range(begin, begin + 4):
        serve(any_case(seed, random.Random(seed).choice(["fp32", "bf16"])), seed, 25, "triton")


@pytest.mark.parametrize("name", sorted(scored_cases()))
@pytest.mark.parametrize("seed", SEEDS)
def test_options_of_scores(name: str, seed: int) -> None:
    for dtype in ("fp32", "bf16"):
        serve(scored_cases(dtype)[name], seed, 20, "torch")
    serve(scored_cases()[name], 7 + seed, 3, "triton")


@pytest.mark.filterwarnings("ignore::treegen.ir.errors.PerformanceWarning")
@pytest.mark.parametrize("name", others_full(sorted(shaped_cases()), 3))
@pytest.mark.parametrize("seed", SEEDS)
def test_shapes_and_caches(name: str, seed: int) -> None:
    case = shaped_cases()[name]
    serve(case, seed, 20, "torch")
    serve(case, 7 + seed, 3, "triton")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::treegen.ir.errors.PerformanceWarning")
@pytest.mark.parametrize("name", sorted([*scored_cases(), *shaped_cases()]))
def test_interpreted_options_at_length(name: str) -> None:
    for seed in range(2):
        serve({**scored_cases(), **shaped_cases()}[name], seed, 20, "triton")


GPU = """
import sys
sys.path.insert(0, {tests!r})
from dataclasses import replace
from support.batch_loops import any_case, scored_cases, serve, shaped_cases
for seed in range({seeds}):
    for dtype in ("bf16", "fp16"):
        case = any_case(seed, dtype, queries=None if seed % 3 else 9)
        serve(replace(case, shape=replace(case.shape, head_dim=64, head_dim_v=64)), seed, 30, "triton", "cuda")
for case in {{**scored_cases("bf16"), **shaped_cases()}}.values():
    if case.sinks is None and "alibi_slopes" not in case.options:
        serve(case, 1, 20, "triton", "cuda")
print("right")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    code = GPU.format(tests=str(ROOT / "tests"), seeds=20)
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip().endswith("right"), done.stderr
