"""Multi-head latent attention, absorbed: one KV head of 576, whose first 512 elements are the values."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import treegen
from support.ahead_kernels import compiled, suited_key, target_of
from support.kv_caches import INSIDE, MERGING, SMALL, in_pages, normal, tensors
from treegen import Shape, Tree, strategies
from treegen.backends import oracle
from treegen.backends.check_inputs import form_of
from treegen.codegen.aot import ARCHITECTURES
from treegen.codegen.emit import emit_partial
from treegen.codegen.kernel_signature import in_same_place
from treegen.codegen.partial_keys import KernelOptions, kernel_key
from treegen.ir.errors import InputError, ShapeError
from treegen.runtime.batch_room import batch_config
from treegen.strategies import Strategy
from treegen.target.targets import targets
from treegen.target.tile_config import kernel_config, key_slices, shared_bytes, value_is_slice
from treegen.tuning.kernel_meter import Case
from treegen.tuning.kernel_variants import kernel_sources

NAMES = (*strategies.strategy_names(), "auto")
MLA = Shape(16, 1, 576, 512, dtype="fp16", shared_kv=True)
LIKE = Shape(16, 1, 40, 32, dtype="fp32", shared_kv=True)
"""The same in small."""
SM_SCALE = 192**-0.5
MOST_STACK = 304
"""The most bytes that a thread of a kernel of 512 values may spill. On an H200 large tiles that spill so much are still
faster than smaller ones.
"""
MOST_STACK_MERGING = 1600
"""The same of those that join partials behind their loops: a tile of these is as large as that of results."""


def latent(tree: Tree, shape: Shape, pages: int = 95) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, and a cache of which the values are part."""
    q, k, _ = tensors(tree, pages, shape)
    return q, k, k[..., : shape.head_dim_v]


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("strategy", NAMES)
def test_every_strategy(strategy: str, declared: bool) -> None:
    for tree in (SMALL, INSIDE):
        for shape in (MLA, LIKE):
            q, k, v = latent(tree, shape)
            kernel = treegen.compile(
                tree, strategy=strategy, shape=shape if declared else None, backend="torch", sm_scale=SM_SCALE
            )
            report = kernel.verify(q, k, v)
            assert report.passed, str(report)
            assert kernel.shape == replace(shape, shared_kv=True)


@pytest.mark.parametrize(
    ("strategy", "shape", "page_size"),
    [
        ("cohort", MLA, 1), ("deft-flatten", LIKE, 4),
        ("query", replace(LIKE, num_qo_heads=128), 1), ("deft-node", replace(LIKE, head_dim=80, head_dim_v=80), 1),
        ("fasttree", replace(LIKE, head_dim=72, head_dim_v=40), 16), ("medusa", LIKE, 1),
        *((s, LIKE, 1) for s in MERGING),
    ],
    ids=str,
)  # fmt: skip
def test_kernels(strategy: str | Strategy, shape: Shape, page_size: int) -> None:
    shape = replace(shape, page_size=page_size)
    tree, pages = in_pages(INSIDE, page_size)
    q, k, v = latent(tree, shape, pages)
    kernel = treegen.compile(tree, strategy=strategy, shape=shape, backend="triton", sm_scale=SM_SCALE)
    report = kernel.verify(q, k, v)
    assert report.passed, str(report)


@pytest.mark.full
@pytest.mark.parametrize("strategy", NAMES)
def test_kernels_of_every_strategy(strategy: str) -> None:
    for tree in (SMALL, INSIDE):
        kernel = treegen.compile(tree, strategy=strategy, shape=MLA, backend="triton", sm_scale=SM_SCALE)
        assert kernel.verify(*latent(tree, MLA)).passed


