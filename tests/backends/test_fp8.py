"""fp8 caches (e4m3, e5m2) beside q of 16 bits, and scales of keys and values, beside an oracle that is exact."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.ahead_kernels import compiled, suited_key, target_of
from support.forests import examples, forests
from support.kv_caches import INSIDE, MERGING, SMALL, in_pages, normal, tensors
from treegen import Shape, Tree, strategies
from treegen.autotune_cache.key import shape_text
from treegen.backends import oracle
from treegen.backends.check_inputs import KV_TORCH_DTYPES
from treegen.backends.kv_scales import Scales
from treegen.codegen.aot import ARCHITECTURES
from treegen.codegen.emit import emit_partial
from treegen.codegen.partial_keys import KernelOptions, emulates_e4m3, kernel_key
from treegen.ir.errors import InputError, ShapeError
from treegen.ir.shape import FP8
from treegen.strategies import Strategy
from treegen.target.tile_config import kernel_config
from treegen.tuning.kernel_meter import Case
from treegen.tuning.kernel_variants import kernel_sources

NAMES = (*strategies.strategy_names(), "auto")
SCALES = (
    (None, None), (0.25, 3.0), (None, 0.5), (torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.1])),
    (2, torch.tensor([0.5, 1.5])),
)  # fmt: skip
SHAPE = Shape(4, 2, 16, dtype="fp16", kv_dtype="e4m3")


def in_fp8(tree: Tree, shape: Shape, pages: int = 95) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, and caches in the shape's kv_dtype."""
    q, k, v = tensors(tree, pages, shape)
    k = k.to(KV_TORCH_DTYPES[shape.kv_dtype])
    v = k[..., : shape.head_dim_v] if shape.shared_kv else v.to(KV_TORCH_DTYPES[shape.kv_dtype])
    return q, k, v


@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("strategy", NAMES)
def test_every_strategy(strategy: str, kv_dtype: str) -> None:
    for number, (k_scale, v_scale) in enumerate(SCALES):
        tree, shape = (SMALL, INSIDE)[number % 2], replace(SHAPE, kv_dtype=kv_dtype, dtype=("fp16", "bf16")[number % 2])
        kernel = treegen.compile(tree, strategy=strategy, backend="torch", k_scale=k_scale, v_scale=v_scale)
        report = kernel.verify(*in_fp8(tree, shape))
        assert report.passed, str(report)
        assert kernel.shape == shape


@examples(60)
@given(
    tree=forests(20, 60, salt=73),
    strategy=st.sampled_from(NAMES),
    kv_dtype=st.sampled_from((*FP8, "fp16")),
    k_scale=st.sampled_from((None, 1e-3, 0.7, 40.0)),
    v_scale=st.sampled_from((None, 1e-3, 0.7, 40.0)),
)
def test_any_tree(tree: Tree, strategy: str, kv_dtype: str, k_scale: float | None, v_scale: float | None) -> None:
    if tree.num_rows:
        kernel = treegen.compile(tree, strategy=strategy, backend="torch", k_scale=k_scale, v_scale=v_scale)
        tensors_of = in_fp8(tree, replace(SHAPE, kv_dtype=kv_dtype), tree.kv.last_slot + 1)
        assert kernel.verify(*tensors_of).passed


KERNELS: list[tuple[str | Strategy, Shape, int]] = [
    ("cohort", SHAPE, 3), ("deft-flatten", replace(SHAPE, kv_dtype="e5m2", dtype="bf16", page_size=4), 1),
    ("fasttree", replace(SHAPE, dtype="bf16", head_dim=80, head_dim_v=48, page_size=4, kv_layout="HND"), 4),
    ("medusa", SHAPE, 3), ("query", replace(SHAPE, kv_dtype="fp16"), 3),
    ("flashforge", replace(SHAPE, dtype="bf16"), 2),
    ("cohort", replace(SHAPE, head_dim=48, head_dim_v=32, shared_kv=True), 1),
    *((strategy, SHAPE, 3) for strategy in MERGING),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "shape", "scales"), KERNELS, ids=str)
