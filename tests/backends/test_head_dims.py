"""K and V of different head dims, keys in two slices, and caches that are views of one tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.ahead_kernels import compiled, suited_key, target_of
from support.forests import examples, forests
from support.kv_caches import DTYPES, INSIDE, MERGING, SMALL, in_pages, normal, tensors
from treegen import Shape, Tree, strategies
from treegen.backends import oracle
from treegen.codegen.aot import ARCHITECTURES
from treegen.codegen.emit import emit_partial
from treegen.codegen.merge_forms import merge_keys
from treegen.ir.errors import InputError
from treegen.runtime.torch_op import attention
from treegen.target.tile_config import key_slices
from treegen.tuning.kernel_meter import Case

NAMES = (*strategies.strategy_names(), "auto")
PAIRS = ((192, 128), (64, 128), (80, 48), (16, 40), (128, 256))
MOST_STACK_MERGING = 160
"""Bytes of spilled registers per thread that kernels may have which join partials behind loops over odd head dims."""


@pytest.mark.parametrize(("head_dim", "head_dim_v"), PAIRS)
@pytest.mark.parametrize("strategy", NAMES)
def test_every_strategy(strategy: str, head_dim: int, head_dim_v: int) -> None:
    for tree in (SMALL, INSIDE):
        q, k, v = tensors(tree, 95, Shape(4, 2, head_dim, head_dim_v, dtype="fp32"))
        kernel = treegen.compile(tree, strategy=strategy, backend="torch")
        assert kernel.verify(q, k, v).passed
        assert kernel(q, k, v).shape == (tree.num_rows, 4, head_dim_v)
        assert (kernel.shape.head_dim, kernel.shape.head_dim_v) == (head_dim, head_dim_v)


@examples(100)
@given(
    tree=forests(20, 60, salt=72),
    dims=st.tuples(st.sampled_from((8, 24, 64)), st.sampled_from((8, 40, 72))),
    strategy=st.sampled_from(NAMES),
)
def test_any_tree(tree: Tree, dims: tuple[int, int], strategy: str) -> None:
    if tree.num_rows:
        tensors_of = tensors(tree, tree.kv.last_slot + 1, Shape(4, 2, *dims, dtype="fp32"))
        assert treegen.compile(tree, strategy=strategy, backend="torch").verify(*tensors_of).passed


@pytest.mark.parametrize(
    ("strategy", "dims", "page_size", "dtype"),
    [
        ("cohort", (192, 128), 1, "fp16"), ("fasttree", (80, 48), 4, "fp32"), ("deft-flatten", (64, 128), 16, "bf16"),
        ("flashforge", (40, 16), 1, "fp32"),
    ],
)  # fmt: skip
def test_kernels(strategy: str, dims: tuple[int, int], page_size: int, dtype: str) -> None:
    shape = Shape(4, 2, *dims, dtype=dtype, page_size=page_size)
    tree, pages = in_pages(SMALL, page_size)
    assert treegen.compile(tree, strategy=strategy, backend="triton").verify(*tensors(tree, pages, shape)).passed


@pytest.mark.parametrize("dims", [(192, 128), (80, 48), (16, 136)])
def test_merging_kernels(dims: tuple[int, int]) -> None:
    shape = Shape(2, 1, *dims, dtype="fp32")
    tensors_of = tensors(INSIDE, 95, shape)
    for strategy in MERGING:
        kernel = treegen.compile(INSIDE, strategy=strategy, shape=shape, backend="triton")
        assert kernel.schedule.num_partials > 0
        assert kernel.verify(*tensors_of).passed


@pytest.mark.full
@pytest.mark.parametrize("dims", PAIRS)
@pytest.mark.parametrize("strategy", NAMES)
def test_kernels_of_every_strategy(strategy: str, dims: tuple[int, int]) -> None:
    tensors_of = tensors(INSIDE, 95, Shape(4, 2, *dims, dtype="fp32"))
    assert treegen.compile(INSIDE, strategy=strategy, backend="triton").verify(*tensors_of).passed


def test_keys_are_in_pieces_where_that_pads_less() -> None:
    found = {dims: key_slices(*dims) for dims in ((192, 128), (80, 48), (200, 128), (16, 8), (40, 128), (64, 128))}
    assert found == {
        (192, 128): (128, 64), (80, 48): (64, 16), (200, 128): (256,), (16, 8): (16,), (40, 128): (32, 16),
        (64, 128): (64,),
    }  # fmt: skip
    for dim in range(8, 257, 8):
        assert len(key_slices(dim, dim)) == 1
        for slices in (key_slices(dim, dim), key_slices(dim, 512)):
            assert sum(slices[:-1]) < dim <= sum(slices)


def views(layout: str, tree: Tree, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as views of one tensor: [slots or pages, ..., heads, dim]."""
    slots, heads = tree.kv.last_slot + 1, 2
    pages = -(-slots // 16)
    match layout:
        case "beside one another":
            kv = normal(slots, heads, 256, dtype=dtype)
            return kv[..., :128], kv[..., 128:]
        case "beside one another, other dims":
            kv = normal(slots, heads, 192, dtype=dtype)
            return kv[..., :128], kv[..., 128:]
        case "heads apart":
            kv = normal(slots, 2 * heads, 64, dtype=dtype)
            return kv[:, ::2], kv[:, 1::2]
        case "pages of both":
            kv = normal(pages, 2, 16, heads, 64, dtype=dtype)
            return kv[:, 0], kv[:, 1]
        case "tokens of both":
            kv = normal(pages, 16, 2, heads, 64, dtype=dtype)
            return kv[:, :, 0], kv[:, :, 1]
        case _:
            kv = normal(slots, heads, 80, dtype=dtype)
            return kv, kv[..., :64]


LAYOUTS = (
    "beside one another", "beside one another, other dims", "heads apart", "pages of both", "tokens of both",
    "v in k",
)  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_one_tensor(layout: str, backend: str) -> None:
    dtype = "fp16" if backend == "triton" else "fp32"
    k, v = views(layout, SMALL, dtype)
    q = normal(SMALL.num_rows, 4, k.shape[-1], dtype=dtype, seed=9)
    kernel = treegen.compile(SMALL, strategy="cohort", backend=backend)
    out, lse = kernel(q, k, v, return_lse=True)
    expected = oracle.reference(SMALL, q, k.contiguous(), v.contiguous())
    assert oracle.error(out, expected[0]) <= oracle.TOLERANCE[dtype]
    assert oracle.error(lse, expected[1]) <= oracle.TOLERANCE[dtype]


def test_compiled_code_knows_the_shape_of_the_result() -> None:
    shape = Shape(4, 2, 24, 40, dtype="fp32")
    q, k, v = tensors(SMALL, 95, shape)
    kernel = treegen.compile(SMALL, backend="torch")
    with torch._subclasses.FakeTensorMode() as mode:
        out, lse = attention(*map(mode.from_tensor, (q, k, v)), kernel.calls.handle, True, "ln")
        assert out.shape == (SMALL.num_rows, 4, 40)
        assert lse.shape == (SMALL.num_rows, 4)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = tensors(SMALL, 95, Shape(4, 2, 24, 40, dtype="fp32"))
    kernel = treegen.compile(SMALL, backend="torch", shape=Shape(4, 2, 24, 40, dtype="fp32"))
    kernel(q, k, v)
    with pytest.raises(InputError, match="head_dim_v 24: the kernel serves head_dim_v 40"):
        kernel(q, k, k)
    with pytest.raises(InputError, match="but for the last dimension"):
        kernel(q, k, v[1:])
    with pytest.raises(InputError, match=r"out = .* needs \(3, 4, 40\)"):
        kernel(q, k, v, out=torch.empty_like(q))
    with pytest.raises(InputError, match=r"v_cache = strides .* not contiguous"):
        kernel(q, k, normal(95, 2, 80)[..., ::2])


def test_costs_are_those_of_both_dims() -> None:
    shape = Shape(4, 2, 192, 128, dtype="bf16")
    assert shape.kv_token_bytes == 2 * (192 + 128) * 2
    assert shape.partial_bytes == 4 * (128 * 4 + 4)
    tree = Tree.parse("40(20,9*3)")
    estimate = treegen.compile(tree, strategy="query", shape=shape).estimate
    assert estimate.out_bytes == tree.num_rows * 4 * (128 * 2 + 4)
    assert estimate.kv_unique_bytes == tree.unique_tokens * shape.kv_token_bytes


def test_kernels_of_two_dims_can_be_measured() -> None:
    case = Case.of(SMALL, Shape(4, 2, 24, 40, dtype="fp32"), torch.device("cpu"))
    assert (case.q.shape[-1], case.k_cache.shape[-1], case.v_cache.shape[-1], case.out.shape[-1]) == (24, 24, 40, 40)
    assert case.q.dtype == DTYPES["fp32"]


@pytest.mark.full
def test_kernels_compile_ahead_without_spilling() -> None:
    shape = Shape(32, 8, 192, 128, dtype="bf16")
    jobs = [(arch, suited_key(arch, shape, large=arch != 80)) for arch in ARCHITECTURES]
    for (architecture, key), resources in zip(jobs, compiled(jobs), strict=True):
        assert resources.stack == 0
        assert resources.shared <= target_of(architecture).shared_bytes
        assert "q_rest" in emit_partial(key).text
    assert {key.head_dim_v for key in merge_keys(shape)} == {128}


@pytest.mark.full
@pytest.mark.parametrize("dims", PAIRS)
def test_more_kernels_compile_ahead(dims: tuple[int, int]) -> None:
    shape = Shape(32, 8, *dims, dtype="fp16")
    jobs = [
        (arch, suited_key(arch, replace(shape, page_size=page_size), large=large, epilogue_merge=merging))
        for arch in ARCHITECTURES for large in (False, True) for page_size, merging in ((1, True), (16, False))
    ]  # fmt: skip
    for (architecture, key), resources in zip(jobs, compiled(jobs), strict=True):
        assert resources.stack <= (MOST_STACK_MERGING if key.epilogue_merge else 16), f"sm_{architecture} {key}"
