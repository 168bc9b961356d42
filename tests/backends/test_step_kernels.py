"""Step kernels against NumPy: what they write, read back from the arena, is what the page table and lengths say."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import triton.language as tl

from support.batch_loops import STRATEGIES, Case, any_case, by_position, made
from support.full_tests import others_full
from support.step_checks import check, running
from support.step_tables import step_of
from treegen import Shape
from treegen.backends import step_kernels
from treegen.backends.request_program import RequestProgram
from treegen.ir.request_tables import RequestTables
from treegen.ir.work_items import ITEM_FIELDS
from treegen.schedule.by_request import run_tokens_of
from treegen.schedule.expand import INVALID, NEW, OUTGROWN, PLANNED, REFUTED, states_of
from treegen.strategies import Strategy, cohort, query

RESERVE = 256
"""Tokens that requests may gain here: the interpreter is slow."""
PART = 64
"""Tokens of a request that is alone for which it is divided among lone items here."""
STATES = ("steps", "planned", "new", "outgrown", "refuted", "invalid")


@pytest.fixture(autouse=True)
def short_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegen.runtime.batch_room.RESERVE", RESERVE)
    monkeypatch.setattr(step_kernels, "LEAST_PART", tl.constexpr(PART))


def follow(case: Case, seed: int, steps: int, *, positions: bool) -> list[int]:
    """Checks the steps of a server; returns how many requests there were in each state."""
    source = random.Random(seed)
    server, kernel = made(case, seed, "triton")
    total = np.zeros(6, np.int64)
    for _ in range(2 * case.rows):
        server.event()
    for number in range(steps):
        for _ in range(source.randint(1, 3)):
            server.event()
        if number == 0 or source.random() < 0.4:
            kernel.update(server.batch)
        else:
            kernel.seat(server.batch)
        lengths = server.write()
        kernel.step()
        step = check(kernel, server, case, lengths, positions=positions)
        counts = np.bincount(step.states, minlength=6)
        counts[0] = 1
        total += counts
        assert step.counters == total.tolist() == [kernel.counters()[name] for name in STATES]
    return total.tolist()


POSITIONS = {"score_mod": by_position}
CASES = [
    Case(Shape(4, 2, 16, page_size=16), "block", strategy=cohort(32, split=50), rows=9, options=POSITIONS),
    Case(Shape(4, 2, 16), "ragged", 37, cohort(64, split=64), 9),
    Case(Shape(4, 2, 16, page_size=128), "named", 37, cohort(64), 6, 400, POSITIONS),
    Case(Shape(2, 2, 16, page_size=64), "named", strategy=query(split=128), rows=6, most_tokens=400),
    Case(Shape(4, 1, 16, page_size=2), "block", 0, query(), 9),
    Case(
        Shape(4, 2, 16, page_size=8),
        "ragged",
        strategy=cohort(64, split=100, split_shared_rows=2),
        rows=9,
        options=POSITIONS,
    ),
    Case(Shape(80, 1, 16, page_size=32), "block", 37, cohort(64), 5),
    Case(Shape(4, 2, 16, page_size=16), "ragged", strategy=cohort(64), rows=6, most_tokens=400, sms=12),
    Case(Shape(4, 1, 16, page_size=4), "named", 150, cohort(64, split=64), 9, 400, sms=9),
    Case(Shape(4, 1, 16, page_size=16), "block", -1, cohort(64, split=64), 9, 400, sms=30, queries=4),
    Case(Shape(4, 2, 16, page_size=8), "ragged", 37, cohort(32), 4, 400, queries=40),
    Case(Shape(8, 1, 16), "named", -1, query(split=64), 5, 400, POSITIONS, queries=9),
    Case(Shape(2, 2, 16, page_size=64), "block", 150, cohort(64, split=100, split_shared_rows=2), 6, 400, queries=7),
]


def has_positions(case: Case) -> bool:
    """Whether kernels are told where tokens are."""
    return case.window >= 0 or bool(case.options)


@pytest.mark.parametrize("number", others_full(range(len(CASES)), 6))
def test_what_steps_write(number: int) -> None:
    case = CASES[number]
    counted = follow(case, number, 6, positions=has_positions(case))
    assert counted[PLANNED] > 0


@pytest.mark.parametrize("window", [-1, 200])
@pytest.mark.parametrize("page_size", others_full([16, 1, 128], 3))
def test_few_requests_that_are_alone_are_divided(page_size: int, window: int) -> None:
    """Each of few lone requests is read in several parts, which are merged; with more of them each is read whole.

    There are no more parts than the longest one has tokens for.
    """
    case = Case(Shape(4, 2, 16, page_size=page_size), "block", window, cohort(64), 6, 400, sms=7)
    server, kernel = made(case, 1, "triton")
    server.random.random = lambda: 1.0  # type: ignore[method-assign]
    batch, parts = server.batch, []
    most = 400 if window < 0 else window + 1 + max(page_size, kernel.form.config.tokens)
    kernel.update(batch)
    for number in range(6):
        tokens = 400 - 30 * number
        seat = batch.add(tokens)
        server.of_seat[seat] = [server.take() for _ in range(server.room(tokens))]
        server.length[seat] = tokens
        kernel.seat(batch)
        lengths = server.write()
        kernel.step()
        step = check(kernel, server, case, lengths, positions=has_positions(case))
        assert all(len(item.rows) == 1 for item in step.alone)
        assert set(step.merged) == (set(lengths) if number < 3 else set())
        parts.append(len(step.alone))
        if window < 0:
            whole = tokens // max(PART, page_size, kernel.form.config.tokens)
            busy = sum(any(item.tokens) for item in step.alone if item.rows == [seat])
            assert busy >= min(max(1, 7 // (number + 1)), whole)
    longest = math.ceil(min(400, most) / PART)
    assert parts == [min(7 // alone, longest) * alone for alone in range(1, 7)]
    kernel.update(batch)
    kernel.step()
    assert not check(kernel, server, case, lengths, positions=has_positions(case)).alone


@pytest.mark.parametrize(
    ("strategy", "page_size", "window", "cut"),
    [(cohort(32), 1, -1, 128), (cohort(32), 1, 37, 192 + 37), (cohort(40, split=100), 16, -1, 224)],
    ids=str,
)
@pytest.mark.full
def test_lengths_of_a_request_of_several_query_rows(
    strategy: Strategy, page_size: int, window: int, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows by accepted tokens, and is rolled back: alone below what its plan cuts, and right always.

    cut: where its first row is at least: behind shared tokens, behind a page that ends an item, or so far that its
    window begins in a tile that the plan has.
    """
    monkeypatch.setattr("treegen.backends.step_launches.CHECKED", 16)  # rows that are listed at a time
    monkeypatch.setattr("treegen.backends.step_launches.SCANNED", 16)
    case = Case(
        Shape(4, 2, 16, dtype="fp32", page_size=page_size), "block", window, strategy, 6, 512, POSITIONS, queries=40
    )
    server, kernel = made(case, 1, "triton")
    server.random.random = lambda: 1.0  # type: ignore[method-assign]
    for number in range(2):
        own = server.of_seat[0][: 128 // page_size] if number else []
        for page in own:
            server.held[page] += 1
        seat = server.batch.add(300, 0 if number else None, 128 * number, rows=39 * number + 1)
        server.of_seat[seat] = [*own, *(server.take() for _ in range(server.room(512) - len(own)))]
        server.length[seat], server.queries[seat] = 300, 39 * number + 1
    kernel.update(server.batch)
    assert kernel.planned is not None
    assert kernel.planned.schedule.queries is not None
    least = int(kernel.planned.schedule.least[1])
    assert least == cut + 40
    for length in (301, 364, least, least - 1, 20, 0):
        server.length[1] = length
        lengths = server.write()
        kernel.step()
        state = check(kernel, server, case, lengths, positions=True).states[1]
        assert state == (PLANNED if length >= least else REFUTED), length
    server.length[1] = 300
    lengths = server.write()
    lengths[0], server.pages.table[0, server.room(300) - 1] = -1, -1  # all are alone then
    kernel.step()
    assert check(kernel, server, case, lengths, positions=True).states[:2] == [INVALID, PLANNED]
    server.queries[1] = 39
    lengths = server.write()
    kernel.step()
    assert check(kernel, server, case, lengths, positions=True).states[:2] == [PLANNED, NEW]


def test_as_many_lone_rows_as_a_tile_has_room_for() -> None:
    """Twelve rows of five heads fit a tile of 64: all 40 requests are alone at once."""
    case = Case(Shape(10, 2, 16, page_size=16), strategy=cohort(64), rows=40, most_tokens=40)
    server, kernel = made(case, 1, "triton")
    server.random.random = lambda: 1.0  # type: ignore[method-assign]
    kernel.update(server.batch)
    for number in range(40):
        seat = server.batch.add(number)
        server.of_seat[seat] = [server.take() for _ in range(server.room(number))]
        server.length[seat] = number
    kernel.seat(server.batch)
    lengths = server.write()
    kernel.step()
    assert max(len(item.rows) for item in check(kernel, server, case, lengths, positions=False).alone) <= 64 // 5


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
def test_what_steps_write_at_length(seed: int) -> None:
    case = any_case(seed, "bf16")
    follow(case, seed, 30, positions=has_positions(case))


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[2], query()], ids=str)
@pytest.mark.parametrize("page_size", others_full([1, 16, 128]))
def test_requests_grow_to_the_reserve_and_beyond(strategy: str, page_size: int) -> None:
    planned, most = 150, 640
    case = Case(Shape(4, 2, 16, page_size=page_size), strategy=strategy, rows=3, most_tokens=most)
    server, kernel = made(case, 1, "triton")
    server.random.random = lambda: 1.0  # type: ignore[method-assign]  # no impossible page ids
    shared = 128 // page_size
    for number in range(3):
        own = [] if not number else server.of_seat[0][:shared]
        for page in own:
            server.held[page] += 1
        seat = server.batch.add(planned, 0 if number else None, 128 if number else 0)
        server.of_seat[seat] = [*own, *(server.take() for _ in range(server.room(most) - len(own)))]
        server.length[seat] = planned
    kernel.update(server.batch)
    states = []
    for grown in (0, 1, RESERVE - 1, RESERVE, RESERVE + 1):
        server.length[1] = planned + grown
        lengths = server.write()
        kernel.step()
        step = check(kernel, server, case, lengths, positions=False)
        states.append(step.states)
    assert states == [[PLANNED] * 3] * 4 + [[PLANNED, OUTGROWN, PLANNED]]
    counted = kernel.counters()
    assert [counted[name] for name in STATES] == [5, 14, 0, 1, 0, 0]
    server.batch.set_tokens([1], [planned + RESERVE + 1])
    kernel.update(server.batch)
    server.write()
    kernel.step()
    assert check(kernel, server, case, lengths, positions=False).states == [PLANNED] * 3