def test_kernels(strategy: str | Strategy, shape: Shape, scales: int) -> None:
    tree, pages = in_pages(INSIDE, shape.page_size)
    k_scale, v_scale = SCALES[scales]
    kernel = treegen.compile(tree, strategy=strategy, shape=shape, backend="triton", k_scale=k_scale, v_scale=v_scale)
    report = kernel.verify(*in_fp8(tree, shape, pages))
    assert report.passed, str(report)


@pytest.mark.full
@pytest.mark.parametrize("kv_dtype", [*FP8, "fp16"])
@pytest.mark.parametrize("strategy", NAMES)
def test_kernels_of_every_strategy(strategy: str, kv_dtype: str) -> None:
    shape = replace(SHAPE, kv_dtype=kv_dtype)
    for k_scale, v_scale in SCALES[:4]:
        kernel = treegen.compile(INSIDE, strategy=strategy, backend="triton", k_scale=k_scale, v_scale=v_scale)
        assert kernel.verify(*in_fp8(INSIDE, shape)).passed


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kv_dtype", FP8)
def test_every_code_is_read_as_it_is(dtype: str, kv_dtype: str) -> None:
    """Sixteen codes a token, each alone in its tree: outputs are what codes stand for, NaN where that is no number."""
    values = torch.arange(256, dtype=torch.uint8).view(KV_TORCH_DTYPES[kv_dtype]).view(16, 1, 16)
    tree = Tree.from_parents([-1] * 16, [1] * 16)
    q, keys = torch.zeros(16, 1, 16, dtype=KV_TORCH_DTYPES[dtype]), torch.zeros(16, 1, 16).to(values.dtype)
    expected = values.to(q.dtype)
    out = treegen.compile(tree, strategy="query", backend="torch")(q, keys, values)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    if kv_dtype == "e5m2":  # whose infinities and NaN the interpreter takes for numbers, and subnormal ones for 0
        expected = torch.where(expected.isfinite() & (expected.abs() >= 2**-14), expected, 0)
        values = expected.to(values.dtype)
    out = treegen.compile(tree, strategy="query", backend="triton")(q, keys, values)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_codes_that_are_no_numbers_are_found() -> None:
    q, k, v = in_fp8(SMALL, SHAPE)
    kernel = treegen.compile(SMALL, shape=SHAPE, backend="torch")
    v.view(torch.uint8)[12, 1, 3] = 0xFF
    with pytest.raises(InputError, match="v_cache = NaN: slot 12"):
        kernel.check_inputs(q, k, v)


def test_the_oracle_takes_codes_and_scales_exactly() -> None:
    q, k, v = in_fp8(SMALL, SHAPE)
    k_scale, v_scale = torch.tensor([0.3, 2.0]), torch.tensor([0.7, 5.0])
    out, lse = oracle.reference(SMALL, q, k, v, oracle.OracleOptions(k_scale=k_scale, v_scale=v_scale))
    plain = oracle.reference(SMALL, q, k.double() * k_scale.double()[:, None], v.double() * v_scale.double()[:, None])
    torch.testing.assert_close(out, plain[0], rtol=0, atol=0)
    torch.testing.assert_close(lse, plain[1], rtol=0, atol=0)
    halved = oracle.reference(SMALL, q, k, v, oracle.OracleOptions(k_scale=0.5))
    assert oracle.error(halved[1], oracle.reference(SMALL, q, k, v)[1]) > 1e-3


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_tensor_of_scales_is_read_at_every_call(backend: str) -> None:
    q, k, v = in_fp8(SMALL, SHAPE)
    k_scale, v_scale = torch.tensor([0.5, 1.0]), torch.tensor([1.0, 2.0])
    kernel = treegen.compile(SMALL, strategy="cohort", backend=backend, k_scale=k_scale, v_scale=v_scale)
    first = kernel(q, k, v)
    k_scale.mul_(3)
    v_scale.mul_(0.5)
    assert not torch.equal(kernel(q, k, v), first)
    assert kernel.verify(q, k, v).passed
    kernel.update(INSIDE)
    assert kernel.verify(*in_fp8(INSIDE, SHAPE)).passed


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_kernels_of_fixed_capacity_have_scales(backend: str) -> None:
    kernel = treegen.compile(
        SMALL, strategy="query", shape=SHAPE, backend=backend, max_rows=8, k_scale=0.5, v_scale=torch.tensor([1.0, 2.0])
    )
    for tree in (SMALL, INSIDE):
        kernel.update(tree)
        assert kernel.verify(*in_fp8(tree, SHAPE)).passed


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (0, "not a finite number above 0"), (-1.0, "not a finite number above 0"), (math.nan, "not a finite"),
        (math.inf, "not a finite"), (True, "not a finite"), ("1", "not a finite"), (np.float32(0), "not a finite"),
        (torch.tensor(1.0), r"not a float32 tensor \[num_kv_heads\]"),
        (torch.tensor([1.0, 2.0], dtype=torch.float64), "not a float32 tensor"),
        (torch.tensor([1.0, 0.0]), "not finite numbers above 0"), (torch.tensor([1.0, math.nan]), "not finite numbers"),
        (torch.ones(4)[::2], "not a float32 tensor"),
    ],
    ids=str,
)  # fmt: skip
def test_scales_that_cannot_be(scale: object, words: str) -> None:
    for name in ("k_scale", "v_scale"):
        with pytest.raises(InputError, match=words) as caught:
            treegen.compile(SMALL, **{name: scale})
        assert caught.value.argument == name


