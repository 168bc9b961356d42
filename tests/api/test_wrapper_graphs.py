"""The wrapper in CUDA-graph mode: one kernel of fixed capacity for every batch that fits the buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples
from support.page_requests import Requests, csr, requests
from support.wrapper_calls import DIM, HEADS, KV_HEADS, POOL, check, pages, queries
from treegen import strategies
from treegen.api.wrapper import TreeAttentionWrapper
from treegen.backends.triton_program import TritonProgram
from treegen.ir.errors import InputError
from treegen.runtime.limits import PageBounds
from treegen.strategies import Strategy, cohort

BOUNDED: tuple[Strategy | str, ...] = (
    "auto", "query", cohort(), cohort(head_rows=4), cohort(head_rows=16, tile=(16, 16)),
    cohort(head_rows=32, tile=(16, 32), split=24), cohort(split=16), cohort(split_shared_rows=2),
    cohort(split_shared_rows=3, split=7),
    cohort(split_shared_rows=2, merge="final"), strategies.query(split=20),
)  # fmt: skip
"""Strategies whose plans of all page tables that fit the buffers fit the capacity."""


def graphed(count: int, most_pages: int, strategy: Strategy | str, **options: Any) -> TreeAttentionWrapper:
    """A wrapper with buffers for so many requests and pages."""
    buffers = torch.empty(count + 1), torch.empty(most_pages), torch.empty(count)
    return TreeAttentionWrapper(None, "NHD", True, False, *buffers, strategy=strategy, **options)


def plan(wrapper: TreeAttentionWrapper, made: Requests, page_size: int, **options: Any) -> None:
    wrapper.plan(*csr(made, page_size), HEADS, KV_HEADS, DIM, page_size, **({"q_data_type": "float32"} | options))


def batches(seed: int, steps: int, count: int, page_size: int, longest: int, sharing: float) -> list[Requests]:
    """Batches of as many requests, the first a dummy as engines capture graphs with."""
    made = [requests(seed + step, count, page_size, longest, sharing, POOL) for step in range(steps)]
    return [[([0], 1)] * count, *made]


def total(made: Requests) -> int:
    return sum(len(listed) for listed, _ in made)


@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from((5, 1, 2, 12, 40)),
    page_size=st.sampled_from((16, 1, 3, 64)),
    longest=st.sampled_from((4, 1, 12)),
    sharing=st.sampled_from((0.8, 0.0, 1.0)),
    dummy=st.booleans(),
    strategy=st.sampled_from(BOUNDED),
)
def test_every_batch_that_fits_the_buffers_is_served_as_by_a_wrapper_of_its_own(
    seed: int, count: int, page_size: int, longest: int, sharing: float, dummy: bool, strategy: Strategy | str
) -> None:
    made = batches(seed, 4, count, page_size, longest, sharing)[not dummy :]
    wrapper = graphed(count, max(map(total, made)), strategy)
    plan(wrapper, made[0], page_size)
    kernel, capacity = wrapper.kernel, wrapper.kernel.capacity
    assert capacity is not None
    assert capacity.max_rows == count
    k, v = pages(page_size, seed)
    bounds = PageBounds(count, max(map(total, made)), page_size)
    for batch in made:
        plan(wrapper, batch, page_size)
        size = kernel.schedule.size
        tiles, blocks = bounds.entries(kernel.schedule.configs, capacity.max_items)
        assert size.tiles <= tiles
        assert size.packed_runs <= blocks
        assert wrapper.kernel is kernel
        assert wrapper.kernel.capacity is capacity
        q = queries(batch, seed)
        out, lse = wrapper.run_return_lse(q, (k, v))
        check(batch, page_size, q, k, v, out, lse)
        if strategy != "auto":  # which chooses once here
            alone = TreeAttentionWrapper(strategy=strategy)
            plan(alone, batch, page_size)
            assert torch.allclose(out, alone.run(q, (k, v)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy", [cohort(), pytest.param(cohort(split_shared_rows=2, split=32), marks=pytest.mark.full)], ids=str
)
def test_launches_find_the_latest_batch_where_the_first_one_was(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the interpreter: the tables stay where a captured graph reads them."""
    for module in ("prepared_calls", "call_options"):
        monkeypatch.setattr(f"treegen.runtime.{module}.backend_for", lambda device, wanted: "triton")
    made = batches(3, 3, 6, 16, 4, 0.8)
    wrapper = graphed(6, max(map(total, made)), strategy)
    k, v = pages(16)
    places = set()
    for batch in made:
        plan(wrapper, batch, 16)
        q = queries(batch)
        check(batch, 16, q, k, v, *wrapper.run_return_lse(q, (k, v)))
        ((_, program),) = wrapper.kernel.calls.prepared.programs.items()
        assert isinstance(program, TritonProgram)
        places.add((program.tables.table.data_ptr(), len(program.tables.table)))
    assert len(places) == 1


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    made: Requests = [([1, 2], 20), ([1, 3], 32), ([], 0)]
    wrapper = graphed(3, 5, "query")
    plan(wrapper, made, 16)
    (k, v), q = pages(16), queries(made)
    before = wrapper.run(q, (k, v))
    refused: tuple[tuple[Requests, dict[str, Any], str], ...] = (
        (made[:2], {}, "kv_indptr"),
        ([*made, ([4], 3)], {}, "kv_indptr"),
        ([([1, 2, 3], 48), ([4, 5, 6], 40), ([], 0)], {}, "kv_indices"),
        (made, {"sm_scale": 0.5}, "shape, sm_scale, scores"),
    )
    for batch, options, argument in refused:
        with pytest.raises(InputError) as caught:
            plan(wrapper, batch, 16, **options)
        assert caught.value.argument == argument
    assert torch.equal(wrapper.run(q, (k, v)), before)
    exact = TreeAttentionWrapper(None, "NHD", strategy="query")
    plan(exact, made, 16)
    assert torch.equal(exact.run(q, (k, v)), before)


def test_limits_may_be_declared() -> None:
    wrapper = graphed(4, 64, cohort(split=16), max_items=9, max_slots=30)
    plan(wrapper, [([0], 1)] * 4, 16)
    capacity = wrapper.kernel.capacity
    assert capacity is not None
    assert (capacity.max_rows, capacity.max_items, capacity.max_slots) == (4, 9, 30)
    with pytest.raises(InputError, match="max_items"):
        plan(wrapper, [([*range(16 * row, 16 * row + 16)], 256) for row in range(4)], 16)


@pytest.mark.parametrize(
    ("sizes", "argument"),
    [
        ((None, 5, 3), "paged_kv_indptr_buffer"),
        ((4, None, 3), "paged_kv_indices_buffer"),
        ((4, 5, None), "paged_kv_last_page_len_buffer"),
        ((3, 5, 3), "paged_kv_indptr_buffer"),
        ((1, 5, 0), "paged_kv_last_page_len_buffer"),
    ],
)
def test_buffers_that_do_not_go_together_are_refused(sizes: tuple[int | None, ...], argument: str) -> None:
    buffers = [None if size is None else torch.empty(size, dtype=torch.int32) for size in sizes]
    with pytest.raises(InputError) as caught:
        TreeAttentionWrapper(None, "NHD", True, False, *buffers)
    assert caught.value.argument == argument
