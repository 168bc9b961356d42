"""The quality of the choices of `auto`: the host time of choosing, and kernel times against the fastest measured plan.

    python benchmarks/choices.py                                                  # host times, without a GPU
    python benchmarks/choices.py fasttree_kernel_bench.json --json result.json    # choices, on the current CUDA device

For every tree of a table (see measured_cases.py) the model's best candidates, all named strategies and `auto` are
measured in two rounds. Each output is checked against the float64 oracle on up to 64 rows. "chosen" is the model's
choice, "tuned" the fastest of the model's first candidates in the first round. Both are compared with the fastest of
all by their times in the second round. Times are medians on a cold L2 cache (treegen.tuning.timing).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from measured_cases import Case, cases
from treegen import Shape, Tree
from treegen.search.auto import by_estimate
from treegen.search.policies import policy_of
from treegen.search.weigh import candidates
from treegen.strategies import Strategy, strategy_from, strategy_names
from treegen.target.problem import Problem
from treegen.target.targets import target_from
from treegen.tuning.kernel_meter import KernelMeter
from treegen.tuning.timing import median_us
from treegen.tuning.tune import DEFAULT_CANDIDATES, proposals

TIMED_TREES = (
    "1,256/256,32",
    "1,4,16,64,256,1024/256,8,256,64,32,256",
    *(f"1,{rows}/256,32" for rows in (64, 256, 1024, 4096)),
)
TOP = 32
ROUNDS = 2


def print_times(repeats: int = 20) -> None:
    """Prints the median host time of a choice in milliseconds, after a first choice."""
    shape, target = Shape(32, 8, 128, dtype="fp16"), target_from("h200")
    for text in TIMED_TREES:
        tree = Tree.parse(text)
        by_estimate(Problem(tree, shape, target))
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            found = by_estimate(Problem(tree, shape, target))
            seconds.append(time.perf_counter() - begin)
        print(f"{text:44}{1e3 * statistics.median(seconds):8.2f} ms  {found.strategy}")


def shape_of(case: Case) -> Shape:
    """Returns the shape of a case: FastTree's table is measured in fp16 at head_dim 128."""
    return Shape(*case.heads, 128, dtype="fp16")


def measured_strategies(case: Case) -> list[Strategy]:
    """Returns the model's choice, its best candidates and all named strategies, each once."""
    target = target_from("h200")
    chosen = [by_estimate(Problem(case.tree, shape_of(case), target)).strategy]
    chosen += [strategy for strategy, _ in candidates(Problem(case.tree, shape_of(case), target), TOP)]
    chosen += proposals(Problem(case.tree, shape_of(case), target), DEFAULT_CANDIDATES)
    chosen += [strategy_from(name) for name in strategy_names() if name != "medusa"]
    return list({str(strategy): strategy for strategy in chosen}.values())


def compile_kernels(case: Case) -> None:
    """Runs everything once to fill Triton's cache."""
    meter = KernelMeter(1, timer=lambda call, repeats: 0.0)
    for strategy in measured_strategies(case):
        meter(Problem(case.tree, shape_of(case), target_from("h200")), strategy)


def measure(case: Case, repeats: int) -> dict[str, object]:
    """Measures a case: the choices of the model and of tuning, and every strategy's times in both rounds and error."""
    # SpecInfer's strategy takes up to a second: one timed call is enough.
    slow = False
    meter = KernelMeter(repeats, timer=lambda call, repeats: median_us(call, 1 if slow else repeats))
    target = target_from("h200")
    chosen = {str(strategy): strategy for strategy in measured_strategies(case)}
    times: dict[str, list[float | None]] = {name: [] for name in chosen}
    errors: dict[str, float] = dict.fromkeys(chosen, 0.0)
    for _ in range(ROUNDS):
        for name, strategy in chosen.items():
            slow = name == "specinfer"
            microseconds, error = meter(Problem(case.tree, shape_of(case), target), strategy)
            times[name].append(microseconds)
            errors[name] = max(error, errors[name])
    tuned = [str(strategy) for strategy in proposals(Problem(case.tree, shape_of(case), target), DEFAULT_CANDIDATES)]
    fixed = {"case": case.name, "heads": f"{case.heads[0]}/{case.heads[1]}", "dtype": "fp16"}
    results = [
        {
            **fixed,
            "strategy": name,
            "policy": dict(policy_of(strategy)) if strategy.serves_any_tree else {},
            "passed": None not in times[name],
            "microseconds": times[name][-1],
            "first_us": times[name][0],
            "error": errors[name],
        }
        for name, strategy in chosen.items()
    ]
    best = min((name for name in tuned if times[name][0]), key=lambda name: times[name][0])
    return {"chosen": next(iter(chosen)), "tuned": best, "results": results}


def report(measured: list[dict]) -> None:
    """Prints a line per case, and ratios over all cases."""
    ratios: dict[str, list[float]] = {"chosen": [], "tuned": [], "chosen/named": [], "tuned/named": []}
    names = set(map(str, map(strategy_from, strategy_names())))
    for entry in measured:
        times = {result["strategy"]: result["microseconds"] for result in entry["results"] if result["passed"]}
        best = min(times, key=times.__getitem__)
        named = min(names & set(times), key=times.__getitem__)
        for kind in ("chosen", "tuned"):
            ratios[kind].append(times[entry[kind]] / times[best])
            ratios[f"{kind}/named"].append(times[entry[kind]] / times[named])
        first = entry["results"][0]
        print(
            f"{first['case'][:42]:43}{first['heads']:6} chosen {times[entry['chosen']]:7.1f} "
            f"({ratios['chosen'][-1]:.2f}) tuned {times[entry['tuned']]:7.1f} ({ratios['tuned'][-1]:.2f}) "
            f"best {times[best]:7.1f} {best}, named {times[named]:.1f} {named}; chosen {entry['chosen'][:60]}"
        )
    for kind, values in ratios.items():
        mean, worst = np.exp(np.mean(np.log(values))), max(values)
        print(f"{kind}: {len(values)} cases, geometric mean {mean:.3f}, worst {worst:.3f}")
    results = [result for entry in measured for result in entry["results"]]
    wrong, worst_error = sum(not result["passed"] for result in results), max(result["error"] for result in results)
    print(f"{len(results)} candidates, {wrong} wrong, worst error {worst_error:.1e}")


def main() -> None:
    """Prints host times of choosing, or measures choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="tables of trees (default: print host times)")
    parser.add_argument("--json", type=Path, help="write all results to this file (default: not written)")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of a median (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile first (default: %(default)s)")
    arguments = parser.parse_args()
    if not arguments.files:
        print_times()
        return
    listed = list(cases(arguments.files, 1))
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_kernels, listed))
    measured = [measure(case, arguments.repeats) for case in listed]
    if arguments.json:
        versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        results = [result for entry in measured for result in entry["results"]]
        arguments.json.write_text(json.dumps({**versions, "results": results}, indent=1))
    report(measured)


if __name__ == "__main__":
    main()
