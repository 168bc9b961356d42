"""Plans and calls of wrappers that somebody stops in the middle, at any line: the next plan is right."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples
from support.page_requests import Requests, csr, requests
from support.stops import interrupted_at
from support.wrapper_calls import DIM, HEADS, KV_HEADS, POOL, pages, queries
from support.wrapper_calls import check as check_rows
from support.wrapper_engines import PAGE, Engine, LateReader, check, plan
from treegen import TreeAttentionWrapper
from treegen.api import request_batches
from treegen.backends.page_buffers import PageBuffers
from treegen.ir.errors import InputError


def any_line(source: random.Random, most: int) -> int:
    """A line to stop at; mostly an early one, sometimes none."""
    return source.choice([0, source.randint(1, most // 5), source.randint(1, most)])


@examples(25)
@given(seed=st.integers(0, 2**16), named=st.booleans(), late=st.booleans())
def test_batches_by_request(seed: int, named: bool, late: bool) -> None:
    engine, source, wrapper = Engine(seed, 6, 120), random.Random(seed), TreeAttentionWrapper(by_request=True)
    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(request_batches, "SharingReader", LateReader)
        patch.setattr(request_batches, "READ_EVERY_UNNAMED", 3)
        for step in range(10):
            engine.step()
            ids = list(engine.batch) if named else None

            def work(ids: list[int] | None = ids) -> None:
                plan(wrapper, engine.requests, request_ids=ids)

            interrupted_at(any_line(source, 3000), work)
            work()
            interrupted_at(any_line(source, 1500), lambda step=step: check(wrapper, engine, step))
            check(wrapper, engine, step)


def test_a_stopped_plan_is_no_plan() -> None:
    engine, wrapper = Engine(0, 6, 120), TreeAttentionWrapper(by_request=True)
    for _ in range(3):
        engine.step()
    plan(wrapper, engine.requests)
    check(wrapper, engine)

    def stopped(*given: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageBuffers, "take", stopped)
        with pytest.raises(KeyboardInterrupt):
            plan(wrapper, engine.requests)
    with pytest.raises(InputError, match="run = no plan: the last plan was stopped in the middle; call plan"):
        check(wrapper, engine)
    plan(wrapper, engine.requests)
    check(wrapper, engine)


@examples(15)
@given(seed=st.integers(0, 2**16), strategy=st.sampled_from(("auto", "query", "fasttree")))
def test_batches_by_slot_are_those_before_or_the_next_ones(seed: int, strategy: str) -> None:
    source, wrapper = random.Random(seed), TreeAttentionWrapper(strategy=strategy, by_request=False)
    k, v = pages(PAGE, seed)

    def serve(made: Requests) -> None:
        q = queries(made)
        check_rows(made, PAGE, q, k, v, *wrapper.run_return_lse(q, (k, v)))

    made = [requests(seed + step, 5, PAGE, 6, 0.8, POOL) for step in range(5)]
    for before, batch in zip([None, *made], made, strict=False):

        def work(batch: Requests = batch) -> None:
            wrapper.plan(*csr(batch, PAGE), HEADS, KV_HEADS, DIM, PAGE, q_data_type="float32")

        if interrupted_at(any_line(source, 4000), work) and before is not None:
            try:
                serve(before)
            except AssertionError:
                serve(batch)
        work()
        serve(batch)
