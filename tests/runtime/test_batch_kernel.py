"""BatchKernel: strategies, shapes of batches, counters and room."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import treegen
from support.batch_loops import (
    Case,
    check_step,
    made,
    serve,
)
from treegen import LiveBatch, PageTable, Shape
from treegen.backends.oracle import error
from treegen.ir.errors import InputError, PlanError, StrategyError
from treegen.strategies import cohort, query
from treegen.strategies.registry import strategy_names
from treegen.target.targets import target_from

# An impossible page id makes items of the plan read any page; nothing that they compute is written then.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")


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


def test_where_no_plan_has_room_requests_are_served_alone() -> None:
    """One of them is far longer than max_tokens, which the device refuses."""
    lengths = torch.tensor([90, 500, 50], dtype=torch.int32)
    pages = PageTable(torch.arange(192, dtype=torch.int32).view(3, 64), lengths, 192)
    shape = Shape(4, 2, 16, dtype="fp32", page_size=16)
    kernel = treegen.compile_batch(
        shape, pages, max_tokens=100, backend="torch", target=replace(target_from("h200"), sms=2)
    )
    batch = LiveBatch(16)
    for tokens in (90, 500, 50):
        batch.add(tokens)
    q, (k_cache, v_cache) = torch.randn(3, 4, 16), torch.randn(2, 192, 16, 2, 16)
    for call in (kernel.prepare, kernel.update, kernel.refresh):
        with pytest.raises(PlanError, match="more tables than there is room for"):
            call(batch)
        kernel.step()
        out = kernel(q, k_cache, v_cache)
        assert not out[1].any()
        for row in (0, 2):
            length = int(lengths[row])
            keys, values = (cache[pages.table[row].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            keys, values = (part.repeat_interleave(2, 1).double() for part in (keys, values))
            weights = torch.einsum("hd,thd->ht", q[row].double(), keys).mul(0.25).softmax(-1)
            assert error(out[row], torch.einsum("ht,thd->hd", weights, values)) < 1e-5
    assert kernel.counters()["invalid"] == 3


@pytest.mark.parametrize("call", ["prepare", "update", "seat", "refresh"])
def test_odd_batches_are_refused(call: str) -> None:
    lengths, offsets = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    pages = PageTable(torch.zeros(2, 8, dtype=torch.int32), lengths, 16, qo_indptr=offsets)
    shape = Shape(4, 2, 16, dtype="fp32", page_size=16)
    kernel = treegen.compile_batch(
        shape, pages, max_tokens=100, max_rows=8, backend="torch", target=replace(target_from("h200"), sms=2)
    )
    take, full = getattr(kernel, call), LiveBatch(16)
    for other in (None, "batch", 3, [1]):
        with pytest.raises(InputError, match="is not a LiveBatch"):
            take(other)
    for _ in range(2):
        full.add(5, rows=2**31 - 1)
    with pytest.raises(InputError, match="have more than max_rows, 8, query rows: 4294967294"):
        take(full)
    late = LiveBatch(16)
    first = late.add(20)
    late.add(20)
    third = late.add(20)
    late.finish(first)
    late.reorder({third: 0})
    with pytest.raises(InputError, match=r"2 requests, row 1, seat 2.*finish requests before others come"):
        take(late)