def test_scales_that_do_not_fit_the_tensors() -> None:
    q, k, v = in_fp8(SMALL, SHAPE)
    with pytest.raises(InputError, match=r"k_scale = 3 numbers: there are 2 KV heads"):
        treegen.compile(SMALL, backend="torch", k_scale=torch.ones(3))(q, k, v)
    elsewhere = Scales(1.0, torch.ones(2, device="meta"))
    with pytest.raises(InputError, match="v_scale = meta: is not on the tensors' device cpu"):
        elsewhere.on(torch.device("cpu"), 2)


def test_types_that_do_not_go_together() -> None:
    assert Shape(4, 2, 16, dtype="fp16", kv_dtype=torch.float8_e4m3fn) == SHAPE
    for dtype, kv_dtype in (("fp32", "e4m3"), ("fp16", "bf16"), ("bf16", "fp32")):
        with pytest.raises(ShapeError, match=f"kv_dtype = {kv_dtype}: differs from dtype = {dtype}"):
            Shape(4, 2, 16, dtype=dtype, kv_dtype=kv_dtype)
    with pytest.raises(ShapeError, match="dtype = e4m3: is not a supported type"):
        Shape(4, 2, 16, dtype="e4m3")
    q, k, v = in_fp8(SMALL, SHAPE)
    kernel = treegen.compile(SMALL, shape=SHAPE, backend="torch")
    kernel(q, k, v)
    with pytest.raises(InputError, match=r"k_cache = torch\.float8_e4m3fn: is not of q's type torch\.float32"):
        kernel(q.float(), k, v)
    with pytest.raises(InputError, match=r"torch\.float8_e5m2: is not of k_cache's type torch\.float8_e4m3fn"):
        kernel(q, k, v.float().to(torch.float8_e5m2))
    with pytest.raises(InputError, match=r"k_cache = torch\.float8_e4m3fnuz: is not of q's type"):
        kernel(q, k.view(torch.float8_e4m3fnuz), v)
    with pytest.raises(InputError, match="compile another kernel"):
        kernel(q, k.to(q.dtype), v.to(q.dtype))


def test_costs_and_keys_know_the_types() -> None:
    half = replace(SHAPE, kv_dtype="fp16")
    assert 2 * SHAPE.kv_token_bytes == half.kv_token_bytes
    assert len({shape_text(replace(SHAPE, kv_dtype=kv_dtype)) for kv_dtype in (*FP8, "fp16")}) == 3
    tree = Tree.parse("400(20,9*3)")
    read = [treegen.compile(tree, strategy="query", shape=shape).estimate.kv_hbm_bytes for shape in (SHAPE, half)]
    assert 2 * read[0] == read[1]
    case = Case.of(SMALL, SHAPE, torch.device("cpu"))
    assert (case.q.dtype, case.k_cache.dtype) == (torch.float16, torch.float8_e4m3fn)


