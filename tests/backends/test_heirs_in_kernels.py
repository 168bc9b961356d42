"""Requests end, and step kernels read what they owned from the rows of their heirs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import triton.language as tl

from support.batch_loops import Case, made
from support.full_tests import others_full
from support.step_checks import check
from treegen import Shape
from treegen.backends import step_kernels
from treegen.ir.request_schedule import NO_EPOCH
from treegen.schedule.expand import PLANNED
from treegen.strategies import cohort

CASES = [
    Case(Shape(4, 2, 16, page_size=4), "block", strategy=cohort(64, split=64), rows=6, most_tokens=260),
    Case(Shape(4, 2, 16), "ragged", 70, cohort(32, split=50), rows=6, most_tokens=260),
    Case(Shape(4, 1, 16, page_size=16), "named", strategy=cohort(64), rows=6, most_tokens=260),
    Case(Shape(4, 2, 16, page_size=16), "block", 100, cohort(64, split=64), rows=6, most_tokens=260, queries=3),
]


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegen.runtime.batch_room.RESERVE", 64)
    monkeypatch.setattr(step_kernels, "LEAST_PART", tl.constexpr(64))


@pytest.mark.parametrize("number", others_full(range(len(CASES)), 2))
def test_pages_of_ended_requests_are_read_from_their_heirs(number: int) -> None:
    """Whoever comes into their seats, and whatever the host thinks that they share: each row gets its own tokens."""
    served = sum(_read_from_heirs(CASES[number], seed) for seed in range(12))
    assert served > 5


def _read_from_heirs(case: Case, seed: int) -> int:
    """Follows a group of requests under one plan; counts requests that were served by reading from an heir."""
    source, (server, kernel) = random.Random(seed), made(case, seed, "triton")
    server.random.random = lambda: 0.6  # type: ignore[method-assign] # the host knows lengths; page ids are possible
    batch, pages_of = server.batch, {0: 200, 1: 160, 2: 120, 3: 80, 4: 40}
    for number, shared in pages_of.items():
        with_whom = None if number == 0 else source.choice(sorted(server.of_seat))
        shared = 0 if with_whom is None else min(shared, server.length[with_whom]) // server.page_size
        own = [] if with_whom is None else server.of_seat[with_whom][:shared]
        for page in own:
            server.held[page] += 1
        tokens = 220
        seat = batch.add(tokens, with_whom, shared * server.page_size)
        server.of_seat[seat] = [*own, *(server.take() for _ in range(server.room(tokens) - len(own)))]
        server.length[seat] = tokens
        server.fill(server.of_seat[seat], 0, tokens)
    kernel.update(batch)
    assert kernel.planned is not None
    served, made_for = 0, kernel.planned.schedule
    for _ in range(7):
        seats = sorted(server.of_seat)
        if len(seats) > 1 and source.random() < 0.7:
            server.finish(source.choice(seats))
        if source.random() < 0.6:
            server.arrive(source.choice(sorted(server.of_seat)), lie=source.random() < 0.3)
        if source.random() < 0.2:
            server.move(source.choice(sorted(server.of_seat)), told=source.random() < 0.5)
        kernel.seat(batch)
        if source.random() < 0.6:  # the host takes everybody for one who shares what the plan assumes
            table = kernel.replanning.running(batch)
            epoch, known = made_for.epoch, len(made_for.epoch)
            table[1, :known] = np.where((table[0, :known] >= 0) & (epoch != NO_EPOCH), epoch, table[1, :known])
            kernel.program.seat(table)
        lengths = server.write()
        kernel.step()
        step = check(kernel, server, case, lengths, positions=case.window >= 0)
        common = kernel.program.seats[3].tolist()
        planned = [seat for seat, state in enumerate(step.states) if state == PLANNED]
        served += sum(common[owner] > 0 for seat in planned for owner, *_ in made_for.claims_of(seat).tolist())
        served += sum(common[seat] > 0 for seat in planned)
    return served
