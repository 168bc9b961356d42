"""Caches in 8 bits that are read in words of four elements, as small tiles of head dims 64, 128 and 256 read them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import treegen
from support.ahead_kernels import compiled, suited_key, target_of
from support.kv_caches import INSIDE, SMALL, in_pages, tensors
from treegen import Shape, Tree
from treegen.backends.check_inputs import KV_TORCH_DTYPES
from treegen.backends.kv_views import in_words
from treegen.codegen.aot import ARCHITECTURES
from treegen.codegen.emit import emit_partial
from treegen.codegen.partial_keys import KernelOptions, emulates_e4m3, kernel_key
from treegen.ir.shape import FP8
from treegen.strategies import Strategy, cohort
from treegen.target.tile_config import kernel_config, reads_packed_fp8

SHAPE = Shape(4, 2, 64, dtype="fp16", kv_dtype="e4m3")
KERNELS: list[tuple[str | Strategy, Shape]] = [
    (cohort(head_rows=16), SHAPE),
    (cohort(head_rows=16, split=16, split_shared_rows=2, merge="final"), replace(SHAPE, kv_dtype="e5m2")),
    ("query", replace(SHAPE, dtype="bf16", head_dim_v=128)),
    (cohort(head_rows=16), replace(SHAPE, page_size=4, kv_layout="HND", kv_dtype="e5m2", dtype="bf16")),
    ("specinfer", SHAPE),
    ("flashforge", replace(SHAPE, head_dim=128)),
]


def in_fp8(tree: Tree, shape: Shape, pages: int = 95) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, and caches in the shape's kv_dtype."""
    q, k, v = tensors(tree, pages, shape)
    return q, k.to(KV_TORCH_DTYPES[shape.kv_dtype]), v.to(KV_TORCH_DTYPES[shape.kv_dtype])


@pytest.mark.parametrize(("strategy", "shape"), KERNELS, ids=str)
def test_kernels(strategy: str | Strategy, shape: Shape) -> None:
    tree, pages = in_pages(INSIDE, shape.page_size)
    options = {"k_scale": 0.25, "v_scale": torch.tensor([0.5, 2.0]), "logits_soft_cap": 20.0}
    kernel = treegen.compile(tree, strategy=strategy, shape=shape, backend="triton", **options)
    report = kernel.verify(*in_fp8(tree, shape, pages))
    assert report.passed, str(report)
    if isinstance(strategy, Strategy):
        assert "_planes" in kernel.source


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("kv_dtype", FP8)
def test_every_code_is_read_as_it_is(kv_dtype: str) -> None:
    """Four tokens of 64 codes, each alone in its tree: outputs are what codes stand for."""
    values = torch.arange(256, dtype=torch.uint8).view(KV_TORCH_DTYPES[kv_dtype]).view(4, 1, 64)
    tree = Tree.from_parents([-1] * 4, [1] * 4)
    q, keys = torch.zeros(4, 1, 64, dtype=torch.float16), torch.zeros(4, 1, 64).to(values.dtype)
    out = treegen.compile(tree, strategy="query", backend="triton")(q, keys, values)
    torch.testing.assert_close(out, values.to(q.dtype), rtol=0, atol=0, equal_nan=True)


def test_words_are_views_of_caches() -> None:
    cache = torch.arange(4 * 2 * 64, dtype=torch.uint8).view(4, 2, 64).view(torch.float8_e4m3fn)
    words = in_words(cache, cache[:, :, 4:])
    assert words is not None
    assert [tuple(one.shape) for one in words] == [(4, 2, 16), (4, 2, 15)]
    assert words[0][0, 0, 1] == 0x07060504
    assert words[1].data_ptr() == cache.data_ptr() + 4
    wider = torch.zeros(4, 2, 66, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for cut in (cache[:, :, 1:61], wider[:, :, :64], cache[:, :, :62]):
        assert in_words(cache, cut) is None


@pytest.mark.filterwarnings("ignore::treegen.ir.errors.PerformanceWarning")
@pytest.mark.parametrize("kv_dtype", FP8)
def test_caches_that_do_not_lie_in_words_are_read_by_element(kv_dtype: str) -> None:
    shape = replace(SHAPE, kv_dtype=kv_dtype)
    q, k, v = in_fp8(SMALL, shape)
    wider = torch.zeros(*k.shape[:2], 65, dtype=torch.uint8).view(k.dtype)
    wider.view(torch.uint8)[..., 1:] = k.view(torch.uint8)
    kernel = treegen.compile(SMALL, strategy="query", backend="triton")
    assert kernel.verify(q, wider[..., 1:], v).passed
    assert kernel.verify(q, k, v).passed


def test_what_is_read_in_words() -> None:
    wanted = {
        SHAPE: True, replace(SHAPE, kv_dtype="e5m2", dtype="bf16"): True, replace(SHAPE, kv_dtype="fp16"): False,
        replace(SHAPE, head_dim=80, head_dim_v=80): False,
        replace(SHAPE, head_dim=128, shared_kv=True): False, replace(SHAPE, head_dim=32, head_dim_v=32): False,
    }  # fmt: skip
    assert {shape: reads_packed_fp8(16, shape) for shape in wanted} == wanted
    assert [reads_packed_fp8(rows, SHAPE) for rows in (16, 32, 64)] == [True, True, False]
    config = kernel_config(SHAPE, target_of(90), 1)
    assert kernel_key(config, SHAPE).packed_fp8
    by_element = kernel_key(config, SHAPE, options=KernelOptions(packed_fp8=False))
    assert not by_element.packed_fp8
    assert not kernel_key(config, SHAPE, options=KernelOptions(shared_kv=True)).packed_fp8
    assert "planes" not in emit_partial(by_element).text


def test_they_compile_ahead() -> None:
    shapes = [Shape(32, 8, 128, dtype="fp16", kv_dtype=kv_dtype) for kv_dtype in FP8]
    jobs = [
        (
            arch,
            replace(
                suited_key(arch, shape, large=False), emulate_e4m3=emulates_e4m3(shape, arch), mask=mask, scaled=True
            ),
        )
        for arch in ARCHITECTURES
        for shape, mask in zip(shapes, ("none", "bits"), strict=True)
    ]
    for (architecture, key), resources in zip(jobs, compiled(jobs), strict=True):
        assert key.packed_fp8
        assert resources.stack <= 16, f"sm_{architecture} {key}"
        assert resources.shared <= target_of(architecture).shared_bytes