def test_kernels_without_fp8_and_scales_have_nothing_of_them() -> None:
    config = kernel_config(Shape(4, 2, 16, dtype="fp16"), target_of(90), 1)
    plain = emit_partial(kernel_key(config, Shape(4, 2, 16, dtype="fp16"))).text
    for word in ("scaled  ", "emulate_e4m3", "k_scales", "from_bits", ".to(q_tile.dtype)"):
        assert word not in plain
    scaled = emit_partial(kernel_key(config, Shape(4, 2, 16, dtype="fp16"), options=KernelOptions(scaled=True))).text
    assert "k_scales, v_scales," in scaled
    assert "scaled  " in scaled


def test_sources_are_those_of_the_target() -> None:
    for target, emulate_e4m3 in (("a100", True), ("h200", False)):
        source = treegen.compile(SMALL, strategy="query", shape=SHAPE, target=target, v_scale=2.0).source
        assert ("def e4m3_from_bits" in source) == emulate_e4m3
        assert "v_scales" in source


def test_bits_are_put_together_where_the_gpu_cannot() -> None:
    e5m2 = replace(SHAPE, kv_dtype="e5m2")
    assert [emulates_e4m3(SHAPE, capability) for capability in (0, 80, 86, 89, 90, 100)] == [True] * 3 + [False] * 3
    assert not emulates_e4m3(e5m2, 80)
    for architecture in ARCHITECTURES:
        for shape in (SHAPE, e5m2):
            keys = [source.key for source in kernel_sources(shape, target_of(architecture))]
            emulate_e4m3 = {key.emulate_e4m3 for key in keys if hasattr(key, "emulate_e4m3")}
            assert emulate_e4m3 == {emulates_e4m3(shape, architecture)}


def test_kernels_compile_ahead() -> None:
    shape = Shape(32, 8, 128, dtype="bf16", kv_dtype="e4m3")
    jobs = [(arch, scaled_key(arch, shape, large=arch != 100)) for arch in ARCHITECTURES]
    for (architecture, key), resources in zip(jobs, compiled(jobs), strict=True):
        assert resources.stack == 0, f"sm_{architecture} {key}"
        assert resources.shared <= target_of(architecture).shared_bytes


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_more_kernels_compile_ahead(architecture: int) -> None:
    shapes = [Shape(32, 8, dim, dtype=dtype, kv_dtype=kv) for dim, dtype, kv in (
        (64, "bf16", "e4m3"), (128, "fp16", "e4m3"), (128, "bf16", "e5m2"), (256, "bf16", "e4m3"),
    )]  # fmt: skip
    shapes.append(Shape(16, 1, 576, 512, dtype="bf16", kv_dtype="e4m3", shared_kv=True))
    jobs = [(architecture, scaled_key(architecture, shape, large=large)) for shape in shapes for large in (False, True)]
    for (_, key), resources in zip(jobs, compiled(jobs), strict=True):
        print(f"sm_{architecture} {resources} {key}")
        assert resources.stack <= (64 if key.head_dim_v > 256 else 0), f"sm_{architecture} {key}"
        assert resources.shared <= target_of(architecture).shared_bytes


def scaled_key(architecture: int, shape: Shape, *, large: bool) -> object:
    """The key of the kernel that suits few or many rows, with scales."""
    key = suited_key(architecture, shape, large=large)
    return replace(key, scaled=True, emulate_e4m3=emulates_e4m3(shape, architecture))


def test_wrappers_take_fp8_pages() -> None:
    wrapper = treegen.TreeAttentionWrapper()
    wrapper.plan([0, 2, 3], [0, 1, 2], [3, 4], 4, 2, 16, 4, q_data_type="float16", kv_data_type=torch.float8_e4m3fn)
    pages = normal(3, 2, 4, 2, 16).to(torch.float8_e4m3fn)
    q = normal(2, 4, 16, dtype="fp16", seed=5)
    expected = oracle.reference(wrapper.kernel.tree, q, pages[:, 0], pages[:, 1])[0]
    assert oracle.error(wrapper.run(q, pages), expected) <= oracle.TOLERANCE["fp16"]
