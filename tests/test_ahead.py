"""Ahead-of-time compilation of kernel variants for sm_80, sm_90 and sm_100: they compile, do not spill, and fit."""

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from treegen import Shape
from treegen.codegen.aot import ARCHITECTURES, Resources, compile_ahead
from treegen.codegen.emit import emit_merge, emit_partial, fixed_merge_key, kernel_key, merge_keys
from treegen.ir.keys import KernelKey, MergeKey
from treegen.ir.schedule import TileMask
from treegen.scoring.options import ScoreOptions, Scoring
from treegen.target.targets import targets
from treegen.target.tile_config import DEALT_BLOCK_TOKENS, fixed_class, tile_class

TARGETS = {80: "a100", 90: "h200", 100: "b200"}
HEADS = {1: (8, 8), 3: (24, 8), 4: (32, 8), 8: (64, 8)}


def partial_key(
    architecture: int, dtype: str, head_dim: int, group: int, large: bool, mask: TileMask, block: int, page_size: int,
    dealt: bool = False, merging: bool = False,
) -> KernelKey:  # fmt: skip
    """The key that compile would use on this architecture."""
    shape = Shape(*HEADS[group], head_dim, dtype=dtype)
    rows = 64 if large else 1
    tile = tile_class(shape, targets()[TARGETS[architecture]], rows)
    block = DEALT_BLOCK_TOKENS if dealt and block > 1 else block
    chosen = replace(tile, mask=mask, block=min(block, tile.tokens), dealt=dealt, merging=merging)
    return kernel_key(chosen, shape, page_size)


DTYPES, DIMS, GROUPS = ("fp16", "bf16", "fp32"), (64, 80, 96, 128, 256), (1, 3, 4, 8)
MASKS: tuple[TileMask, ...] = ("none", "interval", "bits")
FLAGS = ((False, True), MASKS, (16, 1), (1, 16), (False, True), (False, True))
# Lists of work need a single stage, so nothing that works off them merges partials of an earlier one.
EVERY = [case for case in itertools.product(ARCHITECTURES, DTYPES, DIMS, GROUPS, *FLAGS) if not (case[-2] and case[-1])]


def covering() -> list[tuple[int, KernelKey | MergeKey]]:
    """At most 220 (architecture, key) pairs: every pair of values of two parameters occurs, per architecture, and
    every kind of merge kernel.
    """
    chosen: list[tuple[int, KernelKey | MergeKey]] = []
    for architecture in ARCHITECTURES:
        rest = [case for case in EVERY if case[0] == architecture]
        missing = {pair for case in rest for pair in pairs(case)}
        while missing:
            best = max(rest, key=lambda case: len(missing & pairs(case)))
            missing -= pairs(best)
            chosen.append((architecture, partial_key(*best)))
        forms = zip(itertools.product(DTYPES, (80, 128, 256)), itertools.count())
        of_shapes = [(merge_keys(Shape(8, 8, dim, dtype=dtype)), number) for (dtype, dim), number in forms]
        chosen += [(architecture, key) for keys, number in of_shapes for key in keys[number % 3 :: 3]]
    return chosen


def pairs(case: tuple[object, ...]) -> set[tuple[int, object, int, object]]:
    """All pairs of parameter values in a case, with their places."""
    return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(1, len(case)), 2)}


def compile_one(job: tuple[int, KernelKey | MergeKey]) -> Resources:
    """Compiles one variant; runs in a process of its own kind, without TRITON_INTERPRET."""
    architecture, key = job
    source = emit_partial(key) if isinstance(key, KernelKey) else emit_merge(key)
    return compile_ahead(source, architecture)


def compiled(jobs: list[tuple[int, KernelKey | MergeKey]]) -> Iterator[tuple[int, KernelKey | MergeKey, Resources]]:
    """The resources of all jobs, from two processes in which kernels are really compiled."""
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            for (architecture, key), resources in zip(jobs, pool.map(compile_one, jobs), strict=True):
                yield architecture, key, resources
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


def check(jobs: list[tuple[int, KernelKey | MergeKey]]) -> None:
    """Prints what every variant takes; shared memory within the target, and for 16-bit types up to head dim 128 no
    stack in loops over KV, and outside of them at most four registers' worth for thread blocks that work off lists or
    merge, twelve for those that merge where tokens are gathered one by one, and else none.
    """
    for architecture, key, resources in compiled(jobs):
        print(
            f"sm_{architecture} registers {resources.registers} stack {resources.stack} shared {resources.shared} {key}"
        )
        assert resources.shared <= targets()[TARGETS[architecture]].shared_bytes
        if key.dtype != "fp32" and key.head_dim_v <= 128:
            does_more = isinstance(key, KernelKey) and (key.dealt or key.merging)
            gathers = isinstance(key, KernelKey) and key.merging and key.block_tokens == 1
            most = 48 if gathers else 16 if does_more else 0
            assert resources.stack <= most, f"sm_{architecture} {key}"
            assert resources.in_loops == 0, f"sm_{architecture} {key}"