def test_full_tiles_and_blocks_at_every_length() -> None:
    """One request alone, at each length around pages, runs and tiles: full tiles first, then packed runs."""
    case = Case(Shape(4, 2, 16, page_size=16), strategy=cohort(64), rows=1, most_tokens=300)
    server, kernel = made(case, 1, "triton")
    server.random.random = lambda: 1.0  # type: ignore[method-assign]
    seat = server.batch.add(300)
    server.of_seat[seat] = [server.take() for _ in range(19)]
    kernel.update(server.batch)
    tokens, block = kernel.form.config.tokens, run_tokens_of(16)
    packed = tokens // block
    for length in (0, 1, 15, 16, 17, tokens - 1, tokens, tokens + 1, 2 * tokens, 299, 300):
        server.length[seat] = length
        lengths = server.write()
        kernel.step()
        (item,) = check(kernel, server, case, lengths, positions=False).planned
        assert len(item.tiles) == length // tokens
        assert len(item.packed_runs) == math.ceil(math.ceil(length % tokens / block) / packed) * packed


@pytest.mark.full
def test_more_seats_than_a_program_lists_at_a_time() -> None:
    case = Case(Shape(4, 2, 16, page_size=16), strategy=cohort(64), rows=300, most_tokens=100)
    server, kernel = made(case, 1, "triton")
    for _ in range(1500):
        server.event()
    kernel.update(server.batch)
    for _ in range(40):
        server.event()
    kernel.seat(server.batch)
    for impossible in (False, True):
        if not impossible:
            server.random.random = lambda: 1.0  # type: ignore[method-assign]
        lengths = server.write()
        if impossible:
            row = next(row for row, length in lengths.items() if length > 0)
            server.table[row * server.width] = -1
            lengths[row] = -1
        kernel.step()
        step = check(kernel, server, case, lengths, positions=False)
        assert (INVALID in step.states) is impossible
        assert {PLANNED, NEW, REFUTED} <= {*step.states}


