"""Batch-invariant mode of kernels for batches that live: rows keep their bits whatever else happens."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.batch_events import TORCH, Server
from support.batch_loops import Case, any_case, caches_of, made, scored_cases, serve, shaped_cases, small
from support.compositions import bits
from support.forests import examples
from support.full_tests import others_full
from support.step_tables import step_of
from treegen import LiveBatch, Shape
from treegen.backends.request_program import RequestProgram
from treegen.ir.errors import StrategyError
from treegen.ir.verify import verify
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.batch_room import batch_config, chunk_room_of
from treegen.schedule.by_request import run_tokens_of
from treegen.schedule.chunk_items import lower_chunks
from treegen.strategies import batch_invariant, cohort
from treegen.strategies.batch_invariant import chunk_for
from treegen.target.problem import Problem

# An impossible page id makes items of the plan read any page; nothing that they compute is used then.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

CHUNK = 128
INVARIANT = batch_invariant(CHUNK)
INTERPRETED = (
    Case(Shape(4, 2, 16, dtype="bf16", page_size=16), "block", -1, INVARIANT, 6, 400),
    Case(Shape(8, 1, 16, dtype="fp32"), "ragged", 37, INVARIANT, 5, 300),
    Case(Shape(4, 2, 16, dtype="bf16", page_size=64, kv_layout="HND"), "named", -1, INVARIANT, 4, 400, sms=16),
    Case(Shape(6, 2, 16, dtype="fp16", page_size=128), "block", 200, INVARIANT, 4, 500),
)
"""Every form of table, in pages of runs and of tokens, with and without windows."""
SHARING = Case(Shape(4, 2, 16, dtype="fp16", page_size=16), "block", -1, INVARIANT, 6, 600, sms=16)


def crowd(server: Server) -> None:
    """Requests come, most of which begin with tokens of a long one."""
    server.arrive()
    server.grow(0, 5 * CHUNK // 2)
    server.batch.set_tokens(0, server.length[0])
    while len(server.batch) < server.rows - 1:
        server.arrive(0)


def one_request(server: Server, seat: int) -> LiveBatch:
    """A batch of one of the server's requests, which shares with none."""
    batch = LiveBatch(server.page_size, max_seats=server.rows)
    batch.add(int(server.batch.tokens[seat]), row=int(server.batch.row[seat]))
    return batch