def test_the_usual_variants_compile_for_every_architecture() -> None:
    usual = itertools.product(ARCHITECTURES, (False, True))
    check(
        [(arch, partial_key(arch, "bf16", 128, 4, True, "interval", 16, 1, False, merging)) for arch, merging in usual]
    )


@pytest.mark.full
@pytest.mark.parametrize("block", [1, 16])
def test_the_kernels_of_batch_invariant_plans_compile_for_every_architecture(block: int) -> None:
    shape = Shape(32, 8, 128, dtype="bf16")
    tiles = {arch: fixed_class(shape, targets()[TARGETS[arch]], block) for arch in ARCHITECTURES}
    check([(arch, kernel_key(tile, shape)) for arch, tile in tiles.items()])
    check([(arch, fixed_merge_key(shape)) for arch in ARCHITECTURES[: 3 if block == 1 else 0]])


def test_the_covering_set_is_small_and_covers() -> None:
    jobs = covering()
    assert len(jobs) <= 220
    for architecture in ARCHITECTURES:
        keys = [key for arch, key in jobs if arch == architecture and isinstance(key, KernelKey)]
        assert {(key.dtype, key.head_dim) for key in keys} == set(itertools.product(DTYPES, DIMS))
        flags = {(key.mask, key.block_tokens > 1, key.page_size > 1, key.dealt, key.merging) for key in keys}
        for place, values in itertools.combinations(enumerate((set(MASKS), *[{False, True}] * 4)), 2):
            pairs_found = {(flag[place[0]], flag[values[0]]) for flag in flags}
            never = {(True, True)} if (place[0], values[0]) == (3, 4) else set()
            assert pairs_found == set(itertools.product(place[1], values[1])) - never


def scored_key(architecture: int, *, reads: bool) -> KernelKey:
    """The key of a kernel whose scores depend on everything that they can, and that reads tensors of every type."""
    kinds = (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32,
    ) if reads else ()  # fmt: skip
    tables = [torch.zeros(4, 4, 4, dtype=kind) for kind in kinds]

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return sum((table[b, h, kv_idx] for table in tables), score)

    options = ScoreOptions(score_mod, None, 30.0, torch.zeros(32), 128, torch.zeros(32))
    scoring = Scoring.of(options)
    assert scoring is not None
    base = partial_key(architecture, "bf16", 128, 4, True, "interval", 16, 1, False, not reads)
    return replace(base, scoring=scoring.code, sinks=True)


def test_scored_kernels_compile_for_every_architecture() -> None:
    merge = replace(merge_keys(Shape(8, 8, 128))[0], sinks=True)
    jobs: list[tuple[int, KernelKey | MergeKey]] = [(90, merge), (90, scored_key(90, reads=False))]
    jobs += [(architecture, scored_key(architecture, reads=True)) for architecture in ARCHITECTURES]
    jobs += [
        (architecture, replace(scored_key(architecture, reads=False), guarded=True, mask="none"))
        for architecture in ARCHITECTURES
    ]
    for architecture, key, resources in compiled(jobs):
        assert resources.shared <= targets()[TARGETS[architecture]].shared_bytes
        if isinstance(key, MergeKey) or not key.scoring.captured[1:]:
            assert resources.stack <= 16, f"sm_{architecture} {key}"  # nine tensors at once do spill


@pytest.mark.full
def test_rows_that_heads_do_not_fill_spill_nothing_where_pages_are_gathered() -> None:
    forms = itertools.product(ARCHITECTURES, (False, True))
    check(
        [(arch, partial_key(arch, "bf16", 64, 3, True, "interval", 1, 16, False, merging)) for arch, merging in forms]
    )


@pytest.mark.full
def test_the_covering_set_compiles() -> None:
    check(covering())


def every_variant(architecture: int, dtype: str, head_dim: int) -> list[tuple[int, KernelKey | MergeKey]]:
    """All keys of an architecture, a type and a head dim."""
    return [(architecture, partial_key(*case)) for case in EVERY if case[:3] == (architecture, dtype, head_dim)]


@pytest.mark.aot_all
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", DIMS)
def test_every_variant_compiles(architecture: int, dtype: str, head_dim: int) -> None:
    check(every_variant(architecture, dtype, head_dim))


@pytest.mark.aot_all
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [dim for dim in DIMS if dim <= 128])
def test_no_variant_touches_the_stack_in_loops_over_kv(architecture: int, dtype: str, head_dim: int) -> None:
    for _, key, resources in compiled(every_variant(architecture, dtype, head_dim)):
        assert resources.in_loops == 0, f"sm_{architecture} {key}"
