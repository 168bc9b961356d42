"""Kernels compiled ahead of time for tests, in processes where Triton does not interpret."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context

from treegen import Shape
from treegen.codegen.aot import Resources, compile_ahead
from treegen.codegen.emit import emit_partial
from treegen.codegen.partial_keys import kernel_key
from treegen.ir.keys import KernelKey
from treegen.target.targets import Target, targets
from treegen.target.tile_config import kernel_config

TARGETS = {80: "a100", 90: "h200", 100: "b200"}


def target_of(architecture: int) -> Target:
    """The target that stands for a compute capability (times ten)."""
    return targets()[TARGETS[architecture]]


def suited_key(architecture: int, shape: Shape, *, large: bool, **tile: object) -> KernelKey:
    """The key of the kernel that suits few or many rows; masked, unless `tile` says otherwise."""
    chosen = kernel_config(shape, target_of(architecture), 64 if large else 1)
    return kernel_key(replace(chosen, **{"mask": "interval", **tile}), shape, shape.page_size)


def compiled(jobs: list[tuple[int, KernelKey]], partial_dtype: str = "fp32") -> list[Resources]:
    """What kernels take on these architectures, with partial results of this type."""
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            return list(pool.map(_compiled, jobs, repeat(partial_dtype)))
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


def _compiled(job: tuple[int, KernelKey], partial_dtype: str) -> Resources:
    return compile_ahead(emit_partial(job[1]), job[0], partial_dtype)
