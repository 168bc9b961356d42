"""The wrapper by request: page tables stay on the device, plans wait for nothing, and sharing is found."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from support.forests import examples
from support.page_requests import Requests, csr
from support.wrapper_engines import DIM, HEADS, KV_HEADS, PAGE, Engine, LateReader, check, plan, tensors
from treegen import LiveBatch, TreeAttentionWrapper, strategies
from treegen.api import request_batches
from treegen.backends.find_sharing import SharingReader
from treegen.backends.page_buffers import PageBuffers
from treegen.ir.errors import InputError, PerformanceWarning
from treegen.runtime.batch_kernel import BatchKernel
from treegen.strategies import Strategy


def buffers(rows: int, pages: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((count,), 12345, dtype=torch.int32) for count in (rows + 1, pages, rows))


@examples(25)
@given(
    seed=st.integers(0, 2**32 - 1),
    named=st.booleans(),
    late=st.booleans(),
    rows=st.sampled_from((6, 1, 20)),
    page_size=st.sampled_from((4, 1, 16)),
    window_left=st.sampled_from((-1, -1, 7)),
    strategy=st.sampled_from(("auto", "query", strategies.cohort(split=24))),
)
def test_batches_whose_requests_come_and_go(
    seed: int, named: bool, late: bool, rows: int, page_size: int, window_left: int, strategy: Strategy | str
) -> None:
    engine = Engine(seed, rows, 120, page_size)
    wrapper = TreeAttentionWrapper(by_request=True, strategy=strategy)
    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(request_batches, "SharingReader", LateReader)
        patch.setattr(request_batches, "READ_EVERY_UNNAMED", 3)
        for step in range(14):
            engine.step()
            ids = list(engine.batch) if named else None
            plan(wrapper, engine.requests, page_size, request_ids=ids, window_left=window_left)
            for layer in range(2):
                check(wrapper, engine, step + layer, window_left)


@examples(10)
@given(seed=st.integers(0, 2**32 - 1), named=st.booleans(), late=st.booleans())
def test_batches_in_buffers_of_graphs(seed: int, named: bool, late: bool) -> None:
    """Batches of one size, filled up with requests without pages, in the caller's buffers."""
    engine = Engine(seed, 6, 60)
    given_buffers = buffers(6, 200)
    wrapper = TreeAttentionWrapper(None, "NHD", True, False, *given_buffers, by_request=True)
    kernels = set()
    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(request_batches, "SharingReader", LateReader)
        for step in range(10):
            engine.step()
            padded = [*engine.requests, *[([], 0)] * (6 - len(engine.batch))]
            ids = [*engine.batch, *[None] * (6 - len(engine.batch))] if named else None
            plan(wrapper, padded, request_ids=ids)
            for buffer, part in zip(given_buffers, tensors(padded), strict=True):
                assert buffer[: len(part)].tolist() == part.tolist()
            q = torch.randn(6, HEADS, DIM, generator=torch.Generator().manual_seed(step))
            out, lse = wrapper.run_return_lse(q, (engine.cache[0], engine.cache[1]))
            expected = engine.expected(q)
            torch.testing.assert_close(out.double(), expected[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse.double(), expected[1], rtol=1e-4, atol=1e-4)
            kernels.add(id(wrapper.batch_kernel))
    assert len(kernels) == 1
    with pytest.raises(InputError) as caught:
        plan(wrapper, padded[:5])
    assert caught.value.argument == "kv_indptr"


def test_the_launches_of_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, from the search for sharing to attention."""
    for module in ("runtime.batch_kernel", "backends.find_sharing", "api.request_batches"):
        monkeypatch.setattr(f"treegen.{module}.backend_for", lambda device, wanted: "triton")
    engine = Engine(3, 4, 80, 16)
    wrapper = TreeAttentionWrapper(by_request=True)
    for step in range(5):
        engine.step()
        engine.arrive(next(iter(engine.batch), None))
        plan(wrapper, engine.requests, 16, q_data_type="float32", request_ids=list(engine.batch))
        check(wrapper, engine, step)
    assert wrapper.batch_kernel.counters()["planned"] > 0


def shared(tokens: int = 40) -> Engine:
    """Four requests, three of which begin with the same ten pages."""
    engine = Engine(1, 8, 800)
    first = engine.more([], tokens)
    for name in range(3):
        pages = first if not name else engine.more(first, tokens + 5)
        engine.batch[name] = pages, tokens + 5 * (name > 0)
        engine.write(pages, 0, engine.batch[name][1])
    pages = engine.more([], 30)
    engine.write(pages, 0, 30)
    engine.batch[7] = pages, 30
    return engine


def test_what_is_shared_is_found_and_planned_for() -> None:
    engine, wrapper = shared(), TreeAttentionWrapper(by_request=True, strategy="cohort")
    plan(wrapper, engine.requests, request_ids=list(engine.batch))
    check(wrapper, engine)
    assert wrapper.live_batch.shared_tokens[:4].tolist() == [0, 40, 40, 0]
    assert wrapper.live_batch.shared_with[:4].tolist() == [-1, 0, 0, -1]
    counted = wrapper.batch_kernel.counters()
    assert [counted[name] for name in ("planned", "new", "refuted", "outgrown", "invalid")] == [4, 0, 0, 0, 0]
    assert counted["saved_bytes"] > 0
    engine.finish(0)  # the owner: what the others share stays shared, in the same step
    plan(wrapper, engine.requests, request_ids=list(engine.batch))
    check(wrapper, engine)
    assert sorted(wrapper.live_batch.shared_tokens.tolist())[-2:] == [0, 40]
    assert wrapper.batch_kernel.counters()["planned"] == 7
    wrapper_without = TreeAttentionWrapper(by_request=True)
    plan(wrapper_without, engine.requests)
    check(wrapper_without, engine)
    assert wrapper_without.batch_kernel.counters()["planned"] == 3


def test_rows_are_looked_at_every_so_many_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_batches, "SharingReader", LateReader)
    monkeypatch.setattr(LateReader, "started", 0)
    for ids, every in ((True, request_batches.READ_EVERY), (False, request_batches.READ_EVERY_UNNAMED)):
        engine, wrapper = shared(), TreeAttentionWrapper(None, "NHD", True, False, *buffers(4, 400), by_request=True)
        updates: list[int] = []
        update = BatchKernel.update

        def counted(kernel: BatchKernel, batch: LiveBatch) -> None:
            updates.append(len(batch))  # noqa: B023
            update(kernel, batch)  # noqa: B023

        monkeypatch.setattr(BatchKernel, "update", counted)
        LateReader.started = 0
        for step in range(every + 6):
            for name in engine.batch if step % 8 == 0 else []:  # too little for another plan
                engine.grow(name, 1)
            plan(wrapper, engine.requests, request_ids=list(engine.batch) if ids else None)
            if step % 16 == 0:
                check(wrapper, engine)
        monkeypatch.setattr(BatchKernel, "update", update)
        assert LateReader.started == 2
        assert updates == [4]  # the second look shows nothing new
        check(wrapper, engine)


def test_growth_beyond_what_a_plan_has_room_for_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegen.runtime.batch_room.RESERVE", 256)
    engine, wrapper = shared(), TreeAttentionWrapper(None, "NHD", True, False, *buffers(4, 800), by_request=True)
    for step in range(request_batches.READ_EVERY):
        for name in engine.batch:
            engine.grow(name, 5)
        plan(wrapper, engine.requests, request_ids=list(engine.batch))
        if step == 0:  # the first run makes the kernel
            check(wrapper, engine)
    check(wrapper, engine)
    before = wrapper.batch_kernel.counters()
    assert before["outgrown"] > 10
    plan(wrapper, engine.requests, request_ids=list(engine.batch))
    assert wrapper.batch_kernel.counters()["outgrown"] == before["outgrown"]


class Device(torch.Tensor):
    """Stands for a tensor on a device: what brings its values to the host fails."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        assert name not in {"cpu", "item", "tolist", "numpy", "__array__", "__int__", "__index__", "__bool__"}, name
        return super().__torch_function__(func, types, args, kwargs or {})


class NoScalars(TorchDispatchMode):
    """Fails where the value of a tensor is wanted on the host, and counts copies and launches."""

    launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_to_copy"}, name
        self.launches += name not in {"slice", "detach", "alias", "view", "empty", "select"}
        return func(*args, **(kwargs or {}))


def test_plans_bring_nothing_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on the device stands still here: step kernels, and the reader, whose copy nobody waits for."""
    engine, wrapper = shared(), TreeAttentionWrapper(by_request=True)
    plan(wrapper, engine.requests, request_ids=list(engine.batch))
    check(wrapper, engine)
    steps: list[int] = []
    monkeypatch.setattr(BatchKernel, "step", lambda kernel: steps.append(1))
    monkeypatch.setattr(SharingReader, "start", lambda reader, rows: None)
    monkeypatch.setattr(SharingReader, "ready", lambda reader: len(steps) % 3 == 2)
    engine.arrive(7)
    for departure in (None, 0, 7, None):
        if departure is not None:
            engine.finish(departure)
        table = [part.as_subclass(Device) for part in tensors(engine.requests)]
        ids = list(engine.batch)
        if departure is not None:
            monkeypatch.setattr(SharingReader, "ready", lambda reader: False)
        with NoScalars() as mode:
            wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type="float32", request_ids=ids)
        assert mode.launches <= 8
    assert len(steps) == 4


def test_hosts_tables_are_planned_for_on_the_host_and_both_agree() -> None:
    engine = shared()
    wrapper = TreeAttentionWrapper()
    for part in (csr(engine.requests, PAGE), tensors(engine.requests)):
        wrapper.plan(*part, HEADS, KV_HEADS, DIM, PAGE, q_data_type="float32", request_ids=[1, 2, 3, 4])
        check(wrapper, engine)
        assert wrapper.kernel.tree.num_rows == 4
    with pytest.raises(InputError, match="batch_kernel"):
        _ = wrapper.batch_kernel
    by_request = TreeAttentionWrapper(by_request=True)
    by_request.plan(*map(np.array, csr(engine.requests, PAGE)), HEADS, KV_HEADS, DIM, PAGE, q_data_type="float32")
    check(by_request, engine)
    with pytest.raises(InputError, match="batch_kernel"):
        _ = by_request.kernel
    assert "by request" in repr(by_request)


def test_own_buffers_grow() -> None:
    engine, wrapper = Engine(4, 40, 300), TreeAttentionWrapper(by_request=True)
    kernels = []
    for count in (1, 3, 3, 20, 40, 2):
        while len(engine.batch) > count:
            engine.finish(next(iter(engine.batch)))
        while len(engine.batch) < count:
            engine.arrive(next(iter(engine.batch), None))
        for name in engine.batch:
            engine.grow(name, 20)
        plan(wrapper, engine.requests, request_ids=list(engine.batch))
        check(wrapper, engine)
        kernels.append(wrapper.batch_kernel)
    assert kernels[0] is kernels[1] is kernels[2]
    assert kernels[-1] is kernels[-2]
    assert len(set(map(id, kernels))) == 3
    plan(wrapper, [], request_ids=[])
    q = torch.empty(0, HEADS, DIM)
    out, lse = wrapper.run_return_lse(q, (engine.cache[0], engine.cache[1]))
    assert out.shape == q.shape
    assert lse.shape == (0, HEADS)
    plan(wrapper, engine.requests, sm_scale=0.0)
    assert wrapper.run(torch.ones(2, HEADS, DIM), (engine.cache[0], engine.cache[1])).isfinite().all()


def test_page_ids_beyond_a_cache_give_nothing_and_smaller_caches_make_another_kernel() -> None:
    engine, wrapper = shared(), TreeAttentionWrapper(by_request=True)
    made = [*engine.requests, ([10**6, 3], 7)]
    plan(wrapper, made)
    q = torch.randn(5, HEADS, DIM)
    out, lse = wrapper.run_return_lse(q, (engine.cache[0], engine.cache[1]))
    torch.testing.assert_close(out[:4].double(), engine.expected(q)[0][:4], rtol=1e-4, atol=1e-5)
    assert not out[4].any()
    assert (lse[4] == -math.inf).all()
    most = max(page for pages, _ in engine.requests for page in pages) + 1
    smaller = wrapper.run(q, (engine.cache[0, :most], engine.cache[1, :most]))
    assert torch.equal(smaller[:4], out[:4])


def test_larger_caches_make_another_kernel() -> None:
    """A first run with a cache of few pages, to warm up, is no bound for later ones."""
    engine, q = shared(), torch.randn(4, HEADS, DIM)
    few, whole = (engine.cache[0, :1], engine.cache[1, :1]), (engine.cache[0], engine.cache[1])
    wrapper = TreeAttentionWrapper(by_request=True)
    plan(wrapper, engine.requests)
    for cache in (few, whole, few, whole):
        out = wrapper.run(q, cache)
    torch.testing.assert_close(out.double(), engine.expected(q)[0], rtol=1e-4, atol=1e-5)
    captured = TreeAttentionWrapper(None, "NHD", True, False, *buffers(4, 64), by_request=True)
    plan(captured, engine.requests)
    captured.run(q, few)
    with pytest.raises(InputError, match=r"paged_kv_cache = .* is more than the 1 of the first run"):
        captured.run(q, whole)


@pytest.mark.parametrize("first", [True, False])
def test_a_refused_plan_changes_nothing(first: bool) -> None:
    engine, wrapper = shared(), TreeAttentionWrapper(by_request=True)
    plan(wrapper, engine.requests)
    if not first:
        check(wrapper, engine)
    indptr, indices, last = (part.tolist() for part in tensors(engine.requests))
    for refused in (
        ([*indptr[:-1], 1], [1.5] * len(indices), last), ([0, 0, *indptr], indices, ["a"] * (1 + len(last))),
        (indptr, indices, [None] * len(last)),
    ):  # fmt: skip
        with pytest.raises(InputError):
            wrapper.plan(*refused, HEADS, KV_HEADS, DIM, PAGE, q_data_type="float32")
    for options in ({"sm_scale": -1.0}, {"sm_scale": float("nan")}, {"request_ids": 5}):
        with pytest.raises(InputError, match=next(iter(options))):
            plan(wrapper, engine.requests, **options)
    check(wrapper, engine)


def test_requests_longer_than_declared_are_named() -> None:
    engine, wrapper = shared(), TreeAttentionWrapper(by_request=True, max_tokens=50)
    plan(wrapper, engine.requests, request_ids=list(engine.batch))
    check(wrapper, engine)
    engine.grow(7, 30)
    engine.arrive()
    with pytest.raises(InputError, match="row 3 with 60 tokens: is longer than max_tokens = 50"):
        plan(wrapper, engine.requests, request_ids=list(engine.batch))
    engine.finish(7)
    plan(wrapper, engine.requests, request_ids=list(engine.batch))
    check(wrapper, engine)


@pytest.mark.parametrize(
    ("options", "changed", "reason"),
    [
        ({"isolated": True}, {}, "isolated"),
        ({"strategy": "flashforge"}, {}, "no plans by request"),
        ({"strategy": strategies.batch_invariant()}, {}, "no plans by request"),
        ({"strategy": strategies.cohort(merge="final")}, {}, "no plans by request"),
        ({"graph": True, "max_items": 50}, {}, "max_items"),
        ({"graph": True, "dtype": torch.float32}, {}, "int32"),
        ({}, {"page_size": 3}, "power of two"),
        ({}, {"pages": 2**28}, "1 GB"),
    ],
)
def test_what_is_not_served_by_request(
    options: dict[str, Any], changed: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(options)
    arguments: tuple[Any, ...] = ()
    if options.pop("graph", False):
        dtype = options.pop("dtype", torch.int32)
        arguments = (None, "NHD", True, False, *(part.to(dtype) for part in buffers(2, 16)))
    made: Requests = [([1, 2], 6), ([1, 3], 5)]
    page_size = changed.get("page_size", PAGE)
    if "pages" in changed:
        monkeypatch.setattr("treegen.api.request_room.MOST_TABLES", 1 << 8)
        reason = "1 GB"
    with pytest.raises(InputError, match=reason) as caught:
        plan(TreeAttentionWrapper(*arguments, by_request=True, **options), made, page_size)
    assert caught.value.argument == "by_request"
    wrapper = TreeAttentionWrapper(*arguments, **options)
    monkeypatch.setattr(Device, "is_cuda", True, raising=False)
    table = [part.as_subclass(Claimed) for part in tensors(made, page_size)]
    with pytest.warns(PerformanceWarning, match=reason):
        wrapper.plan(*table, HEADS, KV_HEADS, DIM, page_size, q_data_type="float32")
    assert wrapper.kernel.tree.num_rows == 2


class Claimed(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_arguments_that_cannot_be() -> None:
    engine, wrapper = shared(), TreeAttentionWrapper(by_request=True)
    plan(wrapper, engine.requests)
    check(wrapper, engine)
    table = tensors(engine.requests)
    sizes: Any = HEADS, KV_HEADS, DIM, PAGE
    for refused, argument in (
        ((table[0].float(), *table[1:]), "kv_indptr"),
        ((table[0][:0], *table[1:]), "kv_indptr"),
        ((*table[:2], table[2][1:]), "kv_last_page_len"),
        ((table[0], table[1][None], table[2]), "kv_indices"),
        ((table[0], None, table[2]), "kv_indices"),
    ):
        with pytest.raises(InputError) as caught:
            wrapper.plan(*refused, *sizes, q_data_type="float32")
        assert caught.value.argument == argument
    for ids in ([1, 2], [1, 1, 2, 3], [[], [], [], []]):
        with pytest.raises(InputError) as caught:
            wrapper.plan(*table, *sizes, q_data_type="float32", request_ids=ids)
        assert caught.value.argument == "request_ids"
    check(wrapper, engine)
    for rows in (3, 5):
        with pytest.raises(InputError, match="q = "):
            wrapper.run(torch.zeros(rows, HEADS, DIM), (engine.cache[0], engine.cache[1]))
    for options, argument in (({"by_request": 1}, "by_request"), ({"max_tokens": 0}, "max_tokens")):
        with pytest.raises(InputError) as caught:
            TreeAttentionWrapper(**options)  # type: ignore[arg-type]
        assert caught.value.argument == argument


def test_copies_plan_anew() -> None:
    engine = shared()
    for arguments in ((), (None, "NHD", True, False, *buffers(4, 64))):
        wrapper = TreeAttentionWrapper(*arguments, by_request=True)  # type: ignore[arg-type]
        plan(wrapper, engine.requests)
        check(wrapper, engine)
        for made in (copy.copy(wrapper), copy.deepcopy(wrapper)):
            with pytest.raises(InputError, match="no plan"):
                made.run(torch.zeros(4, HEADS, DIM), (engine.cache[0], engine.cache[1]))
            plan(made, engine.requests[::-1])
            check(wrapper, engine)
            out = made.run(torch.ones(4, HEADS, DIM), (engine.cache[0], engine.cache[1]))
            expected = engine.expected(torch.ones(4, HEADS, DIM))[0].flip(0)
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
            assert made.batch_kernel is not wrapper.batch_kernel


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_page_tables_are_taken_with_their_lengths(backend: str, dtype: torch.dtype) -> None:
    source = random.Random(3)
    made: Requests = [
        ([*range(count)], count * PAGE - source.randrange(PAGE) * (count > 0)) for count in (3, 0, 700, 1, 2000, 0)
    ]
    for part in (made, made[:1], []):
        own = PageBuffers.of(8, 4096, torch.device("cpu"))
        table = [values.to(dtype) for values in tensors(part)]
        own.take(*table, PAGE, backend)
        for buffer, values in zip(own, table, strict=False):
            assert buffer[: len(values)].tolist() == values.tolist()
            assert not buffer[len(values) :].any()
        assert own.seq_lens.tolist() == [tokens for _, tokens in part] + [0] * (8 - len(part))
        if part:
            own.take(own.indptr[: len(part) + 1], own.indices, own.last_page_len[: len(part)], PAGE, backend)
        assert own.seq_lens.tolist() == [tokens for _, tokens in part] + [0] * (8 - len(part))


def test_ids_of_the_last_plan_are_counted_too() -> None:
    wrapper, sizes = TreeAttentionWrapper(by_request=True), (HEADS, KV_HEADS, DIM, PAGE)
    given = {"q_data_type": torch.float32, "request_ids": ["a", "b"]}
    wrapper.plan([0, 2, 4], [3, 1, 3, 8], [4, 3], *sizes, **given)
    with pytest.raises(InputError, match="request_ids = 2 ids: does not match 3 requests"):
        wrapper.plan([0, 2, 4, 5], [3, 1, 3, 8, 2], [4, 3, 1], *sizes, **given)


@pytest.mark.parametrize(("q", "out", "text"), [
    (torch.zeros(0, 7, 99), None, "head_dim"), (torch.zeros(0, 6, DIM), None, "num_qo_heads 6"),
    (torch.zeros(0, HEADS, DIM, dtype=torch.float16), None, "is not of q's type"),
    (torch.zeros(0, HEADS, DIM), torch.zeros(5, 3), "out = "),
])  # fmt: skip
def test_tensors_of_an_empty_batch(q: torch.Tensor, out: torch.Tensor | None, text: str) -> None:
    """They are checked as those of any other batch."""
    wrapper, cache = TreeAttentionWrapper(by_request=True), torch.zeros(9, 2, PAGE, KV_HEADS, DIM)
    wrapper.plan([0], [], [], HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32)
    with pytest.raises(InputError, match=text):
        wrapper.run(q, cache, out=out)
    assert wrapper.run(torch.zeros(0, HEADS, DIM), cache).shape == (0, HEADS, DIM)
