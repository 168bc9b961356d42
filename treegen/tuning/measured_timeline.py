"""Measured timelines: a plan is run by kernels that record when and where each piece of its work ran."""

from __future__ import annotations

from functools import partial

import numpy as np

from treegen.cost.launch_work import launch_work
from treegen.cost.timeline import Recording
from treegen.ir.errors import BackendError
from treegen.ir.plan import Plan
from treegen.target.problem import Problem

REPEATS = 15
"""The number of runs; the one with the median time is kept."""


def check_measurable() -> None:
    """Raises BackendError where emitted kernels cannot be run and timed."""
    import torch

    from treegen.backends.devices import interpreted

    if not torch.cuda.is_available():
        fix = "run it on a machine with an NVIDIA GPU, or leave out --measure"
        raise BackendError("device", "cpu", "is not a CUDA device to measure timelines on", fix)
    if interpreted():
        raise BackendError("TRITON_INTERPRET", 1, "replaces the compiler", "unset it before importing triton")


def record(plan: Plan, problem: Problem, repeats: int = REPEATS) -> Recording | None:
    """Measures the timeline of a plan on the current CUDA device, on a cold L2.

    Args:
        plan: The plan.
        problem: The tree, the attention shape and the target.
        repeats: The number of runs; the one with the median time is kept.

    Returns:
        The timeline; None for a plan that runs unfused or launches nothing.

    Raises:
        BackendError: There is no CUDA device, kernels are interpreted, or the kernels' output is wrong.
    """
    check_measurable()

    from treegen.backends import oracle
    from treegen.backends.devices import default_device
    from treegen.backends.recorded_program import RecordedProgram
    from treegen.backends.triton_program import TritonProgram
    from treegen.codegen.compile_counter import expected_compiles
    from treegen.schedule.pipeline import planned_device_schedule
    from treegen.tuning.kernel_meter import Case
    from treegen.tuning.recorded_times import resolution_ns, timeline_of
    from treegen.tuning.timing import each_us, median_us

    schedule, device = planned_device_schedule(plan, problem), default_device()
    works = list(launch_work(schedule, problem.shape))
    if not works or not all(config.fused for config in schedule.configs):
        return None
    case = Case.of(problem.tree, problem.shape, device)
    plain = TritonProgram(schedule, problem.shape, device)
    recorded = RecordedProgram(schedule, problem.shape, device)
    with expected_compiles():
        errors = [case.check(program) for program in (plain, recorded)]
    if not max(errors) <= oracle.TOLERANCE[problem.shape.dtype]:
        raise BackendError("measure", "the plan's kernels", f"have errors {errors}", "report this tree and shape")
    plain_us, recorded_us = (median_us(partial(case.run, program), repeats) for program in (plain, recorded))
    runs = [(time_us, recorded.records()) for time_us in each_us(partial(case.run, recorded), repeats)]
    runs.sort(key=lambda run: run[0])
    total_us, records = runs[len(runs) // 2]
    timeline = timeline_of(records, works, total_us, problem.target.sms)
    return Recording(timeline, plain_us, recorded_us, resolution_ns(np.concatenate(records)))
