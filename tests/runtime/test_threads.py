"""Kernels called from several threads at the same time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

import treegen
from treegen import Shape, Tree
from treegen.backends import oracle

SHAPE = Shape(4, 2, 16, dtype="fp32")
TREES = (Tree.parse("1,4/70,3"), Tree.parse("20(9,5,7)+40"))
THREADS = 4


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def tensors(seed: int, pages: int = 90) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, pages, 2, 16, generator=generator)
    return torch.randn(4, 4, 16, generator=generator), k, v


def together(work: Callable[[int], None]) -> None:
    """Runs `work(0)`, `work(1)`, ... in threads that begin at the same time; raises what one of them raises."""
    barrier = Barrier(THREADS)

    def begin(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(begin, range(THREADS)))


@pytest.mark.parametrize(("backend", "calls"), [("torch", 60), pytest.param("triton", 3, marks=pytest.mark.full)])
def test_one_kernel_from_several_threads(backend: str, calls: int) -> None:
    kernel = treegen.compile(TREES[0], strategy="deft-node", backend=backend)

    def work(number: int) -> None:
        for turn in range(calls):
            q, k, v = tensors(number, 90 + (turn % 7))
            out, lse = kernel(q, k, v, return_lse=True)
            expected_out, expected_lse = oracle.reference(TREES[0], q, k, v)
            assert oracle.error(out, expected_out) < 1e-5
            assert oracle.error(lse, expected_lse) < 1e-5

    together(work)


@pytest.mark.parametrize(("backend", "calls"), [("torch", 60), ("triton", 3)])
def test_two_kernels_from_several_threads(backend: str, calls: int) -> None:
    kernels = [treegen.compile(tree, strategy="deft-node", shape=SHAPE, backend=backend) for tree in TREES]
    expected = [[oracle.reference(tree, *tensors(n))[0] for tree in TREES] for n in range(THREADS)]

    def work(number: int) -> None:
        q, k, v = tensors(number)
        for turn in range(calls):
            which = (number + turn) % 2
            assert oracle.error(kernels[which](q, k, v), expected[number][which]) < 1e-5

    together(work)


def test_forms_beyond_those_that_are_kept_from_several_threads() -> None:
    kernel = treegen.compile(TREES[0], strategy="query", shape=SHAPE, backend="torch")
    q, *_ = tensors(0)
    caches = torch.randn(2, 400, 2, 16)
    expected = kernel(q, *caches)

    def work(number: int) -> None:
        for turn in range(150):
            size = 90 + (37 * number + turn) % 150
            assert torch.equal(kernel(q, caches[0, :size], caches[1, :size]), expected)

    together(work)
    assert len(kernel.calls.prepared.calls) <= 64


def test_calls_during_an_update_serve_either_tree() -> None:
    kernel = treegen.compile(TREES[0], strategy="deft-node", shape=SHAPE, backend="torch")
    q, k, v = tensors(0)
    expected = [oracle.reference(tree, q, k, v)[0] for tree in TREES]

    def work(number: int) -> None:
        for turn in range(60):
            if number == 0:
                kernel.update(TREES[turn % 2])
            else:
                out = kernel(q, k, v)
                assert min(oracle.error(out, wanted) for wanted in expected) < 1e-5

    together(work)
