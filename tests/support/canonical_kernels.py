"""Kernels that between them have every branch of the templates: what is held against text and machine code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from support.ahead_kernels import suited_key, target_of
from treegen import Shape
from treegen.codegen.aot import ARCHITECTURES
from treegen.codegen.merge_forms import merge_key_in_turns, merge_keys
from treegen.codegen.partial_keys import KernelOptions, emulates_e4m3, kernel_key
from treegen.ir.keys import KernelKey, MergeKey, ScoreCode
from treegen.runtime.batch_room import batch_config
from treegen.scoring.options import ScoreOptions, Scoring
from treegen.target.targets import takes_turns

BF16 = Shape(32, 8, 128, dtype="bf16")
MLA = Shape(16, 1, 576, 512, dtype="bf16", shared_kv=True)
E4M3 = replace(BF16, kv_dtype="e4m3")
E5M2 = replace(BF16, kv_dtype="e5m2")
KINDS = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32,
)  # fmt: skip


class CanonicalKernel(NamedTuple):
    """A kernel and what it is compiled for: a compute capability (times ten) and the type of partial results."""

    architecture: int
    key: KernelKey | MergeKey
    partial_dtype: str = "fp32"


def code(**options: Any) -> ScoreCode:
    scoring = Scoring.of(ScoreOptions(**options))
    assert scoring is not None
    assert scoring.code is not None
    return scoring.code


def reading() -> ScoreCode:
    tables = [torch.zeros(4, 4, 4, dtype=kind) for kind in KINDS]
    return code(score_mod=lambda score, b, h, q, t: sum((table[b, h, t] for table in tables), score))


def everything() -> ScoreCode:
    bias = torch.zeros(100, 4)
    return code(
        score_mod=lambda score, b, h, q, t: score * torch.where((b == 1) | (t % 5 == 0), 0.5, 1.0) + bias[t, h],
        mask_mod=lambda b, h, q, t: t != 3,
        logits_soft_cap=30.0,
        alibi_slopes=torch.zeros(32),
        window_left=128,
    )


def fp8(architecture: int, shape: Shape, *, large: bool, **tile: Any) -> KernelKey:
    return replace(
        suited_key(architecture, shape, large=large, **tile),
        scaled=True,
        emulate_e4m3=emulates_e4m3(shape, architecture),
    )


def batch(architecture: int, page_size: int, layout: str = "NHD", scoring: ScoreCode | None = None) -> KernelKey:
    shape = replace(BF16, page_size=page_size, kv_layout=layout)
    options = KernelOptions(request_page=page_size, in_turns=takes_turns(architecture), scoring=scoring)
    return kernel_key(batch_config(shape, target_of(architecture)), shape, page_size if layout == "HND" else 1, options)


def _everywhere(arch: int) -> Iterator[tuple[str, KernelKey]]:
    large = suited_key(arch, BF16, large=True)
    for mask in ("none", "interval", "bits"):
        yield f"large {mask}", replace(large, mask=mask)
    for mask in ("interval", "bits"):
        yield f"large {mask} by slot", replace(large, mask=mask, run_tokens=1)
    for mask in ("none", "interval"):
        yield f"small {mask}", suited_key(arch, BF16, large=False, mask=mask)
    yield "dealt", replace(large, work_list=True, run_tokens=32)
    yield "dealt by slot", replace(large, work_list=True, run_tokens=1, mask="none")
    yield "merging", replace(large, epilogue_merge=True)
    yield "merging bits by slot", replace(large, epilogue_merge=True, mask="bits", run_tokens=1)
    yield "waiting", replace(large, fused_merge=True)
    yield "one loop", replace(large, has_full_tiles=False)
    yield "one loop waiting", replace(large, has_full_tiles=False, fused_merge=True)
    yield "recorded", replace(large, recorded=True)
    yield "recorded dealt", replace(large, work_list=True, run_tokens=32, recorded=True)
    yield "recorded waiting", replace(large, fused_merge=True, recorded=True)
    yield "e4m3", fp8(arch, E4M3, large=True)
    yield "e4m3 words", fp8(arch, E4M3, large=False)
    yield "e5m2 words", fp8(arch, E5M2, large=False, mask="bits")
    yield "mla", suited_key(arch, MLA, large=arch == 90)
    yield "dims 192 and 128", suited_key(arch, replace(BF16, head_dim=192), large=True)
    yield "capped", replace(large, scoring=code(logits_soft_cap=20.0))
    yield "window", replace(large, scoring=code(window_left=37))
    yield "reads all types", replace(large, scoring=reading(), sinks=True)
    yield "everything guarded", replace(large, scoring=everything(), sinks=True, guarded=True, mask="none")
    yield "sinks merging", replace(large, sinks=True, epilogue_merge=True)
    yield "request page 1", batch(arch, 1)
    yield "request page 16", batch(arch, 16)
    yield "request page 16 HND", batch(arch, 16, "HND")
    yield "pages", suited_key(arch, replace(BF16, page_size=16), large=True)


def _once() -> Iterator[tuple[int, str, KernelKey]]:
    large = suited_key(90, BF16, large=True)
    yield 90, "e5m2", fp8(90, E5M2, large=True)
    yield 90, "words merging", fp8(90, E4M3, large=False, epilogue_merge=True)
    yield 90, "words capped", replace(fp8(90, E4M3, large=False), scoring=code(logits_soft_cap=20.0))
    yield 90, "scaled", replace(large, scaled=True)
    yield 90, "e4m3 guarded", replace(fp8(90, E4M3, large=True), scoring=everything(), guarded=True)
    yield 90, "scoring dealt by slot", replace(large, scoring=everything(), work_list=True, run_tokens=1)
    yield 90, "bits as a tile of runs", replace(large, mask="bits", run_tokens=8)
    yield 90, "many runs", replace(large, run_tokens=8, epilogue_merge=True)
    yield (
        90,
        "pages by slot",
        suited_key(90, replace(BF16, page_size=16), large=True, run_tokens=1, epilogue_merge=True),
    )
    yield 90, "request page 4", batch(90, 4)
    yield 90, "request page 64", batch(90, 64)
    yield 90, "request page 16 window", batch(90, 16, "NHD", code(window_left=37))
    yield 90, "request page 4 HND window", batch(90, 4, "HND", code(window_left=37))
    yield 90, "mla small", suited_key(90, MLA, large=False)
    yield 90, "mla of 128 heads", suited_key(90, replace(MLA, num_qo_heads=128), large=True)
    yield 90, "mla merging in pages", suited_key(90, replace(MLA, page_size=16), large=True, epilogue_merge=True)
    yield 90, "mla e4m3", fp8(90, replace(MLA, kv_dtype="e4m3"), large=True)
    yield 90, "mla guarded", replace(suited_key(90, MLA, large=True), guarded=True, scoring=everything())
    yield 90, "mla apart", suited_key(90, replace(MLA, shared_kv=False), large=True)
    yield 90, "dims 176 and 128", suited_key(90, replace(BF16, head_dim=176), large=True)
    yield 90, "dims 80, group 3", suited_key(90, Shape(24, 8, 80, dtype="bf16"), large=True, epilogue_merge=True)
    yield 90, "dims 80, waiting", suited_key(90, Shape(32, 8, 80, dtype="fp16"), large=True, fused_merge=True)
    yield 90, "dims 64, group 1", suited_key(90, Shape(8, 8, 64, dtype="fp16"), large=True)
    yield 80, "dims 64, group 7", suited_key(80, Shape(28, 4, 64, dtype="fp16"), large=True, fused_merge=True)
    yield 100, "dims 96, group 8", suited_key(100, Shape(64, 8, 96, dtype="fp16"), large=True)
    yield 90, "dims 256, group 16", suited_key(90, Shape(16, 1, 256, dtype="bf16"), large=True)
    yield (
        100,
        "dims 256, group 8, merging",
        suited_key(100, Shape(64, 8, 256, dtype="fp16"), large=True, epilogue_merge=True),
    )
    yield 90, "group 32, small", suited_key(90, Shape(32, 1, 128, dtype="bf16"), large=True, rows=16, fused_merge=True)
    yield 90, "fp32, dims 64", suited_key(90, Shape(8, 8, 64, dtype="fp32"), large=False)
    yield 80, "fp32, dims 128", suited_key(80, Shape(32, 8, 128, dtype="fp32"), large=True, epilogue_merge=True)
    yield 90, "fp32, waiting", suited_key(90, Shape(32, 8, 64, dtype="fp32"), large=True, fused_merge=True)


@cache
def canonical_kernels() -> dict[str, CanonicalKernel]:
    """The kernels by name."""
    found: dict[str, CanonicalKernel] = {}
    for arch in ARCHITECTURES:
        everywhere = dict(_everywhere(arch))
        found |= {f"sm_{arch} {name}": CanonicalKernel(arch, key) for name, key in everywhere.items()}
        for name in ("merging", "waiting"):
            found[f"sm_{arch} {name}, partials in bf16"] = CanonicalKernel(arch, everywhere[name], "bf16")
        found[f"sm_{arch} merge"] = CanonicalKernel(arch, merge_keys(BF16)[0])
        found[f"sm_{arch} recorded merge"] = CanonicalKernel(arch, replace(merge_keys(BF16)[0], recorded=True))
    found |= {name: CanonicalKernel(arch, key) for arch, name, key in _once()}
    for number, merge in enumerate(merge_keys(BF16)[1:]):
        found[f"merge {number}"] = CanonicalKernel(90, merge)
    for fixed in (False, True):
        in_turns = merge_key_in_turns(merge_keys(BF16)[-1], fixed=fixed)
        found["fixed merge in turns" if fixed else "merge in turns"] = CanonicalKernel(90, in_turns)
    found["merge with sinks"] = CanonicalKernel(90, replace(merge_keys(BF16)[0], sinks=True))
    found["merge of 256 dims"] = CanonicalKernel(90, max(merge_keys(Shape(8, 8, 256)), key=lambda key: key.num_warps))
    padded = merge_keys(Shape(8, 8, 80, dtype="fp16"))[-1]
    found["merge into partial slots, with sinks"] = CanonicalKernel(90, replace(padded, sinks=True))
    return found
