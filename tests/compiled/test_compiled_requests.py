"""Whom a plan serves while requests come, end, move and fork: in C against Python."""

from __future__ import annotations

import random
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.compilers import needs_compiler
from support.forests import examples
from support.random_batches import change, random_batch
from treegen import LiveBatch, Shape
from treegen.compiled.batch_tables import LoweredPlan
from treegen.cost.token_rates import TokenRates
from treegen.ir.positions import windowed_requests
from treegen.ir.request_schedule import SharedChunks
from treegen.runtime.batch_room import batch_config
from treegen.runtime.compiled_requests import CompiledRequests
from treegen.runtime.lateness import AloneTime, LateRequests
from treegen.schedule.by_request import ItemRoom
from treegen.schedule.query_runs import lower_requests
from treegen.strategies import query
from treegen.target.problem import Problem
from treegen.target.targets import target_from

TARGET = target_from("h200")


def planned(batch: LiveBatch, shape: Shape, reserve: int, window: int, *, in_chunks: bool) -> LoweredPlan:
    """A plan for the batch. window: what its plan asks of the lengths of requests follows from it; -1 for no window."""
    tree, config = batch.tree(), batch_config(shape, TARGET)
    if window >= 0 and len(batch):
        tree = windowed_requests(tree, window, max(config.tokens, shape.page_size))
    problem = Problem(tree, shape, TARGET)
    plan = query().plan(problem)
    made = lower_requests(plan, problem, ItemRoom(config, shape.page_size, reserve))
    return LoweredPlan(
        plan, lambda: replace(made, chunks=SharedChunks(*np.zeros((3, 1), np.int32))) if in_chunks else made
    )


def give_rows(source: random.Random, batch: LiveBatch) -> None:
    """Gives some requests several query rows."""
    for seat in batch.seats.tolist():
        batch.set_rows(seat, source.choice([1, 1, 1, 2, 5]))


def change_lengths(source: random.Random, batch: LiveBatch) -> None:
    """Makes some requests longer, or shorter by what they share with nobody."""
    for seat in source.sample(batch.seats.tolist(), min(len(batch), 3)):
        own = max(int(batch.shared_tokens[seat]), *batch.shared_tokens[batch.shared_with == seat].tolist(), 0)
        longer = int(batch.tokens[seat]) + source.choice([1, 30, 300, 5000])
        batch.set_tokens(seat, source.choice([longer, source.randint(own, longer)]))


@needs_compiler
@given(st.integers(0, 2**32))
@examples(300)
def test_the_plan_serves_the_same_requests(seed: int) -> None:
    source = random.Random(seed)
    batch = random_batch(source)
    if not len(batch):
        batch.add(100)
    shape = Shape(*source.choice([(8, 1, 64), (32, 8, 128)]), page_size=batch.page_size)
    if source.random() < 0.3:
        give_rows(source, batch)
    window = source.choice([-1, -1, 64])
    made = planned(batch, shape, source.choice([64, 4000]), window, in_chunks=source.random() < 0.1)
    then = copy(batch)
    rates = TokenRates.of(batch_config(shape, TARGET), shape, TARGET, window)
    time = AloneTime(
        source.choice([0.0, 5.0]), source.choice([1, 7, 264]), source.choice([1, 128]), rates.lone_token_us
    )
    ours, theirs = CompiledRequests(made, then, rates, time), LateRequests(made.schedule, then, rates, time)
    for _ in range(source.choice([3, 30])):
        for _ in range(source.choice([0, 1, 1, 1, 4])):
            change(source, batch)
        if source.random() < 0.05:
            give_rows(source, batch)
        inherits = source.random() < 0.8
        found, known = (r.inherit(batch) if inherits else r.served(batch) for r in (ours, theirs))
        assert (found.same.tolist(), found.others.tolist(), found.worse) == (
            known.same.tolist(), known.others.tolist(), known.worse,
        )  # fmt: skip
        assert ours.running(batch, found).tolist() == theirs.running(batch, known).tolist()
        assert ours.most_late_us(batch, found) == pytest.approx(theirs.most_late_us(batch, known), rel=1e-12)
        assert ours.late_facts(batch, found) == theirs.late_facts(batch, known)
        assert found.planned.tolist() == known.planned.tolist()
        for _ in range(source.choice([1, 3])):  # lengths may change before the next call
            if len(batch.row) == len(then.row):
                grown, expected = ours.growth(batch, found), theirs.growth(batch, known)
                assert (grown.misfits, max(grown.most, 0)) == (expected.misfits, max(expected.most, 0))
                assert grown.outgrows(len(batch)) == expected.outgrows(len(batch))
            change_lengths(source, batch)
