"""Requests end, and step kernels read what they owned from the rows of their heirs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import triton.language as tl

from support.batch_events import Server
from support.batch_loops import Case, made
from support.full_tests import others_full
from support.step_checks import check
from treegen import Shape
from treegen.backends import step_kernels
from treegen.ir.request_schedule import NO_EPOCH
from treegen.runtime.batch_kernel import BatchKernel
from treegen.schedule.expand import PLANNED, REFUTED
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


@pytest.mark.parametrize("number", others_full(range(len(CASES)), 4))
@pytest.mark.parametrize("begin", others_full(range(0, 6, 2), 3))
def test_pages_of_ended_requests_are_read_from_their_heirs(number: int, begin: int) -> None:
    """Whoever comes into their seats, and whatever the host thinks that they share: each row gets its own tokens."""
    served = sum(_read_from_heirs(CASES[number], seed) for seed in range(begin, begin + 2))
    assert served > 1


def begin(server: Server, tokens: int, with_whom: int | None, shared: int) -> int:
    """Starts a request that has its first `shared` tokens in the pages of another one, and returns its seat."""
    own = [] if with_whom is None else server.of_seat[with_whom][: shared // server.page_size]
    for page in own:
        server.held[page] += 1
    seat = server.batch.add(tokens, with_whom if own else None, len(own) * server.page_size)
    server.of_seat[seat] = [*own, *(server.take() for _ in range(server.room(tokens) - len(own)))]
    server.length[seat] = tokens
    server.fill(server.of_seat[seat], 0, tokens)
    return seat


def tell_planned(kernel: BatchKernel) -> None:
    """The host takes everybody for one who shares what the plan assumes."""
    assert kernel.planned is not None
    table, epoch = kernel.program.running.numpy().copy(), kernel.planned.schedule.epoch
    known = len(epoch)
    table[1, :known] = np.where((table[0, :known] >= 0) & (epoch != NO_EPOCH), epoch, table[1, :known])
    kernel.program.seat(table)


@pytest.mark.parametrize(("tokens", "shared"), [(64, 64), (220, 0), (220, 192)])
def test_who_does_not_share_with_the_heir_is_alone(tokens: int, shared: int) -> None:
    """Others come into the seats of an ended owner and of one that shared more with it than the heir does.

    The newcomers share 192 tokens with one another. tokens, shared: of the first, all of them and those that it shares
    with the heir, which has 128 in common with the owner.
    """
    server, kernel = made(CASES[2], 0, "triton")
    server.random.random = lambda: 0.6  # type: ignore[method-assign]
    owner = begin(server, 220, None, 0)
    more, heir = begin(server, 220, owner, 192), begin(server, 220, owner, 128)
    kernel.update(server.batch)
    server.finish(more)
    server.finish(owner)
    kernel.seat(server.batch)
    assert begin(server, tokens, heir if shared else None, min(shared, 128)) == owner
    assert begin(server, 220, owner, min(tokens, 192)) == more
    kernel.seat(server.batch)
    tell_planned(kernel)
    lengths = server.write()
    kernel.step()
    states = check(kernel, server, CASES[2], lengths, positions=False).states
    assert (states[more], states[heir]) == (REFUTED, PLANNED)
    assert states[owner] == (PLANNED if shared == 192 else REFUTED)


def _read_from_heirs(case: Case, seed: int) -> int:
    """Follows a group of requests under one plan; counts requests that were served by reading from an heir."""
    source, (server, kernel) = random.Random(seed), made(case, seed, "triton")
    server.random.random = lambda: 0.6  # type: ignore[method-assign] # the host knows lengths; page ids are possible
    batch = server.batch
    for shared in (0, 160, 120, 80, 40):
        begin(server, 220, source.choice(sorted(server.of_seat)) if shared else None, shared)
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
        if source.random() < 0.6:
            tell_planned(kernel)
        lengths = server.write()
        kernel.step()
        step = check(kernel, server, case, lengths, positions=case.window >= 0)
        common = kernel.program.running[3].tolist()
        planned = [seat for seat, state in enumerate(step.states) if state == PLANNED]
        served += sum(common[owner] > 0 for seat in planned for owner, *_ in made_for.claims_of(seat).tolist())
        served += sum(common[seat] > 0 for seat in planned)
    return served
