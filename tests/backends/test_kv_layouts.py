"""HND caches: pages `[num_kv_heads, page_size, head_dim]`, on every backend, beside the oracle on tokens one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import examples, forests
from support.kv_caches import INSIDE, SMALL, by_slot, in_pages, tensors
from treegen import Shape, Tree, strategies
from treegen.backends import oracle
from treegen.codegen.kernel_signature import cache_strides
from treegen.ir.errors import InputError, ShapeError
from treegen.tuning.kernel_meter import Case

NAMES = (*strategies.strategy_names(), "auto")
HND = Shape(4, 2, 16, dtype="fp32", page_size=4, kv_layout="HND")


def check(tree: Tree, strategy: str, shape: Shape, backend: str) -> None:
    """A call beside the oracle, which gets the tokens one by one."""
    tree, pages = in_pages(tree, shape.page_size)
    q, k, v = tensors(tree, pages, shape)
    kernel = treegen.compile(tree, strategy=strategy, shape=shape, backend=backend)
    out, lse = kernel(q, k, v, return_lse=True)
    expected = oracle.reference(tree, q, by_slot(k, shape), by_slot(v, shape))
    for found, wanted in zip((out, lse), expected, strict=True):
        assert oracle.error(found, wanted) <= oracle.TOLERANCE[shape.dtype]
    assert kernel.verify(q, k, v).passed
    kernel.check_inputs(q, k, v)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("strategy", NAMES)
def test_every_strategy(strategy: str, page_size: int) -> None:
    for tree in (SMALL, INSIDE):
        check(tree, strategy, replace(HND, page_size=page_size), "torch")


@examples(100)
@given(
    tree=forests(20, 60, salt=71),
    page_size=st.sampled_from((1, 2, 16)),
    heads=st.sampled_from(((1, 1), (4, 2), (3, 3))),
    strategy=st.sampled_from(NAMES),
)
def test_any_tree(tree: Tree, page_size: int, heads: tuple[int, int], strategy: str) -> None:
    if tree.num_rows:
        check(tree, strategy, Shape(*heads, 16, dtype="fp32", page_size=page_size, kv_layout="HND"), "torch")


@pytest.mark.parametrize(
    ("strategy", "page_size", "dtype"),
    [("cohort", 16, "fp16"), ("deft-flatten", 4, "bf16"), ("medusa", 4, "fp32"), ("query", 1, "fp32")],
)
def test_kernels(strategy: str, page_size: int, dtype: str) -> None:
    check(SMALL, strategy, replace(HND, page_size=page_size, dtype=dtype, kv_dtype=dtype), "triton")


@pytest.mark.full
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("strategy", NAMES)
def test_kernels_of_every_strategy(strategy: str, page_size: int) -> None:
    check(INSIDE, strategy, replace(HND, page_size=page_size), "triton")


def test_both_layouts_give_the_same_bits() -> None:
    tree, pages = in_pages(SMALL, 4)
    q, k, v = tensors(tree, pages, HND)
    other = replace(HND, kv_layout="NHD")
    for backend in ("torch", "triton"):
        found = treegen.compile(tree, strategy="cohort", shape=HND, backend=backend)(q, k, v)
        moved = treegen.compile(tree, strategy="cohort", shape=other, backend=backend)
        assert torch.equal(found, moved(q, k.transpose(1, 2), v.transpose(1, 2).contiguous()))


def test_pages_of_one_token_are_the_same_in_both() -> None:
    shape = replace(HND, page_size=1)
    q, k, v = tensors(SMALL, 95, shape)
    kernel = treegen.compile(SMALL, shape=shape, backend="torch")
    assert torch.equal(kernel(q, k, v), treegen.compile(SMALL, backend="torch")(q, k, v))
    assert torch.equal(kernel(q, k[:, :, None], v[:, :, None]), kernel(q, k, v))
    assert cache_strides(k[:, :, None], "HND") == cache_strides(k[:, None], "NHD") == (32, 32, 16)


def test_strides_are_read_where_the_layout_has_them() -> None:
    cache = torch.empty(7, 2, 4, 16)
    assert cache_strides(cache, "HND") == (128, 16, 64)
    assert cache_strides(cache.transpose(1, 2), "NHD") == (128, 16, 64)


def test_a_cache_of_the_other_layout_is_refused() -> None:
    tree, pages = in_pages(SMALL, 4)
    q, k, v = tensors(tree, pages, HND)
    kernel = treegen.compile(tree, shape=HND, backend="torch")
    with pytest.raises(InputError, match="the kernel serves"):
        kernel(q, k.transpose(1, 2), v.transpose(1, 2))
    with pytest.raises(ShapeError, match="kv_layout = HDN"):
        Shape(4, 2, 16, kv_layout="HDN")


def test_values_are_checked_where_they_lie() -> None:
    tree, pages = in_pages(SMALL, 4)
    q, k, v = tensors(tree, pages, HND)
    kernel = treegen.compile(tree, shape=HND, backend="torch")
    slot = int(tree.kv.start[0]) + 5
    v[slot // 4, 1, slot % 4, 3] = math.nan
    with pytest.raises(InputError, match=f"slot {slot} is not a number"):
        kernel.check_inputs(q, k, v)
    with pytest.raises(InputError, match="k_cache = 4 pages: the tree refers to page"):
        kernel.check_inputs(q, k[:4], v[:4])


def test_kernels_of_a_layout_can_be_measured() -> None:
    tree, _ = in_pages(SMALL, 4)
    case = Case.of(tree, HND, torch.device("cpu"))
    assert case.k_cache.shape[1:] == (2, 4, 16)
    kernel = treegen.compile(tree, shape=HND, backend="torch")
    assert oracle.error(kernel(case.q, case.k_cache, case.v_cache), case.expected_out) < 1e-5
