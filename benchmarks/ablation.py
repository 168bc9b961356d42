"""The gain of each optimisation alone: the time without it over the time with it, and the predicted gain.

    python benchmarks/ablation.py

Cases are those of FastTree's kernel benchmark (fp16, three settings of heads) and unshared batches in pages of 16
tokens (bf16, 32:8 and 8:1 heads), on the current CUDA device. Plans are those of `auto`. One optimisation at a time is
taken away from the plan or from its kernels, and everything else stays. Cases in which this changes neither kernels nor
tables are left out. Every round makes new programs, in random order. A time is the mean over rounds, without the
extremes, of medians on a cold L2 cache (treegen.tuning.timing). Every output is checked against the float64 oracle
before it is timed.

Predicted gains (benchmarks/optimisations.py) are the largest that were expected, written down before the first run.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

import treegen
from optimisations import OPTIMISATIONS, Optimisation, taken_away
from treegen.backends import oracle
from treegen.backends.devices import current_target, default_device
from treegen.backends.triton_program import TritonProgram
from treegen.bench.tables import FASTTREE_HEADS
from treegen.codegen import emit
from treegen.codegen import kernel_signature as signatures
from treegen.codegen.compile_counter import expected_compiles
from treegen.ir.errors import TreegenError
from treegen.ir.schedule import Schedule
from treegen.schedule.pipeline import planned_device_schedule
from treegen.strategies import Strategy, strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.tuning.compile_pool import compile_all
from treegen.tuning.kernel_meter import Case
from treegen.tuning.timing import median_us
from treegen.workloads.generate import in_shuffled_pages
from treegen.workloads.tree_batches import FASTTREE_TREES

_PAGE = 16
_CHECKED_ROWS = 16

Made = tuple[treegen.Shape, Schedule]


def cases() -> Iterator[tuple[str, treegen.Tree, treegen.Shape]]:
    """Yields the cases: names, trees and shapes."""
    for heads in FASTTREE_HEADS:
        for text in FASTTREE_TREES:
            yield f"{heads} {text}", treegen.Tree.parse(text), _shape(heads, "fp16", 1)
    ragged = treegen.Tree.from_parents([-1] * 64, np.random.default_rng(1).integers(1024, 16384, 64))
    batches = {
        "256*1024": treegen.Tree.parse("256*1024"),
        "256*4096": treegen.Tree.parse("256*4096"),
        "64 of 1k-16k": ragged,
    }
    for heads in ("32:8", "8:1"):
        for name, tree in batches.items():
            yield f"{heads} {name}", in_shuffled_pages(tree, _PAGE), _shape(heads, "bf16", _PAGE)


def _shape(heads: str, dtype: str, page_size: int) -> treegen.Shape:
    query, kv = map(int, heads.split(":"))
    return treegen.Shape(query, kv, 128, dtype=dtype, page_size=page_size)


def made_without(
    optimisation: Optimisation | None, tree: treegen.Tree, shape: treegen.Shape, chosen: Strategy, target: Target
) -> tuple[list[Made], list[emit.Source], object]:
    """Returns the schedules that compete without an optimisation, their kernels, and facts that identify both."""
    made, sources, facts = [], [], []
    with taken_away(optimisation):
        for strategy, own_shape in optimisation.plans(chosen, shape) if optimisation else [(chosen, shape)]:
            try:
                schedule = planned_device_schedule(
                    strategy.plan(Problem(tree, own_shape, target)), Problem(tree, own_shape, target)
                )
            except TreegenError:
                continue
            own = emit.emit(schedule, own_shape, own_shape.page_size)
            made.append((own_shape, schedule))
            sources += own
            depends = len(own) > 1 and signatures.starts_launches_early(target.capability)
            facts.append((own_shape, [each.digest for each in own], schedule.pack().array.tobytes(), depends))
    return made, sources, facts


def main() -> None:
    """Prints a line per case, and then a line per optimisation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11, help="timed calls of a median (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all variants (default: %(default)s)")
    parser.add_argument("--only", default="", help="words with commas: optimisations with one of them (default: all)")
    arguments = parser.parse_args()
    words = arguments.only.split(",")
    chosen_ones = [each for each in OPTIMISATIONS if any(word in each.name for word in words)]
    target, device = current_target(), default_device()
    table: dict[str, dict[str, float]] = {each.name: {} for each in OPTIMISATIONS}
    todo, kernels = [], {}
    for name, tree, shape in cases():
        chosen = strategy_from("auto").choose(Problem(tree, shape, target)).strategy
        usual, sources, facts = made_without(None, tree, shape, chosen, target)
        variants: dict[Optimisation | None, list[Made]] = {None: usual}
        for each in chosen_ones:
            made, others, own_facts = made_without(each, tree, shape, chosen, target)
            if made and own_facts != facts:
                variants[each] = made
                sources += others
        kernels.update({(source.digest, shape): (source, shape) for source in sources})
        todo.append((name, tree, shape, chosen, variants))
    compile_all(list(kernels.values()), target)
    worst = 0.0
    for name, tree, shape, chosen, variants in todo:
        case = Case.of(tree, shape, device, _CHECKED_ROWS)
        times, error = measured(case, variants, arguments.rounds, arguments.repeats)
        worst, usual_us = max(worst, error), times.pop(None)
        for each, microseconds in times.items():
            table[each.name][name] = microseconds / usual_us
        ratios = ", ".join(f"{each.name} {microseconds / usual_us:.3f}" for each, microseconds in times.items())
        print(f"{name}, {chosen}, {usual_us:.1f} us: {ratios}", flush=True)
    print("time without / with: cases, geometric mean, largest (predicted) and where")
    for each in OPTIMISATIONS:
        if found := table[each.name]:
            mean = math.exp(statistics.fmean(map(math.log, found.values())))
            largest, where = max((ratio, name) for name, ratio in found.items())
            print(f"{each.name:52} {len(found):3} {mean:6.3f} {largest:6.2f} ({each.predicted:.2f}) {where}")
    print(f"worst error {worst:.1e}")


def measured(
    case: Case, variants: Mapping[Optimisation | None, list[Made]], rounds: int, repeats: int
) -> tuple[dict[Any, float], float]:
    """Returns microseconds of the best schedule of each variant, and the largest error."""
    times: dict[Optimisation | None, list[float]] = {each: [] for each in variants}
    worst, order = 0.0, list(variants)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for each in order:
            best = math.inf
            with taken_away(each), expected_compiles():
                for own_shape, schedule in variants[each]:
                    program = TritonProgram(schedule, own_shape, default_device())
                    error = case.check(program)
                    assert error <= oracle.TOLERANCE[own_shape.dtype], (each, error)
                    worst, best = max(worst, error), min(best, median_us(partial(case.run, program), repeats))
            times[each].append(best)
    return {each: statistics.fmean(sorted(own)[1:-1] or own) for each, own in times.items()}, worst


if __name__ == "__main__":
    main()
