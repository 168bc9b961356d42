"""Ahead-of-time compilation of kernel variants for sm_80, sm_90 and sm_100: they compile, do not spill, and fit."""

import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from treegen import Shape
from treegen.codegen.aot import ARCHITECTURES, Resources, compile_ahead
from treegen.codegen.emit import emit_merge, emit_partial
from treegen.codegen.merge_forms import invariant_merge_key, merge_keys
from treegen.codegen.partial_keys import kernel_key
from treegen.ir.kernel_config import TileMask
from treegen.ir.keys import KernelKey, MergeKey
from treegen.scoring.options import ScoreOptions, Scoring
from treegen.target.targets import targets
from treegen.target.tile_config import WORK_LIST_RUN_TOKENS, invariant_config, kernel_config

TARGETS = {80: "a100", 90: "h200", 100: "b200"}
HEADS = {1: (8, 8), 3: (24, 8), 4: (32, 8), 8: (64, 8)}


def partial_key(
    architecture: int, dtype: str, head_dim: int, group: int, large: bool, mask: TileMask, block: int, page_size: int,
    dealt: bool = False, merging: bool = False,
) -> KernelKey:  # fmt: skip
    """The key that `treegen.compile` would use on this architecture."""
    shape = Shape(*HEADS[group], head_dim, dtype=dtype)
    rows = 64 if large else 1
    config = kernel_config(shape, targets()[TARGETS[architecture]], rows)
    block = WORK_LIST_RUN_TOKENS if dealt and block > 1 else block
    chosen = replace(config, mask=mask, run_tokens=min(block, config.tokens), work_list=dealt, epilogue_merge=merging)
    return kernel_key(chosen, shape, page_size)


DTYPES, DIMS, GROUPS = ("fp16", "bf16", "fp32"), (64, 80, 96, 128, 256), (1, 3, 4, 8)
MASKS: tuple[TileMask, ...] = ("none", "interval", "bits")
FLAGS = ((False, True), MASKS, (16, 1), (1, 16), (False, True), (False, True))
# Lists of work need a single round, so nothing that works off them merges partials of an earlier one.
EVERY = [case for case in itertools.product(ARCHITECTURES, DTYPES, DIMS, GROUPS, *FLAGS) if not (case[-2] and case[-1])]


Case = tuple[object, ...]
STACK_FILE = Path(__file__).parent / "stack_bytes.json"
"""Bytes of stack that variants take beyond what `stack_limit` allows, by `case_text`: those that are known."""


def covering(strength: int) -> list[Case]:
    """Cases in which all values of any `strength` parameters occur together, per architecture, where they can."""
    chosen: list[Case] = []
    for architecture in ARCHITECTURES:
        found = {case: combined(case, strength) for case in EVERY if case[0] == architecture}
        missing = set().union(*found.values())
        while missing:
            best = max(found, key=lambda case: len(missing & found[case]))
            missing -= found[best]
            chosen.append(best)
    return chosen


def combined(case: Case, strength: int) -> set[tuple[tuple[int, object], ...]]:
    """All combinations of the values of `strength` parameters of a case, with their places."""
    return set(itertools.combinations(enumerate(case[1:]), strength))


def covering_jobs() -> list[tuple[int, KernelKey | MergeKey]]:
    """At most 220 (architecture, key) pairs: all pairs of values of two parameters, and every kind of merge kernel."""
    chosen: list[tuple[int, KernelKey | MergeKey]] = [(case[0], partial_key(*case)) for case in covering(2)]
    for architecture in ARCHITECTURES:
        forms = zip(itertools.product(DTYPES, (80, 128, 256)), itertools.count())
        of_shapes = [(merge_keys(Shape(8, 8, dim, dtype=dtype)), number) for (dtype, dim), number in forms]
        chosen += [(architecture, key) for keys, number in of_shapes for key in keys[number % 3 :: 3]]
    return chosen


def case_text(case: Case) -> str:
    """A case as a line of words."""
    architecture, dtype, head_dim, group, large, mask, run, page_size, dealt, merging = case
    words = [f"sm_{architecture}", dtype, f"head_dim {head_dim}", f"group {group}", "large" if large else "small", mask]
    words += [
        f"runs of {run}",
        f"pages of {page_size}",
        *["from a work list"] * bool(dealt),
        *["merging"] * bool(merging),
    ]
    return ", ".join(map(str, words))


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