def test_one_load_serves_keys_and_values_where_they_are_the_same() -> None:
    config = kernel_config(MLA, target_of(90), 64)
    options = [KernelOptions(shared_kv=shared) for shared in (True, False)]
    once, twice = (emit_partial(kernel_key(config, MLA, options=each)).text for each in options)
    assert "v_tile = tl.load" not in once
    assert once.count("v_tile = k_tile") == 2
    assert twice.count("v_tile = tl.load") == 2
    assert re.search(r"^    shared_kv +yes ", once, re.MULTILINE)
    assert "shared_kv" not in twice
    found = {
        dims: value_is_slice(*dims)
        for dims in ((576, 512), (64, 64), (80, 80), (80, 64), (40, 32), (576, 256), (40, 24))
    }
    assert found == {
        (576, 512): True, (64, 64): True, (80, 80): True, (80, 64): True, (40, 32): True, (576, 256): False,
        (40, 24): False,
    }  # fmt: skip
    assert key_slices(576, 512) == (512, 64)


def test_the_tensors_decide_what_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel called with values in the keys, and with values of their own, in tensors of the same form."""
    undeclared = replace(LIKE, shared_kv=False)
    kernel = treegen.compile(SMALL, strategy="cohort", shape=undeclared, backend="triton")
    loaded: list[bool] = []
    emitted = emit_partial.__wrapped__  # type: ignore[attr-defined]

    def recorded(key: object) -> object:
        loaded.append(key.shared_kv)  # type: ignore[attr-defined]
        return emitted(key)

    monkeypatch.setattr("treegen.backends.triton_program.emit_partial", recorded)
    q, k, v = latent(SMALL, LIKE)
    own = normal(*k.shape, seed=7)[..., :32]
    assert form_of(q, k, v, None) != form_of(q, k, own, None)
    for values in (v, own, v):
        out, lse = kernel(q, k, values, return_lse=True)
        expected = oracle.reference(SMALL, q, k, values)
        assert oracle.error(out, expected[0]) < 1e-5
        assert oracle.error(lse, expected[1]) < 1e-5
    assert set(loaded) == {True, False}
    assert loaded[0]
    assert kernel.shape == undeclared


def test_what_shares_memory() -> None:
    k = normal(30, 2, 40)
    assert in_same_place(k, k)
    assert in_same_place(k, k[..., :32])
    assert not in_same_place(k, k[..., 8:])
    assert not in_same_place(k[..., :32], k)
    assert not in_same_place(k, k.clone())
    assert not in_same_place(k[::2], k[:15])


def test_a_declared_shape_wants_values_in_keys() -> None:
    q, k, v = latent(SMALL, LIKE)
    kernel = treegen.compile(SMALL, shape=LIKE, backend="torch")
    kernel(q, k, v)
    for values in (v.clone(), k[..., 8:]):
        with pytest.raises(InputError, match="not the beginning of k_cache, as shared_kv says"):
            kernel(q, k, values)
    with pytest.raises(ShapeError, match="shared_kv = True"):
        Shape(16, 1, 32, 40, shared_kv=True)
    with pytest.raises(ShapeError, match="shared_kv = 1"):
        Shape(16, 1, 40, 32, shared_kv=1)
    with pytest.raises(ShapeError, match="head_dim_v = 576"):
        Shape(16, 1, 576)


def test_a_first_call_with_one_tensor_for_both_settles_nothing() -> None:
    q, k, v = tensors(SMALL, 95, Shape(4, 2, 16, dtype="fp32"))
    for backend in ("torch", "triton"):
        kernel = treegen.compile(SMALL, strategy="query", backend=backend)
        assert kernel.verify(q, k, k).passed
        assert kernel.verify(q, k, v).passed


def test_shared_values_count_once() -> None:
    undeclared = replace(MLA, shared_kv=False)
    assert MLA.kv_token_bytes == 576 * 2
    assert undeclared.kv_token_bytes == (576 + 512) * 2
    tree = Tree.parse("400(20,9*3)")
    once, twice = (treegen.compile(tree, strategy="query", shape=shape).estimate for shape in (MLA, undeclared))
    assert once.kv_unique_bytes == tree.unique_tokens * 576 * 2
    assert once.kv_hbm_bytes / once.kv_unique_bytes == twice.kv_hbm_bytes / twice.kv_unique_bytes
    target = target_of(90)
    sizes = [shared_bytes(64, 32, 2, shape, target) for shape in (MLA, undeclared)]
    assert sizes == [(64 * 576 + 64 * 32 + 2 * 32 * 576) * 2, (64 * 576 + 2 * 32 * (576 + 512)) * 2]


def test_latent_attention_can_be_measured_and_compiled_ahead() -> None:
    case = Case.of(SMALL, LIKE, torch.device("cpu"))
    assert in_same_place(case.k_cache, case.v_cache)
    shape = replace(MLA, num_qo_heads=128)
    for architecture in ARCHITECTURES:
        sources = kernel_sources(shape, target_of(architecture))
        partial = [source for source in sources if source.kernel == "partial_attention"]
        assert partial
        assert all(source.key.shared_kv for source in partial)  # type: ignore[union-attr]


@pytest.mark.parametrize("target", ["a100", "h200", "b200"])
def test_tiles_fit(target: str) -> None:
    chosen = targets()[target]
    for dtype in ("fp16", "bf16", "fp32"):
        for heads, shared, rows in itertools.product((16, 128), (False, True), (1, 64)):
            shape = Shape(heads, 1, 576, 512, dtype=dtype, shared_kv=shared)
            if dtype == "fp32" and not shared and target == "a100":
                with pytest.raises(ShapeError, match="shared memory of a100"):
                    kernel_config(shape, chosen, rows)
                continue
            config = kernel_config(shape, chosen, rows)
            assert shared_bytes(config.rows, config.tokens, config.num_stages, shape, chosen) <= chosen.shared_bytes
            assert config.rows * 512 * 4 <= 128 * 4 * 32 * config.num_warps  # half of the registers for results


LARGE_MERGING, LARGE_ONE_LOOP = {"large": True, "epilogue_merge": True}, {"large": True, "has_full_tiles": False}


def test_kernels_compile_ahead_with_little_spilling() -> None:
    shape = replace(MLA, dtype="bf16", kv_dtype="bf16")
    jobs = [(arch, suited_key(arch, shape, large=arch == 90)) for arch in ARCHITECTURES]
    for (architecture, key), resources in zip(jobs, compiled(jobs), strict=True):
        assert resources.stack <= MOST_STACK, f"sm_{architecture} {key}"
        assert resources.shared <= target_of(architecture).shared_bytes


def test_warps_divide_the_tokens_of_large_latent_tiles() -> None:
    """Weights go through shared memory only then. In turns Triton knows what holds within the loop over items."""
    target, shape = target_of(90), replace(MLA, num_qo_heads=128, dtype="bf16", kv_dtype="bf16", page_size=16)
    in_turns = kernel_key(batch_config(shape, target), shape, 1, KernelOptions(request_page=16, in_turns=True))
    for resources in compiled([(90, in_turns), (90, suited_key(90, shape, large=True))]):
        tile = in_turns.tile_rows, in_turns.tile_tokens, in_turns.num_stages
        assert resources.shared == shared_bytes(*tile, shape, target)


def test_large_tiles_of_latent_keys_are_fetched_early() -> None:
    """On Hopper, where only one thread block fits into an SM; not where Triton's loop would be another one."""
    shape = replace(MLA, num_qo_heads=128, dtype="bf16", kv_dtype="bf16", page_size=16)

    def text(architecture: int, **options: Any) -> str:
        key = suited_key(architecture, shape, large=True)
        return emit_partial(replace(key, **options)).text

    assert text(90).count("to_l2(") == 3  # its definition, and two slices of keys
    assert "if row0 >= 0:" in text(90)
    for other in (text(80), text(100), text(90, guarded=True), text(90, shared_kv=False)):
        assert "to_l2(" not in other
        assert "if row0 >= 0:" not in other


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_more_kernels_compile_ahead(architecture: int) -> None:
    jobs = [
        (architecture, suited_key(architecture, replace(MLA, num_qo_heads=heads, page_size=page_size), **options))
        for heads, page_size in ((16, 1), (128, 16))
        for options in ({"large": False}, {"large": True}, LARGE_MERGING, LARGE_ONE_LOOP)
    ]  # fmt: skip
    for (_, key), resources in zip(jobs, compiled(jobs), strict=True):
        print(f"sm_{architecture} {resources} {key}")
        assert resources.stack <= (MOST_STACK_MERGING if key.epilogue_merge else MOST_STACK), f"sm_{architecture} {key}"
        assert resources.shared <= target_of(architecture).shared_bytes
