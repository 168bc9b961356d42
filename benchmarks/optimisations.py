"""Optimisations that benchmarks/ablation.py takes away one by one, and the gains that were predicted for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import jinja2
import numpy as np

import treegen
from treegen.codegen import emit, merge_context, merge_forms, module_text, partial_context, tile_context
from treegen.codegen import kernel_signature as signatures
from treegen.ir import arena
from treegen.ir.arrays import Ints, Longs
from treegen.ir.keys import KernelKey, MergeKey
from treegen.schedule import lower as lowering
from treegen.schedule import pipeline
from treegen.schedule.pack_runs import CutRuns, cut_runs
from treegen.schedule.passes import single_loop, stagger
from treegen.schedule.segment_runs import Runs
from treegen.strategies import Strategy, strategy_from
from treegen.target import tile_config

OTHERS = ("cascade", "deft-node-chunk", "deft-flatten", "fasttree", "flashforge")
"""Strategies that compete with path cohorts."""
Plans = Callable[[Strategy, treegen.Shape], list[tuple[Strategy, treegen.Shape]]]
"""Returns the competing strategies and shapes for the choice of `auto` and a shape."""


@dataclass(frozen=True, eq=False)
class Optimisation:
    """An optimisation, and how to take it away.

    Args:
        name: A line of the table.
        predicted: The largest gain that was predicted: time without the optimisation over time with it.
        replaced: Attributes to replace: module, name and value of each.
        plans: The plans that compete without the optimisation; the fastest counts.
    """

    name: str
    predicted: float
    replaced: tuple[tuple[object, str, object], ...] = ()
    plans: Plans = lambda strategy, shape: [(strategy, shape)]


def by_tile(runs: Runs, work: Longs, launch: Longs, tokens: tuple[int, ...], usual: int) -> CutRuns:
    """Packs the rests of runs in blocks of a tile."""
    return cut_runs(runs, launch, tokens, tokens)


def by_token(runs: Runs, work: Longs, launch: Longs, tokens: tuple[int, ...], usual: int) -> CutRuns:
    """Packs the rests of runs in blocks of a token."""
    return cut_runs(runs, launch, tokens, (1,) * len(tokens))


def listed(items: Ints, rows: Ints) -> Ints:
    """Returns first rows of items that make kernels read the list of rows."""
    return np.full(len(items), -1, np.int32)


MERGE_FORMS = merge_forms._MERGE_FORMS
AT_ONCE = """    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
"""


def rewritten(phase: str, old: str, new: str) -> Callable[[], jinja2.Environment]:
    """Returns a function that makes the templates, with changed text in a phase of partial kernels."""
    usual, name = module_text._environment(), f"partial_attention/{phase}.jinja"
    assert usual.loader is not None
    text = usual.loader.get_source(usual, name)[0]
    assert text.count(old) == 1, old
    changed = jinja2.DictLoader({name: text.replace(old, new)})
    return lambda: usual.overlay(loader=jinja2.ChoiceLoader([changed, usual.loader]))


def strides_as_data(key: KernelKey | MergeKey) -> tuple[signatures.Parameter, ...]:
    """Returns a kernel's signature in which no stride is a constant."""
    return tuple(
        replace(parameter, constant=False) if parameter.kind is signatures.ParameterKind.SIZE else parameter
        for parameter in signatures.kernel_signature(key)
    )


def without(option: str) -> Plans:
    """Returns plans without an option of their strategy."""

    def plans(strategy: Strategy, shape: treegen.Shape) -> list[tuple[Strategy, treegen.Shape]]:
        cuts = (option, "cut_nodes", "split_shared_rows")
        emptied = {name: () if name == "cut_nodes" else None for name in cuts if hasattr(strategy, name)}
        return [(replace(strategy, **emptied), shape)] if hasattr(strategy, option) else []

    return plans


OPTIMISATIONS = (
    Optimisation(
        "path cohorts, against the best other strategy", 2.5,
        plans=lambda strategy, shape: [(strategy_from(name), shape) for name in OTHERS],
    ),
    Optimisation("work items split", 3.0, plans=without("split")),
    Optimisation(
        "two resident blocks, against one with four rounds", 1.35,
        ((tile_config, "_LARGE", ((64, 64, 4, 4),)),),
    ),
    Optimisation(
        "three rounds, against two", 1.25, ((tile_config, "_LARGE", ((64, 64, 4, 2),)),),
    ),
    Optimisation(
        "short runs packed into tiles", 1.6,
        ((lowering, "cut_runs_to_pack", by_tile),),
    ),
    Optimisation(
        "loads by run, against by token", 1.35,
        ((lowering, "cut_runs_to_pack", by_token),),
    ),
    Optimisation(
        "no masks where nothing is hidden", 1.02,
        ((lowering, "masked_launches", lambda runs, rows, bounds: [True] * (len(bounds) - 1)),),
    ),
    Optimisation("one loop for short work", 1.1, ((single_loop, "MOST_TILES", 0),)),
    Optimisation(
        "dependent launches", 1.12,
        ((signatures, "starts_launches_early", lambda capability: False),),
    ),
    Optimisation(
        "final merges in one launch, against two", 1.07,
        ((pipeline, "with_fused_merge", lambda schedule: schedule),),
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


@contextmanager
def taken_away(optimisation: Optimisation | None) -> Iterator[None]:
    """Plans and emits everything inside the block without the optimisation."""
    caches = (
        tile_config.kernel_config,
        tile_config.wanted_config,
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
