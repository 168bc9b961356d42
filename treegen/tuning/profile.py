"""Profiling: the times of single tasks on the current GPU, as the cost grid of a target (FlashForge, section 5.2).

A task is a number of query head rows that attend to a run of KV tokens, for one KV head, in one thread block. The paper
measures one thread block alone, including its start. Here the device is kept full of thread blocks with tasks of one
kind, all on the same KV, and the cost of a task is the time that one more of them adds to every thread block: such
costs add up in a list of tasks. They include the time that thread blocks on one SM cost one another, but neither the
launch nor KV from device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields, replace

import numpy as np
import torch

from treegen.backends.devices import current_target
from treegen.backends.triton_program import TritonProgram
from treegen.codegen.compile_counter import expected_compiles
from treegen.ir.arrays import frozen
from treegen.ir.errors import BackendError
from treegen.ir.plan import Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.schedule.pipeline import planned_device_schedule
from treegen.target.cost_grid import CostGrid
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.tile_config import kernel_config, resident_blocks
from treegen.tuning.timing import median_us

ROWS = (1, 4, 16, 17, 32, 64)
"""Knots in query head rows; 17 is the first that takes the larger of two tiles."""
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Knots in KV tokens."""
HEAD_DIM = 128
_TASKS = (1, 4)  # tasks of each thread block in the two launches that are compared
_LEAST_US = 0.001
_OnTask = Callable[[], None]


def measure_grid(target: Target, repeats: int = 30, on_task: _OnTask | None = None) -> CostGrid:
    """Measures the grid of the current CUDA device: medians on a cold L2, fp16, head_dim 128.

    Args:
        target: The target that the device is.
        repeats: Timed calls.
        on_task: Called as `on_task()` after every measured task.

    Raises:
        BackendError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise BackendError("device", "cpu", "has no CUDA device to measure", "run it on a machine with a GPU")
    lines: list[tuple[float, ...]] = []
    for tokens in TOKENS:
        line: list[float] = []
        for rows in ROWS:
            line.append(_task_us(rows, tokens, target, repeats))
            if on_task:
                on_task()
        lines.append(tuple(line))
    source = f"treegen profile on {torch.cuda.get_device_name()}: device full of equal tasks, fp16, head_dim 128"
    return CostGrid(ROWS, TOKENS, tuple(lines), source)


def _task_us(rows: int, tokens: int, target: Target, repeats: int) -> float:
    """Returns the microseconds that one more task adds to every thread block that the target holds."""
    few, many = _TASKS
    more = _launch_us(rows, tokens, many, target, repeats) - _launch_us(rows, tokens, few, target, repeats)
    return max(round(more / (many - few), 3), _LEAST_US)


def _launch_us(rows: int, tokens: int, each: int, target: Target, repeats: int) -> float:
    """Returns the microseconds of a launch with `each` tasks for each thread block that the target holds."""
    shape = Shape(1, 1, HEAD_DIM, dtype="fp16")
    tasks = each * resident_blocks(kernel_config(shape, target, rows), shape, target) * target.sms
    tree = Tree.from_parents([-1], [tokens], rows=[(0, tokens)] * (tasks * rows))
    first, ones = np.arange(tasks) * rows, np.ones(tasks)
    plan = Plan(
        "profile",
        frozen(np.arange(tasks + 1)),
        frozen(first),
        frozen(first + rows),
        frozen(np.arange(tasks + 1)),
        frozen(0 * ones),
        frozen(0 * ones),
        frozen(tokens * ones),
        frozen(0 * ones),
        frozen(rows * ones),
    )
    q = torch.randn(tree.num_rows, 1, HEAD_DIM, device="cuda", dtype=torch.float16)
    k, v = torch.randn(2, tokens, 1, HEAD_DIM, device="cuda", dtype=torch.float16)
    out, lse = torch.empty_like(q), torch.empty(len(q), 1, device="cuda")
    program = TritonProgram(planned_device_schedule(plan, Problem(tree, shape, target)), shape, q.device)
    with expected_compiles():
        return median_us(lambda: program(q, k, v, out, lse, HEAD_DIM**-0.5, 1.0), repeats)


def profiled_target(repeats: int = 30, on_task: _OnTask | None = None) -> Target:
    """Returns the current device with a measured grid. Raises BackendError without a CUDA device."""
    target = current_target()
    return replace(target, grid=measure_grid(target, repeats, on_task))


def target_object(target: Target) -> dict[str, object]:
    """Returns a target in the JSON form that `treegen.target.targets.target_from` reads from a file."""
    grid = None if target.grid is None else target.grid.to_object()
    facts = {field.name: getattr(target, field.name) for field in fields(Target)}
    constants = {name: asdict(getattr(target, name)) for name in ("constants", "batch_constants")}
    return {**facts, **constants, "grid": grid}
