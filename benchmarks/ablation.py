"""What each optimisation gains on its own: the time without it over the time with it, beside what was predicted.

    python benchmarks/ablation.py

Every case of FastTree's kernel benchmark (fp16, three settings of heads) and unshared batches in pages of 16 tokens
(bf16, 32:8 and 8:1 heads), on the current CUDA device. A plan is that of `auto`; one thing at a time is taken away from
it or from its kernels, and all the rest stays. Cases in which that changes neither kernels nor tables are left out.
Programs are made anew in every round, in random order; a time is the mean over rounds, without the extremes, of medians
on a cold L2 cache (treegen.tuning.timing). Every output is checked against the float64 oracle before it is timed.

`predicted` is the largest gain that was expected, written down before the first run.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import jinja2
import numpy as np

import treegen
from treegen.backends import oracle
from treegen.backends.devices import current_target, default_device
from treegen.backends.triton_program import TritonProgram
from treegen.bench.tables import FASTTREE_HEADS, FASTTREE_TREES
from treegen.codegen import emit, merge_context, merge_forms, module_text, partial_context, tile_context
from treegen.codegen import kernel_signature as signatures
from treegen.codegen.compile_counter import expected_compiles
from treegen.ir import arena
from treegen.ir.arrays import Ints, Longs
from treegen.ir.errors import TreegenError
from treegen.ir.keys import KernelKey, MergeKey
from treegen.ir.schedule import Schedule
from treegen.schedule import lower as lowering
from treegen.schedule import pipeline
from treegen.schedule.pack_runs import Pieces, pieces_of
from treegen.schedule.passes import single_loop, stagger
from treegen.schedule.pipeline import launch_schedule
from treegen.schedule.segment_runs import Runs
from treegen.strategies import Strategy, strategy_from
from treegen.target import tile_config
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.tuning.compile_pool import compile_all
from treegen.tuning.kernel_meter import Case
from treegen.tuning.timing import median_us
from treegen.workloads.generate import in_shuffled_pages

OTHERS = ("cascade", "deft-node-chunk", "deft-flatten", "fasttree", "flashforge")
_PAGE = 16
_CHECKED_ROWS = 16

Plans = Callable[[Strategy, treegen.Shape], list[tuple[Strategy, treegen.Shape]]]


@dataclass(frozen=True, eq=False)
class Optimisation:
    """A name, the largest gain that was predicted, what is replaced to take it away (module, name, value), and the
    plans that then compete.
    """

    name: str
    predicted: float
    replaced: tuple[tuple[object, str, object], ...] = ()
    plans: Plans = lambda strategy, shape: [(strategy, shape)]


def by_tile(runs: Runs, work: Longs, launch: Longs, tokens: tuple[int, ...], usual: int) -> Pieces:
    """Rests of runs in blocks of a tile."""
    return pieces_of(runs, launch, tokens, tokens)


def by_token(runs: Runs, work: Longs, launch: Longs, tokens: tuple[int, ...], usual: int) -> Pieces:
    """Rests of runs in blocks of a token."""
    return pieces_of(runs, launch, tokens, (1,) * len(tokens))


def listed(items: Ints, rows: Ints) -> Ints:
    """The first rows of items as if no rows followed one another."""
    return np.full(len(items), -1, np.int32)


MERGE_FORMS = merge_forms._MERGE_FORMS
AT_ONCE = """    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
"""


def rewritten(phase: str, old: str, new: str) -> Callable[[], jinja2.Environment]:
    """What makes the templates, with other text in a phase of partial kernels."""
    usual, name = module_text._environment(), f"partial_attention/{phase}.jinja"
    assert usual.loader is not None
    text = usual.loader.get_source(usual, name)[0]
    assert text.count(old) == 1, old
    changed = jinja2.DictLoader({name: text.replace(old, new)})
    return lambda: usual.overlay(loader=jinja2.ChoiceLoader([changed, usual.loader]))


def strides_as_data(key: KernelKey | MergeKey) -> tuple[signatures.Parameter, ...]:
    """The signature of a kernel in which no stride is a constant."""
    return tuple(
        replace(parameter, constant=False) if parameter.kind is signatures.ParameterKind.SIZE else parameter
        for parameter in signatures.kernel_signature(key)
    )


def without(option: str) -> Plans:
    """The plan without an option of its strategy."""

    def plans(strategy: Strategy, shape: treegen.Shape) -> list[tuple[Strategy, treegen.Shape]]:
        emptied = {name: () if name == "cut" else None for name in (option, "cut", "apart") if hasattr(strategy, name)}
        return [(replace(strategy, **emptied), shape)] if hasattr(strategy, option) else []

    return plans


OPTIMISATIONS = (
    Optimisation(
        "path cohorts, against the best other strategy", 2.5,
        plans=lambda strategy, shape: [(strategy_from(name), shape) for name in OTHERS],
    ),
    Optimisation("work items split", 3.0, plans=without("split")),
    Optimisation(
        "two resident blocks, against one with four stages", 1.35,
        ((tile_config, "_LARGE", ((64, 64, 4, 4),)),),
    ),
    Optimisation(
        "three stages, against two", 1.25, ((tile_config, "_LARGE", ((64, 64, 4, 2),)),),
    ),
    Optimisation(
        "short runs packed into tiles", 1.6,
        ((lowering, "packed_pieces_of", by_tile),),
    ),
    Optimisation(
        "loads by run, against by token", 1.35,
        ((lowering, "packed_pieces_of", by_token),),
    ),
    Optimisation(
        "no masks where nothing is hidden", 1.02,
        ((lowering, "masked_launches", lambda runs, rows, bounds: [True] * (len(bounds) - 1)),),
    ),
    Optimisation("one loop for short work", 1.1, ((single_loop, "MOST_TILES", 0),)),
    Optimisation(
        "dependent launches", 1.12,
        ((signatures, "depends_on_launches", lambda capability: False),),
    ),
    Optimisation(
        "final merges in one launch, against two", 1.07,
        ((pipeline, "in_one_launch", lambda schedule: schedule),),
    ),
    Optimisation(
        "a block per head where few rows merge", 1.05,
        ((merge_forms, "_MERGE_FORMS", {math.inf: MERGE_FORMS[math.inf]}),),
    ),
    Optimisation(
        "a row's partials merged at once, against one by one", 1.1,
        ((merge_forms, "_MERGE_FORMS", {most: (forms[0]._replace(parts=1),) for most, forms in MERGE_FORMS.items()}),),
    ),
    Optimisation("long walks staggered", 1.12, ((stagger, "LEAST_TOKENS", 1 << 30),)),
    Optimisation(
        "rows found without a list", 1.05, ((arena, "_first_rows", listed),)
    ),
    Optimisation(
        "the caches' strides as constants",
        1.03,
        tuple((module, "kernel_signature", strides_as_data) for module in (partial_context, merge_context)),
    ),
    Optimisation("masks by run, against by token", 1.03, ((tile_context, "_MOST_HIDDEN_BY_RUN", 0),)),
    Optimisation(
        "the next launch at once, against at the end",
        1.02,
        ((module_text, "_environment", rewritten("kernel", AT_ONCE, "")),),
    ),
    Optimisation(
        "partials read into registers of results",
        1.07,
        ((module_text, "_environment", rewritten("results", "= not INTERPRETED", "= False and not INTERPRETED")),),
    ),
    Optimisation(
        "partials in fp32, against 16 bits", 1.0,
        plans=lambda strategy, shape: [(strategy, replace(shape, partial_dtype=shape.dtype))],
    ),
)  # fmt: skip


Made = tuple[treegen.Shape, Schedule]


def cases() -> Iterator[tuple[str, treegen.Tree, treegen.Shape]]:
    """The table: a name, a tree and a shape each."""
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


@contextmanager
def taken_away(optimisation: Optimisation | None) -> Iterator[None]:
    """Everything is planned and emitted without the optimisation."""
    caches = (
        tile_config.tile_class,
        tile_config.wanted_class,
        tile_config.tile_sizes,
        emit.emit_partial,
        emit.emit_merge,
    )
    with ExitStack() as stack:
        for module, name, value in optimisation.replaced if optimisation else ():
            stack.enter_context(patch.object(module, name, value))
        for cached in caches:
            cached.cache_clear()
        yield
    for cached in caches:
        cached.cache_clear()


def made_without(
    optimisation: Optimisation | None, tree: treegen.Tree, shape: treegen.Shape, chosen: Strategy, target: Target
) -> tuple[list[Made], list[emit.Source], object]:
    """The schedules that compete without an optimisation, their kernels, and what tells them from others."""
    made, sources, facts = [], [], []
    with taken_away(optimisation):
        for strategy, own_shape in optimisation.plans(chosen, shape) if optimisation else [(chosen, shape)]:
            try:
                schedule = launch_schedule(
                    strategy.plan(Problem(tree, own_shape, target)), Problem(tree, own_shape, target)
                )
            except TreegenError:
                continue
            own = emit.emit(schedule, own_shape, own_shape.page_size)
            made.append((own_shape, schedule))
            sources += own
            depends = len(own) > 1 and signatures.depends_on_launches(target.capability)
            facts.append((own_shape, [each.digest for each in own], schedule.pack().array.tobytes(), depends))
    return made, sources, facts


def main() -> None:
    """Prints a line per case, and then one per optimisation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="optimisations whose names hold one of these words, comma-separated")
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
    """Microseconds of the best schedule of each variant, and the largest error."""
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
