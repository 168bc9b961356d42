"""Kernels for batches that live, against float64 attention over each request's own pages, whatever happens to them.

What no request may read holds NaN, or impossible page ids; the host is told late, wrong or nothing of what happens.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

import treegen
from support.batch_loops import (
    FORMS,
    HEADS,
    PAGE_SIZES,
    STRATEGIES,
    Case,
    any_case,
    check_step,
    made,
    scored_cases,
    serve,
    shaped_cases,
)
from support.full_tests import others_full
from support.paths import ROOT
from treegen import LiveBatch, PageTable, Shape
from treegen.backends.request_program import RequestProgram
from treegen.compiled.batch_tables import BatchTables
from treegen.ir.arrays import Ints
from treegen.ir.errors import StrategyError
from treegen.strategies import Strategy, batch_invariant, cohort, query
from treegen.strategies.registry import strategy_names

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


@pytest.mark.parametrize("strategy", strategy_names())
def test_every_strategy_serves_or_is_refused(strategy: str) -> None:
    case = Case(Shape(8, 1, 16, dtype="fp32", page_size=8), strategy=strategy, rows=9)
    if strategy in ("medusa", "specinfer", "cascade", "flashforge"):
        with pytest.raises(StrategyError, match="needs launches of its own"):
            serve(case, 1, 15, "torch")
    else:
        serve(case, 1, 15, "torch")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_requests_of_any_length_in_one_item(backend: str) -> None:
    """Lengths around pages, tiles and nothing, in an item whose plan was made for others."""
    case = Case(Shape(4, 2, 16, dtype="fp32", page_size=16), strategy=cohort(64), rows=4, most_tokens=200)
    server, kernel = made(case, 0, backend)
    for _ in range(4):
        seat = server.batch.add(100)
        server.of_seat[seat], server.length[seat] = [server.take() for _ in range(13)], 200
        server.fill(server.of_seat[seat], 0, 200)
    for seat in (1, 2, 3):  # all begin with the same 5 pages
        server.drop(server.of_seat[seat][:5])
        server.of_seat[seat] = [*server.of_seat[0][:5], *server.of_seat[seat][5:]]
        for page in server.of_seat[0][:5]:
            server.held[page] += 1
        server.batch.share(seat, 0, 80)
    kernel.update(server.batch)
    generator = torch.Generator().manual_seed(0)
    for lengths in ([200, 200, 200, 200], [0, 1, 79, 80], [80, 81, 128, 143], [64, 0, 0, 63], [81, 95, 96, 97]):
        server.random.random = lambda: 1.0  # type: ignore[method-assign]  # all page ids are right
        server.length.update(enumerate(lengths))
        q = torch.randn(4, 4, 16, generator=generator)
        expected = server.write()
        kernel.step()
        check_step(server, case, kernel, expected, f"lengths {lengths}", q)


def test_lse_in_base_2_and_new_outputs() -> None:
    case = Case(Shape(4, 2, 16, dtype="fp32", page_size=16))
    server, kernel = made(case, 3, "torch")
    for _ in range(12):
        server.event()
    kernel.update(server.batch)
    lengths = server.write()
    kernel.step()
    q, caches = torch.randn(6, 4, 16), server.caches()
    rows = [row for row, length in lengths.items() if length > 0]
    assert rows
    out, lse = kernel(q, *caches, return_lse=True)
    alone = kernel(q, *caches)
    assert isinstance(alone, torch.Tensor)
    _, in_base_2 = kernel(q, *caches, return_lse=True, lse_base="log2")
    assert bool((alone[rows] == out[rows]).all())
    torch.testing.assert_close(in_base_2[rows] * math.log(2), lse[rows])


def test_a_plan_of_one_batch_serves_another() -> None:
    """Epochs of two batches may be the same: what a plan says is checked all the same."""
    case = Case(Shape(4, 2, 16, dtype="fp32", page_size=16), strategy=cohort(64, split=64))
    planned, _ = made(case, 11, "torch")
    server, kernel = made(case, 12, "torch")
    for _ in range(20):
        planned.event()
        server.event()
    kernel.update(planned.batch)
    kernel.seat(server.batch)
    lengths = server.write()
    kernel.step()
    check_step(server, case, kernel, lengths, "another batch", torch.randn(6, 4, 16))


@pytest.mark.parametrize("strategy", ["auto", cohort(64), query()], ids=str)
@pytest.mark.parametrize("links", [8, 20, 60])
def test_chains_of_forks(links: int, strategy: str) -> None:
    """Each request forks from the one before, a page later: in a long chain all have pages of all before them."""
    case = Case(Shape(4, 2, 16, dtype="fp32", page_size=2), strategy=strategy, rows=links, most_tokens=2 * links + 9)
    server, kernel = made(case, 1, "torch")
    server.random.random = lambda: 1.0  # type: ignore[method-assign]  # no impossible page ids
    last = server.batch.add(3)
    server.of_seat[last], server.length[last] = [server.take(), server.take()], 3
    server.fill(server.of_seat[last], 0, 3)
    for _ in range(links - 1):
        before = server.batch.tokens[last]
        server.fork(last)
        last = int(server.batch.seats[-1])
        server.of_seat[last].append(server.take())
        server.length[last] += 2
        server.fill(server.of_seat[last], int(before), server.length[last])
        server.batch.grow(2, [last])
    kernel.update(server.batch)
    lengths = server.write()
    kernel.step()
    check_step(server, case, kernel, lengths, f"{links} links", torch.randn(links, 4, 16))
    assert kernel.counters()["planned"] == links


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_smaller_batch_takes_the_seats(backend: str) -> None:
    case = Case(Shape(4, 2, 16, dtype="fp32", page_size=16), strategy=cohort(64), rows=4)
    server, kernel = made(case, 12, backend)
    for _ in range(4):
        server.arrive()
    kernel.update(server.batch)
    small = LiveBatch(page_size=16, max_seats=1)
    small.add(int(server.length[0]), row=int(server.batch.row[0]))
    kernel.seat(small)
    lengths = server.write()
    kernel.step()
    row = int(server.batch.row[0])
    for seat in (1, 2, 3):
        del server.of_seat[seat]
    check_step(server, case, kernel, {row: lengths[row]}, "a smaller batch", torch.randn(4, 4, 16))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_without_request_may_name_any_row_of_the_table(backend: str) -> None:
    shape = Shape(4, 2, 16, dtype="fp32", page_size=16)
    table = torch.arange(8, dtype=torch.int32).view(4, 2)
    lengths = torch.tensor([20, -5, 2**30, 9], dtype=torch.int32)
    rows = torch.tensor([2, -9, 2**30, 0], dtype=torch.int32)
    kernel = treegen.compile_batch(shape, PageTable(table, lengths, 8, rows), max_tokens=32, backend=backend)
    batch = LiveBatch(page_size=16)
    batch.add(20, row=0)
    batch.add(9, row=3)
    kernel.update(batch)
    kernel.step()
    keys, values = torch.randn(2, 8, 16, 2, 16)
    q = torch.randn(4, 4, 16)
    out = kernel(q, keys, values, out=torch.full_like(q, 777.0))
    assert isinstance(out, torch.Tensor)
    for row, tokens, pages in ((0, 20, [4, 5]), (3, 9, [0, 1])):
        own_keys, own_values = (cache[pages].flatten(0, 1)[:tokens].repeat_interleave(2, 1) for cache in (keys, values))
        weights = torch.einsum("hd,thd->ht", q[row], own_keys).mul(0.25).softmax(-1)
        torch.testing.assert_close(out[row], torch.einsum("ht,thd->hd", weights, own_values))
    assert bool((out[1:3] == 777.0).all())


def counted(kernel: treegen.BatchKernel) -> dict[str, int]:
    plans = ("plans", "plan_age", "saved_bytes")
    return {name: count for name, count in kernel.counters().items() if name not in plans}


def test_the_age_of_a_plan_is_in_steps() -> None:
    lengths = torch.tensor([20], dtype=torch.int32)
    pages = PageTable(torch.zeros(1, 4, dtype=torch.int32), lengths, 4)
    shape = Shape(4, 2, 16, dtype="fp32", page_size=16)
    kernel = treegen.compile_batch(shape, pages, max_tokens=64, backend="torch")
    batch = LiveBatch(page_size=16)
    batch.add(20)
    ages = [kernel.counters()["plan_age"]]
    for _ in range(2):
        kernel.update(batch, "query")
        for _ in range(3):
            kernel.step()
        ages.append(kernel.counters()["plan_age"])
    assert ages == [0, 3, 3]
    with pytest.raises(StrategyError, match="strategy = medus: is not registered"):
        kernel.update(batch, "medus")


def test_saved_bytes_are_those_of_the_plan() -> None:
    """Two groups of four requests read the same 1,600 tokens, so these are read twice in place of eight times."""
    shape = Shape(4, 2, 16, dtype="fp32", page_size=16)
    pages = PageTable(torch.zeros(8, 128, dtype=torch.int32), torch.ones(8, dtype=torch.int32), 100)
    kernel = treegen.compile_batch(shape, pages, max_tokens=2048, backend="torch", strategy=cohort(8))
    batch = LiveBatch(page_size=16)
    batch.add(1640)
    for _ in range(7):
        batch.add(1640, 0, 1600)
    kernel.update(batch)
    assert kernel.counters()["saved_bytes"] == 6 * 1600 * shape.kv_token_bytes
    kernel.update(batch, "query")
    assert kernel.counters()["saved_bytes"] == 0


def test_counters_tell_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each state once: planned, new, refuted, outgrown and invalid."""
    monkeypatch.setattr("treegen.runtime.batch_room.RESERVE", 256)
    shape = Shape(4, 2, 16, dtype="fp32", page_size=16)
    table = torch.arange(5 * 40, dtype=torch.int32).view(5, 40)
    table[2, :2] = table[0, :2]
    lengths = torch.tensor([64, 50, 40, 30, 20], dtype=torch.int32)
    pages = PageTable(table, lengths, 200)
    kernel = treegen.compile_batch(shape, pages, max_tokens=640, backend="torch", strategy=cohort(64))
    batch = LiveBatch(page_size=16)
    for tokens, sharing in ((64, ()), (50, ()), (40, (0, 32)), (30, ())):
        batch.add(tokens, *sharing)
    kernel.update(batch)
    kernel.step()
    assert counted(kernel) == {"steps": 1, "planned": 4, "new": 0, "refuted": 0, "outgrown": 0, "invalid": 0}
    batch.add(20)
    kernel.seat(batch)
    lengths[1] = 50 + 256 + 1
    table[2, 1] = 199
    table[3, 0] = 200
    kernel.step()
    assert counted(kernel) == {"steps": 2, "planned": 5, "new": 1, "refuted": 1, "outgrown": 1, "invalid": 1}
    lengths[1] = 50 + 256
    batch.moved(0)
    kernel.seat(batch)
    kernel.step()
    assert counted(kernel) == {"steps": 3, "planned": 7, "new": 2, "refuted": 2, "outgrown": 1, "invalid": 2}


def test_the_workspace_follows_from_the_page_table() -> None:
    shape = Shape(4, 2, 16, page_size=16)

    def bytes_of(rows: int, tokens: int) -> int:
        table, lengths = torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        return treegen.compile_batch(shape, PageTable(table, lengths, 8), max_tokens=tokens).workspace_size()

    assert 0 < bytes_of(4, 100) < bytes_of(4, 10_000) < bytes_of(16, 10_000)


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