@pytest.mark.full
def test_every_page_of_a_long_request_is_checked() -> None:
    """Programs check blocks of pages in turn: a page that differs, or that there is not, is seen in each of them."""
    most, shared = 6000, 5500
    case = Case(Shape(4, 2, 16), strategy=cohort(64), rows=2, most_tokens=most)
    server, kernel = made(case, 1, "triton")
    server.random.random = lambda: 1.0  # type: ignore[method-assign]
    batch = server.batch
    batch.add(shared + 10)
    batch.add(shared + 20, 0, shared)
    first = [server.take() for _ in range(most)]
    server.of_seat = {0: first, 1: [*first[:shared], *(server.take() for _ in range(most - shared))]}
    server.length = {0: shared + 10, 1: shared + 20}
    kernel.update(batch)
    beyond = shared + 20 + RESERVE + 1

    def states(change: tuple[int, int] | None, length: int) -> list[int]:
        server.length[1] = length
        server.write()
        if change is not None:
            server.table[server.width + change[0]] = change[1]
        kernel.step()
        program = kernel.program
        assert isinstance(program, RequestProgram)
        assert kernel.planned is not None
        found = step_of(program, kernel.form.config, 1, positions=False).states
        assert found == states_of(kernel.planned.schedule, running(kernel, server)).tolist(), (change, length)
        return found

    assert states(None, shared + 20) == [PLANNED, PLANNED]
    assert states(None, beyond) == [PLANNED, OUTGROWN]
    for place in (0, 1023, 1024, 2500, 4095, 4096, shared - 1):
        assert states((place, 3), shared + 20) == [PLANNED, REFUTED], place
        assert states((place, server.num_pages), shared + 20) == [PLANNED, INVALID], place
        assert states((place, 3), beyond) == [PLANNED, REFUTED], place
    assert states((shared, 3), shared + 20) == [PLANNED, PLANNED]


