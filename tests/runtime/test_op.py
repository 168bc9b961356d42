"""Kernels under torch.compile: one operator each, no graph break, and nothing compiled anew for another tree."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import treegen
from treegen import Shape, Tree
from treegen.backends import oracle
from treegen.ir.errors import InputError
from treegen.runtime import torch_op

SHAPE = Shape(4, 2, 16, dtype="fp32")
TREE, OTHER = Tree.parse("1,4/30,3"), Tree.parse("20(9,5,7)+40")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 81, 2, 16, generator=generator)
    return torch.randn(4, 4, 16, generator=generator), k, v


def compiled_kernel(tree: Tree = TREE) -> treegen.Kernel:
    return treegen.compile(tree, strategy="deft-node", shape=SHAPE, backend="torch")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_update_shows_in_compiled_code_without_compiling_anew(backend: str) -> None:
    kernel, (q, k, v) = compiled_kernel(), tensors()
    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, lse = kernel(q * 2, k, v, return_lse=True)
        return out + 1, lse, kernel(q, k, v)

    for tree in (TREE, OTHER, TREE):
        kernel.update(tree)
        out, lse, plain = layer(q, k, v)
        expected_out, expected_lse = oracle.reference(tree, q * 2, k, v)
        assert oracle.error(out - 1, expected_out) < 1e-5
        assert oracle.error(lse, expected_lse) < 1e-5
        assert torch.equal(plain, kernel(q, k, v))
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_out_is_written_in_compiled_code(backend: str, return_lse: bool) -> None:
    kernel, (q, k, v) = compiled_kernel(), tensors()

    @torch.compile(fullgraph=True, backend=backend)
    def layer(q: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = kernel(q, k, v, out=out, return_lse=return_lse, lse_base="log2")
        return result if isinstance(result, tuple) else (result,)

    out, expected = torch.zeros_like(q), kernel(q, k, v, return_lse=True, lse_base="log2")
    found = layer(q, out)
    assert len(found) == 1 + return_lse
    assert torch.equal(out, expected[0])
    for got, wanted in zip(found, expected, strict=False):
        assert torch.equal(got, wanted)


def test_every_kernel_of_a_model_is_its_own() -> None:
    kernels, (q, k, v) = [compiled_kernel(TREE), compiled_kernel(OTHER)], tensors()
    model = torch.compile(lambda q: [kernel(q, k, v) for kernel in kernels], fullgraph=True, backend="eager")
    for kernel, out in zip(kernels, model(q), strict=True):
        assert torch.equal(out, kernel(q, k, v))


def test_the_rows_of_a_graph_may_change() -> None:
    kernel, (q, k, v) = compiled_kernel(), tensors()
    layer = torch.compile(lambda q: kernel(q, k, v), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (4, 7, 9):
        tree = Tree.parse(f"1,{rows}/30,3")
        kernel.update(tree)
        q = torch.randn(rows, 4, 16)
        assert oracle.error(layer(q), oracle.reference(tree, q, k, v)[0]) < 1e-5


def test_operators_pass_pytorchs_checks() -> None:
    kernel, (q, k, v) = compiled_kernel(), tensors()
    handle = kernel.calls.handle
    for return_lse in (False, True):
        torch.library.opcheck(torch_op.attention, (q, k, v, handle, return_lse, "ln"))
        torch.library.opcheck(torch_op.attention_out, (q, k, v, torch.empty_like(q), handle, return_lse, "ln"))


def test_a_handle_keeps_no_kernel_alive() -> None:
    kernel, (q, k, v) = compiled_kernel(), tensors()
    handle = kernel.calls.handle
    del kernel
    gc.collect()
    with pytest.raises(InputError, match="no longer alive"):
        torch_op.attention(q, k, v, handle, False, "ln")
    assert compiled_kernel().calls.handle > handle


def test_wrong_tensors_are_refused_from_compiled_code() -> None:
    kernel, (q, k, v) = compiled_kernel(), tensors()
    layer = torch.compile(lambda q: kernel(q, k, v), fullgraph=True, backend="eager")
    with pytest.raises(InputError, match="the tree has 4"):
        layer(q[:3])