def results(kernel: BatchKernel, server: Server, case: Case, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of out and lse after a step."""
    kernel.step()
    out, lse = kernel(q, *caches_of(server, case), return_lse=True)
    assert isinstance(lse, torch.Tensor)
    return bits(out), bits(lse)


def check_bits(case: Case, seed: int, steps: int, backend: str, device: str = "cpu") -> int:
    """Serves random events with plans that are late, with fresh ones, and each request alone: all have the same bits.
    Returns how many rows were compared.
    """
    source = random.Random(seed)
    server, late = made(case, seed, backend, device)
    fresh, alone = (
        treegen.compile_batch(
            case.shape, server.pages, max_tokens=case.most_tokens, strategy=case.strategy, backend=backend,
            target=small(sms), window_left=case.window, **case.options,
        )
        for sms in (case.sms, 3)
    )  # fmt: skip
    generator, compared = torch.Generator().manual_seed(seed), 0
    crowd(server)
    late.update(server.batch)
    for _ in range(steps):
        for _ in range(source.randint(1, 3)):
            server.event()
        late.seat(server.batch)
        fresh.update(server.batch)
        lengths = server.write()
        q = torch.randn(server.rows, case.shape.num_qo_heads, case.shape.head_dim, generator=generator)
        q = q.to(TORCH[case.shape.dtype]).to(device)
        found, wanted = results(late, server, case, q), results(fresh, server, case, q)
        for row in lengths:
            assert all(torch.equal(a[row], b[row]) for a, b in zip(found, wanted, strict=True)), f"row {row}"
        if server.of_seat:
            seat = source.choice(sorted(server.of_seat))
            row = int(server.batch.row[seat])
            alone.update(one_request(server, seat))
            by_itself = results(alone, server, case, q)
            assert all(torch.equal(a[row], b[row]) for a, b in zip(found, by_itself, strict=True)), f"row {row}"
        compared += len(lengths)
    return compared


def sharing_server(case: Case, backend: str, lengths: list[int], shared: list[int]) -> tuple[Server, BatchKernel]:
    """A server whose requests begin with tokens of the first one, and its kernel, without a plan."""
    server, kernel = made(case, 0, backend)
    server.random.random = lambda: 1.0  # type: ignore[method-assign]  # all page ids are right
    for number, (tokens, common) in enumerate(zip(lengths, shared, strict=True)):
        seat = server.batch.add(tokens, 0 if common else None, common)
        assert seat == number
        whole = common // server.page_size
        own = [server.take() for _ in range(server.room(case.most_tokens) - whole)]
        server.of_seat[seat], server.length[seat] = [*server.of_seat.get(0, [])[:whole], *own], tokens
        for page in server.of_seat[seat][:whole]:
            server.held[page] += 1
        server.fill(server.of_seat[seat], 0, case.most_tokens)
    return server, kernel


@pytest.mark.parametrize("begin", range(0, 40, 20))
def test_the_torch_backend(begin: int) -> None:
    planned = 0
    for seed in range(begin, begin + 20):
        case = replace(any_case(seed), strategy=INVARIANT, most_tokens=400)
        planned += serve(case, seed, 15, "torch")["planned"]
    assert planned > 0


@pytest.mark.parametrize("number", others_full(range(len(INTERPRETED))))
def test_interpreted_kernels(number: int) -> None:
    assert serve(INTERPRETED[number], 200 + number, 6, "triton")["planned"] > 0


@pytest.mark.full
@pytest.mark.parametrize("begin", range(0, 24, 4))
def test_interpreted_kernels_at_length(begin: int) -> None:
    for seed in range(begin, begin + 4):
        case = any_case(seed, random.Random(seed).choice(["fp32", "bf16"]))
        sms = random.Random(seed).choice([2, 16])
        serve(replace(case, strategy=INVARIANT, rows=min(case.rows, 6), sms=sms), seed, 15, "triton")


@pytest.mark.filterwarnings("ignore::treegen.ir.errors.PerformanceWarning")
@pytest.mark.parametrize("name", others_full(sorted({**scored_cases(), **shaped_cases()})))
def test_options_and_shapes(name: str) -> None:
    case = replace({**scored_cases(), **shaped_cases()}[name], strategy=INVARIANT, most_tokens=300)
    serve(case, 3, 20, "torch")
    serve(replace(case, rows=4), 7, 2, "triton")


@pytest.mark.parametrize("number", others_full(range(len(INTERPRETED)), 4))
def test_bits_follow_from_the_request(number: int) -> None:
    """Events of all kinds, in Triton's interpreter; plans are late or fresh, and others are in the batch or not."""
    assert check_bits(INTERPRETED[number], number, 3, "triton") > 3


def test_bits_follow_from_the_request_on_torch() -> None:
    for seed in range(8):
        check_bits(replace(SHARING, window=(-1, 100)[seed % 2]), seed, 6, "torch")


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_bits_follow_from_the_request_at_length(seed: int) -> None:
    case = any_case(seed, random.Random(seed).choice(["fp16", "bf16"]))
    check_bits(replace(case, strategy=INVARIANT, rows=min(case.rows, 6), most_tokens=500), seed, 12, "triton")


@pytest.mark.parametrize("backend", others_full(["torch", "triton"]))
def test_growing_over_the_edge_of_a_chunk(backend: str) -> None:
    """A row that grows from one chunk into the next has the bits of a fresh plan, at every length around the edge."""
    case = replace(SHARING, rows=3)
    server, late = sharing_server(case, backend, [300, 290, 120], [0, 272, 0])
    fresh = treegen.compile_batch(
        case.shape, server.pages, max_tokens=case.most_tokens, strategy=INVARIANT, backend=backend, target=small(16)
    )
    late.update(server.batch)
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0)).half()
    for grown in (0, 7, 8, 9, 85, 130, 137):  # of 120 tokens to 127, 128 and 129; of 300 to 385
        for seat, tokens in enumerate((300, 290, 120)):
            server.length[seat] = tokens + grown
        server.batch.set_tokens([0, 1, 2], [300 + grown, 290 + grown, 120 + grown])
        late.seat(server.batch)
        fresh.update(server.batch)
        server.write()
        found, wanted = results(late, server, case, q), results(fresh, server, case, q)
        assert all(map(torch.equal, found, wanted)), grown
    assert late.counters()["planned"] == 21


