"""What each optimisation gains on its own: the time without it over the time with it, beside what was predicted.

    python benchmarks/ablation.py

Seven trees, fp16, head dim 128, on the current CUDA device. A plan is that of `auto`; one thing at a time is taken away
from it or from its kernels, and all the rest stays. Medians on a cold L2 cache (treegen.timing); every output is
checked against the float64 oracle before it is timed. Predictions were written before the first run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np

import treegen
from treegen import arguments as launch_arguments
from treegen import emit, one_loop, staggered, tiles
from treegen import lower as lowering
from treegen.devices import current_target
from treegen.ir import arena
from treegen.ir.arrays import Ints, Longs
from treegen.ir.errors import TreegenError
from treegen.kernel_meter import KernelMeter
from treegen.pieces import Pieces, pieces_of
from treegen.runs import Runs
from treegen.strategies import Strategy, strategy_from

CASES = (
    (16, 1, "1,10/4000,400"),
    (16, 1, "1,256/256,32"),
    (32, 8, "1,4,16,512/1024,256,128,32"),
    (32, 8, "1,2,4,8,16,32,64,128,1024/16,16,16,16,16,16,16,16,16"),
    (32, 8, "1,16,64/1024,256,32"),
    (16, 1, "1,4,16,64,256,1024/256,8,256,64,32,256"),
    (16, 1, "1,4,8,256/8,256,256,32"),
)
OTHERS = ("cascade", "deft-node-chunk", "deft-flatten", "fasttree", "flashforge")

Plans = Callable[[Strategy, treegen.Shape], list[tuple[Strategy, treegen.Shape]]]


@dataclass(frozen=True)
class Optimisation:
    """A name, the predicted ratios on the trees, what is replaced to take it away (module, name, value), and the
    plans that then compete.
    """

    name: str
    predicted: tuple[float, ...]
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


def without(option: str) -> Plans:
    """The plan without an option of its strategy."""

    def plans(strategy: Strategy, shape: treegen.Shape) -> list[tuple[Strategy, treegen.Shape]]:
        emptied = {name: () if name == "cut" else None for name in (option, "cut", "apart") if hasattr(strategy, name)}
        return [(replace(strategy, **emptied), shape)] if hasattr(strategy, option) else []

    return plans


OPTIMISATIONS = (
    Optimisation(
        "path cohorts, against the best other strategy", (1.05, 1.5, 1.6, 2.5, 1.3, 1.3, 1.3),
        plans=lambda strategy, shape: [(strategy_from(name), shape) for name in OTHERS],
    ),
    Optimisation("work items split", (3.0, 1.0, 1.0, 1.0, 1.5, 1.0, 1.0), plans=without("split")),
    Optimisation(
        "two resident blocks, against one with four stages", (1.0, 1.0, 1.35, 1.15, 1.0, 1.3, 1.0),
        ((tiles, "_LARGE", ((64, 64, 4, 4),)),),
    ),
    Optimisation(
        "three stages, against two", (1.2, 1.1, 1.25, 1.2, 1.2, 1.2, 1.15), ((tiles, "_LARGE", ((64, 64, 4, 2),)),),
    ),
    Optimisation(
        "short runs packed into tiles", (1.0, 1.05, 1.1, 1.6, 1.0, 1.0, 1.0),
        ((lowering, "packed_pieces_of", by_tile),),
    ),
    Optimisation(
        "loads by run, against by token", (1.0, 1.2, 1.1, 1.35, 1.1, 1.2, 1.15),
        ((lowering, "packed_pieces_of", by_token),),
    ),
    Optimisation(
        "no masks where nothing is hidden", (1.02, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        ((lowering, "masked_launches", lambda runs, rows, bounds: [True] * (len(bounds) - 1)),),
    ),
    Optimisation("one loop for short work", (1.0, 1.1, 1.0, 1.0, 1.0, 1.0, 1.0), ((one_loop, "MOST_TILES", 0),)),
    Optimisation(
        "dependent launches", (1.12, 1.0, 1.0, 1.0, 1.08, 1.0, 1.0),
        ((launch_arguments, "depends_on_launches", lambda capability: False),),
    ),
    Optimisation(
        "final merges in one launch, against two", (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.07),
        ((emit, "in_one_launch", lambda schedule: schedule),),
    ),
    Optimisation(
        "a block per head where few rows merge", (1.05, 1.0, 1.0, 1.0, 1.02, 1.0, 1.0),
        ((emit, "_MERGE_FORMS", {math.inf: emit._MERGE_FORMS[math.inf]}),),
    ),
    Optimisation(
        "a row's partials merged at once, against one by one", (1.1, 1.0, 1.0, 1.0, 1.02, 1.0, 1.0),
        ((emit, "_MERGE_FORMS", {most: (forms[0]._replace(parts=1),) for most, forms in emit._MERGE_FORMS.items()}),),
    ),
    Optimisation(
        "long walks staggered", (1.0, 1.0, 1.0, 1.0, 1.0, 1.12, 1.0), ((staggered, "LEAST_TOKENS", 1 << 30),)
    ),
    Optimisation(
        "rows found without a list", (1.04, 1.05, 1.0, 1.0, 1.02, 1.0, 1.02), ((arena, "_first_rows", listed),)
    ),
    Optimisation(
        "partials in fp32, against fp16", (0.99, 1.0, 1.0, 1.0, 0.97, 1.0, 1.0),
        plans=lambda strategy, shape: [(strategy, replace(shape, partial_dtype="fp16"))],
    ),
)  # fmt: skip


@contextmanager
def taken_away(optimisation: Optimisation) -> Iterator[None]:
    """Everything is planned and emitted without the optimisation."""
    caches = (tiles.tile_class, tiles.wanted_class, tiles.tile_sizes, emit.emit_partial)
    with ExitStack() as stack:
        for module, name, value in optimisation.replaced:
            stack.enter_context(patch.object(module, name, value))
        for cached in caches:
            cached.cache_clear()
        yield
    for cached in caches:
        cached.cache_clear()


def main() -> None:
    """Prints one line per optimisation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    target, table, worst = current_target(), {each.name: list[str]() for each in OPTIMISATIONS}, 0.0
    for number, (heads, kv_heads, text) in enumerate(CASES):
        meter, tree = KernelMeter(arguments.repeats), treegen.Tree.parse(text)
        shape = treegen.Shape(heads, kv_heads, 128, dtype="fp16")
        chosen = strategy_from("auto").choose(tree, shape, target).strategy
        usual, error = meter(tree, chosen, shape, target)
        worst = max(worst, error)
        print(f"{heads}/{kv_heads} {text}: {chosen}, {usual or math.nan:.1f} us, error {error:.1e}", flush=True)
        for each in OPTIMISATIONS:
            found = math.inf
            with taken_away(each):
                for strategy, own_shape in each.plans(chosen, shape):
                    try:
                        microseconds, error = meter(tree, strategy, own_shape, target)
                    except TreegenError as problem:
                        print(f"  {each.name}, {strategy}: {problem}")
                        continue
                    worst, found = max(worst, error), min(found, microseconds or math.inf)
            ratio = found / (usual or math.nan)
            table[each.name].append(f"{ratio:5.2f} ({each.predicted[number]:.2f})" if ratio < math.inf else "-")
    print(f"{'time without / with (predicted)':50}" + "".join(f"{f'tree {n + 1}':>14}" for n in range(len(CASES))))
    for name, ratios in table.items():
        print(f"{name:50}" + "".join(f"{ratio:>14}" for ratio in ratios))
    print(f"worst error {worst:.1e}")


if __name__ == "__main__":
    main()