def stack_limit(key: KernelKey | MergeKey) -> int:
    """Bytes of stack that a variant of a 16-bit type and a head dim of at most 128 may take outside of loops over KV:
    four registers for thread blocks that work off lists or merge, twelve for those that merge where tokens are
    gathered one by one, and else none.
    """
    does_more = isinstance(key, KernelKey) and (key.work_list or key.epilogue_merge)
    gathers = isinstance(key, KernelKey) and key.epilogue_merge and key.run_tokens == 1
    return 48 if gathers else 16 if does_more else 0


def check(jobs: list[tuple[int, KernelKey | MergeKey]]) -> None:
    """Prints the resources of each variant. Shared memory fits the target. Variants of 16-bit types with head dims of
    at most 128 take no stack in loops over KV, and outside of them at most `stack_limit`.
    """
    for architecture, key, resources in compiled(jobs):
        print(
            f"sm_{architecture} registers {resources.registers} stack {resources.stack} shared {resources.shared} {key}"
        )
        assert resources.shared <= targets()[TARGETS[architecture]].shared_bytes
        if key.dtype != "fp32" and key.head_dim_v <= 128:
            assert resources.stack <= stack_limit(key), f"sm_{architecture} {key}"
            assert resources.in_loops == 0, f"sm_{architecture} {key}"


def test_the_usual_variants_compile_for_every_architecture() -> None:
    usual = itertools.product(ARCHITECTURES, (False, True))
    check(
        [(arch, partial_key(arch, "bf16", 128, 4, True, "interval", 16, 1, False, merging)) for arch, merging in usual]
    )


def test_kernels_that_record_compile_for_every_architecture() -> None:
    jobs: list[tuple[int, KernelKey | MergeKey]] = []
    for arch in ARCHITECTURES:
        jobs.append((arch, replace(partial_key(arch, "bf16", 128, 4, True, "interval", 16, 1), recorded=True)))
        jobs.append((arch, replace(invariant_merge_key(Shape(32, 8, 128, dtype="bf16")), recorded=True)))
    check(jobs)


@pytest.mark.full
@pytest.mark.parametrize("block", [1, 16])
def test_the_kernels_of_batch_invariant_plans_compile_for_every_architecture(block: int) -> None:
    shape = Shape(32, 8, 128, dtype="bf16")
    tiles = {arch: invariant_config(shape, targets()[TARGETS[arch]], block) for arch in ARCHITECTURES}
    check([(arch, kernel_key(config, shape)) for arch, config in tiles.items()])
    check([(arch, invariant_merge_key(shape)) for arch in ARCHITECTURES[: 3 if block == 1 else 0]])


def test_the_covering_set_is_small_and_covers() -> None:
    jobs = covering_jobs()
    assert len(jobs) <= 228
    for architecture in ARCHITECTURES:
        keys = [key for arch, key in jobs if arch == architecture and isinstance(key, KernelKey)]
        assert {(key.dtype, key.head_dim) for key in keys} == set(itertools.product(DTYPES, DIMS))
        flags = {(key.mask, key.run_tokens > 1, key.page_size > 1, key.work_list, key.epilogue_merge) for key in keys}
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
    check(covering_jobs())


@pytest.mark.full
def test_any_three_values_occur_together() -> None:
    cases = covering(3)
    assert len(cases) <= 250
    for architecture in ARCHITECTURES:
        found = set().union(*(combined(case, 3) for case in cases if case[0] == architecture))
        assert found == set().union(*(combined(case, 3) for case in EVERY if case[0] == architecture))


@pytest.mark.aot_all
def test_variants_compile_in_any_combination_of_three_values() -> None:
    """Shared memory fits, no variant of a 16-bit type takes stack in loops, and outside of them those of STACK_FILE
    alone take more than `stack_limit`, as many bytes as it says.
    """
    cases = covering(3)
    jobs: list[tuple[int, KernelKey | MergeKey]] = [(case[0], partial_key(*case)) for case in cases]
    beyond: dict[str, int] = {}
    in_loops: list[str] = []
    for case, (architecture, key, resources) in zip(cases, compiled(jobs), strict=True):
        print(case_text(case), resources)
        assert resources.shared <= targets()[TARGETS[architecture]].shared_bytes
        if key.dtype != "fp32" and key.head_dim_v <= 128:
            if resources.stack > stack_limit(key):
                beyond[case_text(case)] = resources.stack
            if resources.in_loops:
                in_loops.append(case_text(case))
    print(json.dumps(beyond, indent=2))
    assert not in_loops
    assert beyond == json.loads(STACK_FILE.read_text())
