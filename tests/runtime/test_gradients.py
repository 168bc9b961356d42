"""Gradients, which kernels have none of: a call that would lose them is refused, on both backends alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import treegen
from treegen import Shape, Tree
from treegen.ir.errors import InputError

TREE = Tree.parse("1,3/20,4")
SHAPE = Shape(4, 2, 16, dtype="fp32")
OPTIONS: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "sinks": lambda tensor: {"sinks": tensor},
    "alibi_slopes": lambda tensor: {"alibi_slopes": tensor},
    "k_scale": lambda tensor: {"k_scale": tensor},
    "v_scale": lambda tensor: {"v_scale": tensor},
    "tensor 0 that score_mod or mask_mod reads": lambda tensor: {
        "score_mod": lambda score, b, h, q_idx, kv_idx: score + tensor[h]
    },
}
"""What a kernel is compiled with, by the names that errors give to the tensor in it."""

backends = pytest.mark.parametrize("backend", ["torch", "triton"])


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 32, 2, 16, generator=generator)
    return {"q": torch.randn(3, 4, 16, generator=generator), "k_cache": k, "v_cache": v}


def check(kernel: treegen.Kernel, given: dict[str, torch.Tensor], name: str) -> None:
    """Calls are refused while gradients are enabled, whatever was called before, and served while they are not."""
    for _ in range(2):
        with pytest.raises(InputError, match=rf"{name} = .* requires gradients.*; call inside torch.no_grad\(\)"):
            kernel(**given)
        with torch.no_grad():
            assert kernel.verify(**{n: t for n, t in given.items() if n != "out"})
            assert kernel(**given).grad_fn is None
        with torch.inference_mode():
            kernel(**given)


@backends
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
def test_tensors_of_a_call(name: str, backend: str) -> None:
    kernel = treegen.compile(TREE, strategy="deft-node", shape=SHAPE, backend=backend)
    given = tensors() | ({"out": torch.empty(3, 4, 16)} if name == "out" else {})
    kernel(**given)
    given[name] = given[name].clone().requires_grad_()
    check(kernel, given, name)


@backends
def test_tensors_that_come_of_a_parameter(backend: str) -> None:
    kernel = treegen.compile(TREE, strategy="deft-node", backend=backend)
    given = tensors()
    given["q"] = given["q"] * torch.nn.Parameter(torch.ones(16))
    check(kernel, given, "q")


@backends
@pytest.mark.parametrize("name", OPTIONS)
def test_tensors_that_a_kernel_was_compiled_with(name: str, backend: str) -> None:
    tensor = torch.ones(2 if "scale" in name else 4)
    kernel = treegen.compile(TREE, strategy="deft-node", shape=SHAPE, backend=backend, **OPTIONS[name](tensor))
    kernel(**tensors())
    tensor.requires_grad_()
    check(kernel, tensors(), name)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("with_out", [False, True])
def test_compiled_code(compiler: str, with_out: bool) -> None:
    torch._dynamo.reset()
    sinks = torch.zeros(4)
    kernel = treegen.compile(TREE, strategy="deft-node", shape=SHAPE, backend="torch", sinks=sinks)
    given = tensors()
    out = torch.empty(3, 4, 16) if with_out else None

    @torch.compile(fullgraph=True, backend=compiler)
    def layer(q: torch.Tensor) -> torch.Tensor:
        return kernel(q * 2, given["k_cache"], given["v_cache"], out=out)

    q = given["q"].clone().requires_grad_()
    layer(given["q"])
    with pytest.raises(InputError, match=r"q = .* requires gradients"):
        layer(q)
    with torch.no_grad():
        layer(q)
    sinks.requires_grad_()
    with pytest.raises(InputError, match=r"sinks = .* requires gradients"):
        layer(given["q"])
