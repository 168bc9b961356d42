"""Errors of kernels for batches that live: one clear line, before anything is launched or changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import treegen
from support.batch_loops import small
from treegen import LiveBatch, PageTable, Shape, strategies
from treegen.ir.errors import BackendError, InputError, PlanError, ShapeError, StrategyError, TreeError, TreegenError
from treegen.ir.plan import Plan
from treegen.runtime.batch_kernel import BatchKernel
from treegen.strategies import Strategy
from treegen.target.problem import Problem

SHAPE = Shape(4, 2, 16, dtype="fp32", page_size=16)
TINY = replace(small(), shared_bytes=1 << 14)
Q, CACHE = torch.randn(4, 4, 16), torch.randn(32, 16, 2, 16)


def ints(*sizes: int) -> torch.Tensor:
    """Zeros in int32."""
    return torch.zeros(*sizes, dtype=torch.int32)


def pages(**given: Any) -> PageTable:
    """A page table of four rows."""
    return PageTable(**{"table": ints(4, 8), "seq_lens": ints(4), "num_pages": 32, **given})


def several() -> PageTable:
    """A page table of four rows whose requests may have several query rows."""
    return pages(qo_indptr=ints(5))


def kernel(shape: Any = SHAPE, table: Any = None, backend: str | None = "torch", **given: Any) -> BatchKernel:
    """A kernel for four rows."""
    made = pages() if table is None else table
    return treegen.compile_batch(shape, made, backend=backend, **{"max_tokens": 128, **given})


def check_line(error: TreegenError, *parts: str) -> None:
    """The message is one line, with these parts."""
    text = str(error)
    assert "\n" not in text
    assert len(text) < 250
    for part in parts:
        assert part in text, text


TABLES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no table": ({"table": None}, ("table", "is not a tensor")),
    "an array": ({"table": np.zeros((4, 8), np.int32)}, ("table = ndarray", "int32 tensor")),
    "int64": ({"table": ints(4, 8).long()}, ("table", "is not int32")),
    "lengths in int64": ({"seq_lens": ints(4).long()}, ("seq_lens", "is not int32")),
    "one dimension": ({"table": ints(32)}, ("table", "[entries] with indptr")),
    "two with indptr": ({"indptr": ints(5)}, ("table", "2 dimensions")),
    "lengths in a column": ({"seq_lens": ints(4, 1)}, ("seq_lens", "give [batch]")),
    "every other entry": ({"table": ints(4, 16)[:, ::2]}, ("table", "is not contiguous")),
    "too few rows": ({"table": ints(3, 8)}, ("table = 3 rows", "4 lengths")),
    "no rows": ({"seq_lens": ints(0), "table": ints(0, 8)}, ("seq_lens = 0 entries",)),
    "table_rows too short": ({"table_rows": ints(3)}, ("table_rows = 3 entries", "give 4")),
    "indptr too short": ({"table": ints(32), "indptr": ints(4)}, ("indptr = 4 entries", "give 5")),
    "query rows in int64": ({"qo_indptr": ints(5).long()}, ("qo_indptr", "is not int32")),
    "qo_indptr too short": ({"qo_indptr": ints(4)}, ("qo_indptr = 4 entries", "give 5")),
    "qo_indptr in a column": ({"qo_indptr": ints(5, 1)}, ("qo_indptr", "[batch + 1]")),
    "two forms": ({"table": ints(32), "indptr": ints(5), "table_rows": ints(4)}, ("table_rows", "indptr")),
    "no pages": ({"num_pages": 0}, ("num_pages = 0",)),
    "pages as a float": ({"num_pages": 32.0}, ("num_pages = 32.0",)),
    "meta tensors": ({"table": ints(4, 8).to("meta"), "seq_lens": ints(4).to("meta")}, ("table", "no values")),
    "two devices": ({"seq_lens": ints(4).to("meta")}, ("seq_lens", "meta")),
}


@pytest.mark.parametrize("name", TABLES)
def test_page_tables(name: str) -> None:
    given, parts = TABLES[name]
    with pytest.raises(InputError) as raised:
        pages(**given)
    check_line(raised.value, *parts)


ARGUMENTS: dict[str, tuple[Callable[[], object], type[TreegenError], tuple[str, ...]]] = {
    "no shape": (lambda: kernel((4, 2, 16)), InputError, ("shape", "is not a Shape")),
    "pages of 24": (lambda: kernel(Shape(4, 2, 16, page_size=24)), InputError, ("page_size = 24", "power of two")),
    "pages of 256": (lambda: kernel(Shape(4, 2, 16, page_size=256)), InputError, ("page_size = 256", "up to 128")),
    "no page table": (lambda: kernel(table=ints(4, 8)), InputError, ("pages = Tensor", "PageTable")),
    "too many slots": (lambda: kernel(table=pages(num_pages=1 << 28)), InputError, ("num_pages", "2^31")),
    "no tokens": (lambda: kernel(max_tokens=0), InputError, ("max_tokens = 0",)),
    "tokens as a bool": (lambda: kernel(max_tokens=True), InputError, ("max_tokens = True",)),
    "rows without qo_indptr": (lambda: kernel(max_rows=8), InputError, ("max_rows = 8", "qo_indptr")),
    "no query rows": (lambda: kernel(table=several(), max_rows=0), InputError, ("max_rows = 0",)),
    "query rows as a float": (lambda: kernel(table=several(), max_rows=8.0), InputError, ("max_rows = 8.0",)),
    "too large tables": (lambda: kernel(max_tokens=(1 << 30) - 1), InputError, ("max_tokens", "8 GiB", "4 rows")),
    "scale": (lambda: kernel(sm_scale=float("nan")), InputError, ("sm_scale = nan",)),
    "negative scale": (lambda: kernel(sm_scale=-1.0), InputError, ("sm_scale = -1.0",)),
    "window": (lambda: kernel(window_left=-2), InputError, ("window_left = -2",)),
    "soft cap": (lambda: kernel(logits_soft_cap=-1.0), InputError, ("logits_soft_cap",)),
    "slopes": (lambda: kernel(alibi_slopes=torch.ones(3)), InputError, ("alibi_slopes", "4 query heads")),
    "sinks": (lambda: kernel(sinks=torch.ones(3)), InputError, ("sinks",)),
    "k_scale": (lambda: kernel(k_scale=0.0), InputError, ("k_scale",)),
    "strategy": (lambda: kernel(strategy="fastest"), StrategyError, ("strategy = fastest", "is not registered")),
    "backend": (lambda: kernel(backend="cuda"), BackendError, ("backend = cuda", "is unknown")),
    "target": (lambda: kernel(target="h2"), BackendError, ("target = h2",)),
    "batch-invariant in blocks": (
        lambda: kernel(strategy=treegen.strategies.batch_invariant(block=16)),
        StrategyError,
        ("batch-invariant", "trees by slot", "batch_invariant(chunk=...)"),
    ),
    "batch-invariant, of several rows": (
        lambda: kernel(table=several(), batch_invariant=True),
        InputError,
        ("pages.qo_indptr", "batch-invariant mode does not serve"),
    ),
    "batch-invariant cohorts": (
        lambda: kernel(strategy="cohort", batch_invariant=True),
        StrategyError,
        ("cohort", "divides rows' work"),
    ),
    "batch-invariant in words": (lambda: kernel(batch_invariant="yes"), InputError, ("batch_invariant = yes",)),
    "a large head": (
        lambda: kernel(Shape(4, 2, 576, 512, dtype="fp32", page_size=16), target=TINY),
        ShapeError,
        ("head_dim = 576", "shared memory"),
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_compile_batch(name: str) -> None:
    make, kind, parts = ARGUMENTS[name]
    with pytest.raises(kind) as raised:
        make()
    check_line(raised.value, *parts)


def batch_of(tokens: list[int], rows: list[int] | None = None, page_size: int = 16) -> LiveBatch:
    """A batch of requests that share nothing."""
    batch = LiveBatch(page_size)
    for number, length in enumerate(tokens):
        batch.add(length, row=None if rows is None else rows[number])
    return batch


BATCHES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "nothing": (lambda: None, ("batch = NoneType", "LiveBatch")),
    "a tree": (lambda: treegen.Tree.from_levels([1], [3]), ("batch = Tree", "LiveBatch")),
    "other pages": (lambda: batch_of([3], page_size=8), ("batch.page_size = 8", "16")),
    "too many requests": (lambda: batch_of([3] * 5), ("batch = 5 requests", "4 lengths")),
    "a row beyond": (lambda: batch_of([3], [4]), ("row 4", "4 lengths")),
}


def left_as_it_was(served: BatchKernel, act: Callable[[], object], kind: type[TreegenError]) -> TreegenError:
    """Raises within `act`; afterwards the kernel has its plan, and gives the same as before."""
    served.step()
    plan, choice, before = served.plan, served.choice, served(Q, CACHE, CACHE, out=torch.zeros_like(Q))
    with pytest.raises(kind) as raised:
        act()
    served.step()
    assert served.plan is plan
    assert served.choice is choice
    assert torch.equal(served(Q, CACHE, CACHE, out=torch.zeros_like(Q)), before)  # type: ignore[arg-type]
    return raised.value


def served_kernel(backend: str, **given: Any) -> BatchKernel:
    """A kernel that serves two requests."""
    table = pages(table=torch.arange(32, dtype=torch.int32).view(4, 8))
    table.seq_lens[:2] = torch.tensor([20, 30])
    made = kernel(table=table, backend=backend, target=small(), **given)
    made.update(batch_of([20, 30]))
    return made


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("method", ["update", "seat"])
def test_batches(backend: str, method: str) -> None:
    served = served_kernel(backend)
    for give, parts in BATCHES.values():
        check_line(left_as_it_was(served, lambda give=give: getattr(served, method)(give()), InputError), *parts)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_batches_beyond_max_tokens(backend: str) -> None:
    served = served_kernel(backend)
    error = left_as_it_was(served, lambda: served.update(batch_of([1 << 20] * 4)), PlanError)
    check_line(error, "batch = ", "raise max_tokens")


def test_strategies_whose_plans_need_other_kernels() -> None:
    for strategy in ("medusa", "specinfer", "cascade", "flashforge"):
        with pytest.raises(StrategyError) as raised:
            kernel(strategy=strategy)
        check_line(raised.value, strategy, "query or cohort")


def test_strategies_are_asked_first_for_a_batch_that_they_know() -> None:
    """One names nodes of its tree, and one is a user's."""

    class Own(Strategy):
        name = "own"

        def plan(self, problem: Problem, on_pass: Any = None) -> Plan:
            assert problem.tree.requests is not None
            assert len(problem.tree.requests.seat) == 2, "plans for two requests"
            return strategies.query().plan(problem)

    for strategy in (strategies.cohort(cut_nodes=(1,)), Own()):
        served = kernel(strategy=strategy)
        batch = LiveBatch(page_size=16)
        first = batch.add(60)
        batch.add(60, first, 32)
        served.update(batch)
        assert served.plan is not None


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = {
    "no q": ((None, CACHE, CACHE), {}, ("q = NoneType", "is not a tensor")),
    "q of one dimension": ((Q[0, 0], CACHE, CACHE), {}, ("q", "1 dimensions")),
    "no cache": ((Q, None, CACHE), {}, ("k_cache = NoneType",)),
    "fewer rows": ((Q[:1], CACHE, CACHE), {}, ("q = 1 rows", "the batch's 2")),
    "more rows": ((torch.cat([Q, Q]), CACHE, CACHE), {}, ("q = 8 rows", "4 lengths")),
    "fewer heads": ((Q[:, :2], CACHE, CACHE), {}, ("num_qo_heads 2", "num_qo_heads 4")),
    "q in fp16": ((Q.half(), CACHE, CACHE), {}, ("k_cache", "float16")),
    "all in fp16": ((Q.half(), CACHE.half(), CACHE.half()), {}, ("dtype fp16", "dtype fp32")),
    "pages of 8": ((Q, CACHE[:, :8], CACHE[:, :8]), {}, ("page_size 8", "page_size 16")),
    "a small cache": ((Q, CACHE[:31], CACHE[:31]), {}, ("k_cache = 31 pages", "32")),
    "unequal caches": ((Q, CACHE, CACHE[:31]), {}, ("v_cache", "k_cache's")),
    "a strided cache": ((Q, CACHE.repeat(1, 1, 1, 2)[..., ::2], CACHE), {}, ("k_cache", "contiguous")),
    "meta tensors": ((Q.to("meta"), CACHE.to("meta"), CACHE.to("meta")), {}, ("q = a meta tensor",)),
    "gradients": ((Q.clone().requires_grad_(), CACHE, CACHE), {}, ("q", "gradients")),
    "out of two rows": ((Q, CACHE, CACHE), {"out": Q[:2]}, ("out = (2, 4, 16)", "(4, 4, 16)")),
    "out in fp16": ((Q, CACHE, CACHE), {"out": Q.half()}, ("out", "float16")),
    "out that is expanded": ((Q, CACHE, CACHE), {"out": torch.zeros(1, 4, 16).expand(4, 4, 16)}, ("out", "share")),
    "out is no tensor": ((Q, CACHE, CACHE), {"out": 3}, ("out = int",)),
    "another base": ((Q, CACHE, CACHE), {"lse_base": "e"}, ("lse_base = e", "ln, log2")),
    "a list of bases": ((Q, CACHE, CACHE), {"lse_base": ["ln"]}, ("lse_base", "ln, log2")),
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_calls(backend: str) -> None:
    served = served_kernel(backend)

    def call_wrongly() -> None:
        for arguments, given, parts in CALLS.values():
            with pytest.raises(InputError) as raised:
                served(*arguments, **given)
            check_line(raised.value, *parts)
        raise raised.value

    left_as_it_was(served, call_wrongly, InputError)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_query_rows(backend: str) -> None:
    """More than the kernel has room for, of tables that do not say where they are, or than q has."""
    batch = batch_of([20, 30])
    batch.set_rows(1, 5)
    served = served_kernel(backend)
    check_line(left_as_it_was(served, lambda: served.update(batch), InputError), "batch.rows[1] = 5", "qo_indptr")
    made = kernel(table=several(), max_rows=6, backend=backend, target=small())
    made.update(batch)
    made.step()
    rows = torch.randn(7, 4, 16)
    for q, parts in ((rows[:5], ("q = 5 rows", "the batch's 6")), (rows, ("q = 7 rows", "max_rows, 6"))):
        with pytest.raises(InputError) as raised:
            made(q, CACHE, CACHE)
        check_line(raised.value, *parts)
    batch.set_rows(0, 2)
    with pytest.raises(InputError) as raised:
        made.update(batch)
    check_line(raised.value, "max_rows, 6", "7")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_impossible_query_rows(backend: str) -> None:
    """Of a request whose rows are not among those of q nothing is written; others are right."""
    table = pages(table=torch.arange(32, dtype=torch.int32).view(4, 8), qo_indptr=ints(5))
    table.seq_lens[:2] = torch.tensor([20, 30])
    made = kernel(table=table, max_rows=6, backend=backend, target=small())
    batch = batch_of([20, 30])
    batch.set_rows(1, 3)
    made.update(batch)
    q = torch.randn(6, 4, 16)
    for begin, middle, end in ((0, 1, 4), (0, 1, 7), (0, 1, 0), (0, 1, 2**31 - 1), (0, 1, -(2**31)), (-1, 1, 4)):
        assert table.qo_indptr is not None
        table.qo_indptr[:3] = torch.tensor([begin, middle, end])
        made.step()
        out = torch.full_like(q, 777.0)
        made(q, CACHE, CACHE, out=out)
        written = (out != 777.0).flatten(1).all(1).tolist()
        possible = (begin == 0, end == 4)
        assert written == [possible[0], *[possible[1]] * 3, False, False]
        assert not possible[0] or torch.allclose(out[0], attention(q[0], 0, 20), atol=1e-5)
        for row in range(3 * possible[1]):
            assert torch.allclose(out[1 + row], attention(q[1 + row], 1, 28 + row), atol=1e-5)
    assert made.counters()["invalid"] == 5


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_impossible_pages_of_a_request_without_query_rows(backend: str) -> None:
    """What stands for such a page reaches no row of those that the plan reads together with it."""
    table = pages(table=torch.arange(32, dtype=torch.int32).view(4, 8), qo_indptr=ints(5))
    table.seq_lens[:2] = torch.tensor([20, 30])
    strategy = treegen.strategies.cohort(64)
    made = kernel(table=table, max_rows=6, strategy=strategy, backend=backend, target=small())
    batch = batch_of([20, 30])
    batch.set_rows(1, 3)
    made.update(batch)
    assert table.qo_indptr is not None
    table.qo_indptr[1:] = 1
    table.table[1, 0] = 99
    cache, q = CACHE.clone(), torch.randn(4, 4, 16)
    cache[-1] = float("nan")
    made.step()
    out = made(q, cache, cache)
    assert torch.allclose(out[0], attention(q[0], 0, 20), atol=1e-5)  # type: ignore[index]
    assert made.counters()["invalid"] == 1


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_requests_beyond_a_ragged_table(backend: str) -> None:
    """They are invalid, whatever the table's memory goes on with; others are right."""
    memory = torch.arange(48, dtype=torch.int32) % 32  # the table is a part of it
    indptr = torch.tensor([0, 8, 16, 24, 32], dtype=torch.int32)
    table = pages(table=memory[8:40], indptr=indptr)
    table.seq_lens[:2] = torch.tensor([20, 30])
    made = kernel(table=table, backend=backend, target=small())
    batch = batch_of([20, 30])
    batch.share(1, 0, 16)
    made.update(batch)
    q = torch.randn(4, 4, 16)
    for begin, end in ((-8, 2), (30, 34), (33, 40), (12, 9), (12, -5), (-(2**31), 2**31 - 1), (2**31 - 2, 2**31 - 1)):
        indptr[1:3] = torch.tensor([begin, end])
        made.step()
        out, lse = made(q, CACHE, CACHE, return_lse=True)
        assert not out[1].any()
        assert (lse[1] == -torch.inf).all()
        if 2 <= begin <= 32:
            assert torch.allclose(out[0], attention(q[0], 1, 20), atol=1e-5)
    assert made.counters()["invalid"] >= 7


def attention(q: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """A query row over the first `length` tokens of a row of the batch, whose pages are in order."""
    keys = CACHE[8 * row : 8 * row + 8].flatten(0, 1)[:length].repeat_interleave(2, 1)
    weights = torch.einsum("hd,thd->ht", q, keys * 16**-0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, keys)


def test_a_call_of_shared_kv_needs_one_cache() -> None:
    made = kernel(Shape(4, 1, 32, 16, dtype="fp32", page_size=16, shared_kv=True))
    made.update(batch_of([3]))
    made.step()
    keys = torch.randn(32, 16, 1, 32)
    with pytest.raises(InputError) as raised:
        made(torch.randn(4, 4, 32), keys, keys[..., :16].clone())
    check_line(raised.value, "v_cache", "is not the beginning of k_cache")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies(copied: Callable[[object], object]) -> None:
    with pytest.raises(InputError) as raised:
        copied(kernel())
    check_line(raised.value, "a BatchKernel", "reads an engine's tensors")


def test_a_call_before_the_first_step() -> None:
    made = kernel()
    with pytest.raises(InputError) as raised:
        made(Q, CACHE, CACHE)
    check_line(raised.value, "before the first step", "kernel.step()")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_scales_of_other_heads_are_refused_before_the_first_plan(backend: str) -> None:
    made = kernel(backend=backend, k_scale=torch.ones(3), target=small())
    with pytest.raises(InputError) as raised:
        made.update(batch_of([3])), made.step(), made(Q, CACHE, CACHE)
    check_line(raised.value, "k_scale = 3 numbers", "2 KV heads")


def test_trees_by_request_are_not_for_kernels_of_trees() -> None:
    tree = treegen.Tree.from_requests([40, 50], [-1, 0], [0, 32], page_size=16)
    made = treegen.compile(treegen.Tree.parse("1,4/100,10"), backend="torch")
    for call in (lambda: treegen.compile(tree), lambda: made.update(tree)):
        with pytest.raises(TreeError) as raised:
            call()
        check_line(raised.value, "by request", "compile_batch")
    assert treegen.compile(tree.with_kv(tree.kv), backend="torch").tree.num_rows == 2