def test_regions_follow_one_another() -> None:
    """What items of a plan have room for begins where that of the item before ends."""
    case = replace(any_case(3), strategy=cohort(32, split=50))
    server, kernel = made(case, 3, "triton")
    for _ in range(30):
        server.event()
    kernel.update(server.batch)
    assert kernel.planned is not None
    items, made_plan = kernel.planned.schedule.schedule.items, kernel.planned.schedule
    for column, room in ((2, made_plan.tile_room), (4, made_plan.run_room)):
        starts = [*items[:, column].tolist(), room]
        assert starts[0] == 0
        assert all(begin <= end for begin, end in pairwise(starts))
    assert made_plan.tile_room <= kernel.form.room.tiles
    assert made_plan.run_room <= kernel.form.room.packed_runs


@pytest.mark.parametrize("requests", [0, 1, 3, 4, 5, 8, 9])
def test_lone_items_go_to_thread_blocks_with_few_items(requests: int) -> None:
    """The second list of items begins with the thread blocks that have one item fewer than others."""
    case = Case(Shape(4, 2, 16, page_size=16), strategy=query(), rows=9)
    server, kernel = made(case, 1, "triton")
    for _ in range(requests):
        server.batch.add(100)
    kernel.update(server.batch)
    program, room = kernel.program, kernel.form.room
    assert isinstance(program, RequestProgram)
    assert room.at_once == 4
    free = int(program.tables["items"][RequestTables.of(room).alone - len(ITEM_FIELDS)])
    order = [*range(free, room.at_once), *reversed(range(free))]
    items = [len(range(block, requests, room.at_once)) for block in order]
    assert items == sorted(items)