def written(server: Server, kernel: BatchKernel) -> tuple[dict[int, list[int]], int]:
    """The slots that each row merges, in order, after a step; and how many rows items of the plan walk."""
    assert isinstance(kernel.program, RequestProgram)
    step = step_of(kernel.program, kernel.form.config, server.page_size, positions=False)
    assert not {slot for item in step.planned for slot in range(item.partial0, item.partial0 + len(item.rows))} & {
        slot for item in step.alone for slot in range(item.partial0, item.partial0 + len(item.rows))
    }
    packed = kernel.form.config.tokens // run_tokens_of(server.page_size)
    runs = kernel.program.tables["packed_runs"].view(-1, kernel.form.room.run_width).tolist()
    for item in (*step.planned, *step.alone):
        for number in range(len(item.rows)):  # what fills no tile begins one, for every row
            own = [i for i in item.packed_runs if runs[i][1] > 0 and runs[i][2] <= number < runs[i][3]]
            assert own == [*range(own[0], own[0] + len(own))] if own else True
            assert not own or (own[0] - item.packed_runs.start) % packed == 0
    found = {row: [slot for slot, _ in tokens] for row, tokens in step.written().items()}
    return found, sum(row >= 0 for item in step.planned for row in item.rows)


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 6), marks=pytest.mark.full)], ids=len)
def test_tables_hold_every_token_once_and_in_order(seeds: range) -> None:
    """Chunks of the plan and of lone items, by row in the order of the path, whatever events come between plans."""
    case = Case(Shape(4, 2, 16, dtype="fp16", page_size=16), "ragged", -1, INVARIANT, 9, 700, sms=8)
    shared = 0
    for seed in seeds:
        server, kernel = made(case, seed, "triton")
        crowd(server)
        kernel.update(server.batch)
        for _ in range(5):
            server.event()
            kernel.seat(server.batch)
            lengths = server.write()
            kernel.step()
            found, together = written(server, kernel)
            seat_of = {int(server.batch.row[seat]): seat for seat in server.of_seat}
            assert set(found) == set(lengths)
            for row, length in lengths.items():
                pages = server.of_seat[seat_of[row]]
                path = [pages[token // 16] * 16 + token % 16 for token in range(max(length, 0))]
                assert found[row] == path
            shared += together
    assert shared > 5 * len(seeds)


def test_requests_read_whole_chunks_together() -> None:
    """Four requests that share 300 tokens walk two chunks together; one whose page differs walks all its own."""
    case = replace(SHARING, rows=4)
    server, kernel = sharing_server(case, "triton", [400, 310, 333, 600], [0, 304, 304, 304])
    kernel.update(server.batch)
    server.write()
    kernel.step()
    _, together = written(server, kernel)
    assert together == 8
    assert kernel.counters()["planned"] == 4
    page = server.take()
    server.of_seat[2][3] = page
    server.fill(server.of_seat[2], 48, 64)
    server.write()
    kernel.step()
    _, together = written(server, kernel)
    assert together == 6
    assert kernel.counters()["refuted"] == 1
    plan = kernel.plan
    assert plan is not None
    assert [(len(group.segments), rows) for group, rows in zip(plan.groups, plan.group_rows, strict=True)][:2] == [
        (1, 4), (1, 4),
    ]  # fmt: skip


def test_all_whole_chunks_of_a_prefix_are_read_together() -> None:
    """Six requests share four chunks and have nearly nothing else: no row is left alone for want of partial slots."""
    server, kernel = sharing_server(SHARING, "triton", [600] + [530] * 5, [0] + [512] * 5)
    kernel.update(server.batch)
    server.write()
    kernel.step()
    _, together = written(server, kernel)
    assert together == 6 * 4


def random_batch(seed: int) -> LiveBatch:
    """Requests that share chains of prefixes."""
    source, batch = random.Random(seed), LiveBatch(16)
    for _ in range(source.randint(0, 14)):
        live = batch.seats.tolist()
        if live and source.random() < 0.7:
            owner = source.choice(live)
            shared = source.randint(0, int(batch.tokens[owner])) // 16 * 16
            batch.add(shared + source.randint(0, 600), owner, shared)
        else:
            batch.add(source.randint(0, 1500))
    return batch


@given(st.integers(0, 10_000), st.sampled_from((128, 256)), st.sampled_from((1, 16)))
@examples(150)
def test_plans_obey_the_law_and_fit(seed: int, chunk: int, sms: int) -> None:
    shape, target = Shape(16, 1, 64, page_size=16), small(sms)  # up to four rows of a work item
    problem = Problem(random_batch(seed).tree(), shape, target)
    plan = batch_invariant(chunk).plan(problem)
    verify(plan, problem.tree)
    config = batch_config(shape, target)
    room = chunk_room_of(shape, config, 14, 16_384, chunk, 2 * sms)
    for slots in (room.slots, 7):
        tight = replace(room, slots=slots)
        schedule = lower_chunks(plan, problem, config, tight)
        assert tight.holds(schedule)
        assert schedule.chunks is not None
        used = schedule.chunks.slots[schedule.chunks.slots >= 0]
        rows = schedule.schedule.column("rows")
        assert (rows > 1).all()
        assert sorted(used.tolist()) == list(range(int(rows.sum())))
    pairs = np.count_nonzero(plan.group_rows > 1)
    assert (plan.group_rows[:pairs] > 1).all()
    assert (plan.group_rows[pairs:] == 1).all()
    assert (plan.group_tokens[:pairs] == chunk).all()


def test_chunks_by_default() -> None:
    """Requests of up to so many tokens have at most 32 chunks, and none below 512 tokens."""
    assert [chunk_for(tokens) for tokens in (1, 16_384, 16_385, 131_072, 1_000_000)] == [512, 512, 1024, 4096, 32_768]
    server, _ = made(SHARING, 0, "torch")
    kernel = treegen.compile_batch(
        SHARING.shape, server.pages, max_tokens=600, batch_invariant=True, backend="torch", target=small()
    )
    kernel.update(server.batch)
    assert kernel.choice is not None
    assert str(kernel.choice.strategy) == "batch-invariant(chunk=512, block=1)"
    assert "bits follow" in kernel.explain()


def test_memory_for_all_chunks() -> None:
    """Each chunk of each request may be served alone, beside the slots of those that are read together."""
    room = made(SHARING, 0, "torch")[1].form.room
    assert room.lone_partials >= 6 * 5
    assert room.slots == 30
    smaller = made(replace(SHARING, most_tokens=100), 0, "torch")[1]
    assert smaller.workspace_size() < made(SHARING, 0, "torch")[1].workspace_size()


def test_other_strategies_are_refused_in_updates() -> None:
    server, kernel = made(SHARING, 0, "torch")
    with pytest.raises(StrategyError, match="would change what rows' bits follow from"):
        kernel.update(server.batch, cohort(64))
    _, plain = made(replace(SHARING, strategy="auto"), 0, "torch")
    with pytest.raises(StrategyError, match="would change what rows' bits follow from"):
        plain.update(server.batch, INVARIANT)


def test_growth_needs_no_plan() -> None:
    """The walk of a request's own chunks follows its length, so that refresh plans for new requests alone."""
    server, kernel = sharing_server(replace(SHARING, rows=3), "torch", [100, 60, 0], [0, 48, 0])
    kernel.update(server.batch)
    server.batch.grow(400, [0])
    assert not kernel.refresh(server.batch)
