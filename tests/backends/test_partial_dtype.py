"""Partial results in 16 bits: half the bytes, right results, and nothing else that changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import treegen
from treegen import Shape, Tree
from treegen.autotune_cache.key import shape_text
from treegen.backends import oracle
from treegen.ir.errors import ShapeError
from treegen.strategies import cohort

TREE = Tree.parse("200(70*3,40(5,64))")
SPLIT = cohort(head_rows=16, split=64)
FINAL = cohort(head_rows=16, split_shared_rows=3, merge="final")


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(TREE.num_rows, 4, 16, generator=generator).to(dtype)
    k, v = torch.randn(2, TREE.kv.last_slot + 1, 2, 16, generator=generator).to(dtype)
    return q, k, v


@pytest.mark.parametrize(
    ("backend", "name", "dtype"),
    [
        ("triton", "fp16", torch.float16),
        ("torch", "fp16", torch.float16),
        ("torch", "bf16", torch.bfloat16),
        pytest.param("triton", "bf16", torch.bfloat16, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("strategy", [SPLIT, FINAL], ids=str)
def test_results_are_right_and_rounded_once_more(
    backend: str, strategy: treegen.Strategy, name: str, dtype: torch.dtype
) -> None:
    q, k, v = tensors(dtype)
    shape = Shape(4, 2, 16, dtype=name)
    exact = treegen.compile(TREE, strategy=strategy, shape=shape, backend=backend)
    kernel = treegen.compile(TREE, strategy=strategy, shape=replace(shape, partial_dtype=name), backend=backend)
    assert kernel.schedule.num_partials > 0
    report = kernel.verify(q, k, v)
    assert report.passed, str(report)
    assert not torch.equal(kernel(q, k, v), exact(q, k, v))
    assert torch.equal(kernel(q, k, v, return_lse=True)[1], exact(q, k, v, return_lse=True)[1])


def test_they_take_half_the_memory_and_half_the_traffic() -> None:
    shape = Shape(32, 8, 128, dtype="fp16")
    half = replace(shape, partial_dtype="fp16")
    assert (shape.partial_bytes, half.partial_bytes) == (32 * (128 * 4 + 4), 32 * (128 * 2 + 4))
    kernels = [treegen.compile(TREE, strategy=SPLIT, shape=each) for each in (shape, half)]
    slots = kernels[0].schedule.num_partials
    assert kernels[0].workspace_size() - kernels[1].workspace_size() == slots * 32 * 128 * 2
    full, halved = (kernel.estimate.partial_bytes for kernel in kernels)
    assert full * half.partial_bytes == halved * shape.partial_bytes
    assert kernels[1].estimate.time_us < kernels[0].estimate.time_us


def test_policies_of_both_are_told_apart() -> None:
    shape = Shape(32, 8, 128, dtype="fp16")
    assert shape_text(replace(shape, partial_dtype="fp16")) == shape_text(shape) + ", partial_dtype fp16"
    assert replace(shape, partial_dtype="fp32") == shape


@pytest.mark.parametrize("value", ["bf16", "fp8", "float64"])
def test_other_types_are_refused(value: str) -> None:
    with pytest.raises(ShapeError, match="partial_dtype"):
        Shape(32, 8, 128, dtype="fp16", partial_dtype=value)


def test_a_shape_that_is_read_off_tensors_keeps_float32() -> None:
    q, k, v = tensors(torch.float16)
    kernel = treegen.compile(TREE, strategy=SPLIT)
    assert kernel.verify(q, k, v).out_error < oracle.TOLERANCE["fp16"]
    assert kernel.shape.partial_dtype == "fp32"
