"""Ahead-of-time compilation of what serves batches that live: step kernels, and attention kernels that read by request.

They compile for sm_80, sm_90 and sm_100, fit, and attention kernels on their tile touch no stack.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from support.ahead_kernels import compiled, target_of
from treegen import PageTable, Shape
from treegen.codegen.aot import ARCHITECTURES, Resources, device_of
from treegen.codegen.compile_counter import expected_compiles
from treegen.codegen.kernel_usage import usage
from treegen.codegen.partial_keys import KernelOptions, emulates_e4m3, kernel_key
from treegen.ir.keys import KernelKey
from treegen.runtime.batch_room import batch_config, chunk_room_of, room_of
from treegen.scoring.options import ScoreOptions, Scoring
from treegen.target.targets import takes_turns

PAGE_SIZES = (1, 16, 64, 128)
FORMS = ("block", "named", "ragged", "queries", "chunks")
"""Forms of page tables; "queries" is a block table with requests of several query rows, and "chunks" one in
batch-invariant mode.
"""
WINDOWS = (-1, 37)
ROWS, TOKENS = 12, 4096
_MOST_STACK = 64
"""Bytes per thread that step kernels, which run once per decode step, may spill."""

StepJob = tuple[int, int, int, str]
"""Architecture, page size, window and form of table."""


def windowed(window: int) -> Scoring | None:
    """What is done to scores for a window."""
    return None if window < 0 else Scoring.of(ScoreOptions(window_left=window))


def attention_key(
    architecture: int, page_size: int, window: int, layout: str, heads: tuple[int, int], kv_dtype: str = "bf16",
    head_dim: int = 128,
) -> KernelKey:  # fmt: skip
    """The key of the one attention kernel that serves a batch's plans; HND pages are not by slot."""
    shape = Shape(*heads, head_dim, dtype="bf16", kv_dtype=kv_dtype, page_size=page_size, kv_layout=layout)
    scoring = windowed(window)
    options = KernelOptions(
        request_page=page_size,
        in_turns=takes_turns(architecture),
        scoring=None if scoring is None else scoring.code,
        emulate_e4m3=emulates_e4m3(shape, architecture),
    )
    config = batch_config(shape, target_of(architecture), window)
    return kernel_key(config, shape, page_size if layout == "HND" else 1, options)


def compile_steps(job: StepJob) -> list[Resources]:
    """What both step kernels take; runs in a process where Triton does not interpret."""
    from treegen.backends.batch_form import BatchForm
    from treegen.backends.request_program import RequestProgram
    from treegen.backends.step_launches import step_launches

    architecture, page_size, window, form = job
    shape = Shape(32, 8, 128, dtype="bf16", page_size=page_size)
    target, scoring = target_of(architecture), windowed(window)
    config = batch_config(shape, target, window)
    most = 8 * ROWS if form == "queries" else None
    room = room_of(shape, config, ROWS, TOKENS, 2 * target.sms, most, positions=scoring is not None)
    if form == "chunks":
        room = chunk_room_of(shape, config, ROWS, TOKENS, 512, 2 * target.sms, positions=scoring is not None)
    width, ints = TOKENS // page_size, torch.int32
    table = torch.zeros(ROWS * width if form == "ragged" else (ROWS, width), dtype=ints)
    named = torch.zeros(ROWS, dtype=ints) if form == "named" else None
    indptr = torch.zeros(ROWS + 1, dtype=ints) if form == "ragged" else None
    queries = torch.zeros(ROWS + 1, dtype=ints) if form == "queries" else None
    pages = PageTable(table, torch.zeros(ROWS, dtype=ints), 100, named, indptr, queries)
    made_for = BatchForm(config, room, shape, pages, TOKENS, None, scoring)
    tables, seats = RequestProgram(made_for).tables, torch.zeros(2, ROWS, dtype=ints)
    found = []
    for launch in step_launches(made_for, tables, seats, architecture):
        with device_of(architecture), expected_compiles():
            made: Any = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
        registers, stack = usage(made.asm["cubin"])
        found.append(Resources(registers, stack, made.metadata.shared, 0))
    return found


def check_steps(jobs: list[StepJob]) -> None:
    """Step kernels compile and fit. The assembler spills some registers of them where it aims at more warps per SM."""
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            results = list(pool.map(compile_steps, jobs))
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted
    for job, (read, settle) in zip(jobs, results, strict=True):
        print(job, read, settle)
        for resources in (read, settle):
            assert resources.shared <= target_of(job[0]).shared_bytes
            assert resources.stack <= _MOST_STACK, f"{job}: {resources}"


def check_attention(jobs: list[tuple[int, KernelKey]]) -> None:
    """Attention kernels compile, fit and touch no stack."""
    for (architecture, key), resources in zip(jobs, compiled(jobs), strict=True):
        print(architecture, resources, key)
        assert resources.shared <= target_of(architecture).shared_bytes
        assert (resources.stack, resources.in_loops) == (0, 0), f"sm_{architecture} {key}: {resources}"


def test_the_usual_attention_kernels_compile() -> None:
    jobs = [(90, attention_key(90, page_size, -1, "NHD", (32, 8))) for page_size in (1, 16)]
    check_attention([*jobs, *((arch, attention_key(arch, 16, -1, "NHD", (32, 8))) for arch in (80, 100))])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_for_caches_in_8_bits_compile(architecture: int) -> None:
    """With several KV heads, and with one, where tiles have more tokens."""
    pairs = [((32, 8), "e4m3"), ((8, 1), "e5m2" if architecture == 80 else "e4m3")]
    check_attention([(architecture, attention_key(architecture, 16, -1, "NHD", *pair)) for pair in pairs])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_for_short_windows_compile(architecture: int) -> None:
    """Where values have many dims, and where they have few."""
    kinds: tuple[tuple[tuple[int, int], int], ...] = (((16, 8), 256), ((64, 8), 64))
    check_attention(
        [(architecture, attention_key(architecture, 16, 127, "NHD", heads, head_dim=dim)) for heads, dim in kinds]
    )


def test_the_usual_step_kernels_compile() -> None:
    check_steps(
        [
            (80, 16, -1, "block"),
            (90, 1, 37, "ragged"),
            (90, 16, -1, "named"),
            (100, 128, 37, "block"),
            (90, 16, 37, "queries"),
            (90, 16, -1, "chunks"),
            (100, 1, 37, "chunks"),
        ]
    )


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("heads", [(32, 8), (8, 1)])
def test_every_attention_kernel_compiles(architecture: int, heads: tuple[int, int]) -> None:
    variants = [each for each in itertools.product(PAGE_SIZES, WINDOWS, ("NHD", "HND")) if each[::2] != (1, "HND")]
    check_attention([(architecture, attention_key(architecture, *each, heads)) for each in variants])


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_step_kernel_compiles(architecture: int) -> None:
    check_steps([(architecture, *each) for each in itertools.product(PAGE_SIZES, WINDOWS, FORMS)])
