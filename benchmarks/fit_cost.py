"""Fits the constants of the cost model to measured times, and reports how well both cost models agree with them.

    treegen profile -o gpu.json                                                        # on the GPU
    python benchmarks/measured_cases.py fasttree_kernel_bench.json --json result.json      # on the GPU
    python benchmarks/fit_cost.py result.json --target gpu.json --ship treegen/target

Results of benchmarks/choices.py can be given as well, to fit them or to see how the model does on other policies.

Constants are fitted to fp16 times of fused strategies on trees given as texts (FastTree's table), by weighted least
squares of the logarithm of estimate over measurement. `--ship` writes constants and grid to the shipped targets. Rank
correlation is Spearman's, over all results.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import spearmanr

import treegen
from measured_cases import label, measured_strategies
from treegen.cost.account import account
from treegen.cost.analytic import ScheduleLaunches, times
from treegen.cost.launch_counts import ItemLaunches, MergeLaunches, item_launches, merge_launches
from treegen.ir.errors import FormatError
from treegen.schedule.lower import lower
from treegen.schedule.passes.fuse_merge import with_fused_merge
from treegen.search.policies import strategy_of
from treegen.target.problem import Problem
from treegen.target.targets import Constants, Target, target_from

DTYPE = "fp16"
HEAD_DIM = 128
LIMITS = {
    "lone_flop_fraction": (0.05, 1.0),
    "full_flop_fraction": (0.05, 1.0),
    "memory_fraction": (0.3, 1.0),
    "merge_fraction": (0.1, 4.0),
    "sharpness": (1.0, 8.0),
}
"""Limits of constants that have natural ones; the others may change by a factor of 100."""


@dataclass(frozen=True)
class Sample:
    """A measured result, and the facts that the models read."""

    case: str
    strategy: str
    measured_us: float
    items: ItemLaunches
    merges: MergeLaunches
    launches: int
    waiting: bool
    profiled_us: float


def samples(paths: list[Path], target: Target) -> list[Sample]:
    """Reads the results of fused strategies from files of measured_cases.py or choices.py. Raises FormatError."""
    results = []
    for path in paths:
        try:
            results += json.loads(path.read_text())["results"]
        except (OSError, ValueError, KeyError, TypeError) as cause:
            fix = "write it with measured_cases.py or choices.py"
            raise FormatError("results", str(path), f"cannot be read ({cause})", fix) from cause
    made = {label(strategy): strategy for strategy in measured_strategies()}
    trees: dict[str, treegen.Tree] = {}
    found = []
    for result in results:
        if result.get("policy"):
            made.setdefault(result["strategy"], strategy_of(result["policy"]))
        named = result["strategy"] in made and result["passed"] and result["dtype"] == DTYPE
        if not named or not result["case"][:1].isdigit():
            continue
        tree = trees.setdefault(result["case"], treegen.Tree.parse(result["case"]))
        heads = [int(number) for number in result["heads"].split("/")]
        shape = treegen.Shape(heads[0], heads[1], HEAD_DIM, dtype=DTYPE)
        plan = made[result["strategy"]].plan(Problem(tree, shape, target))
        if plan.mask == "dense":
            continue
        schedule = with_fused_merge(lower(plan, Problem(tree, shape, target)))
        counted = item_launches(plan, schedule, Problem(tree, shape, target)), merge_launches(schedule, shape)
        profiled = account(plan, schedule, Problem(tree, shape, target), model="profiled").time_us
        case = f"{result['case']} {result['heads']}"
        made_as = schedule.launches, schedule.has_fused_merge
        found.append(Sample(case, result["strategy"], result["microseconds"], *counted, *made_as, profiled))
    if not found:
        raise FormatError("results", str(paths[0]), "holds no fp16 results of trees given as texts", "measure some")
    return found


def estimates(found: list[Sample], target: Target, constants: Constants) -> np.ndarray:
    """Returns the analytic model's times in microseconds."""
    launches = [ScheduleLaunches(s.items, s.merges, s.launches, waiting=s.waiting) for s in found]
    return np.array([times(each, target, constants).total for each in launches])


def fit(found: list[Sample], target: Target) -> Constants:
    """Returns the constants with the least squares of log(estimate / measurement), robust against outliers.

    The weight of a result is the ratio of the fastest time of its case to its own: `auto` chooses among fast plans.
    """
    names = [field.name for field in fields(Constants)]
    start = np.log([getattr(target.constants, name) for name in names])
    measured = np.log([sample.measured_us for sample in found])
    limits = np.log(
        np.array([LIMITS.get(name, (np.exp(x) / 100, np.exp(x) * 100)) for name, x in zip(names, start, strict=True)])
    )

    fastest: dict[str, float] = {}
    for sample in found:
        fastest[sample.case] = min(sample.measured_us, fastest.get(sample.case, np.inf))
    weights = np.sqrt([fastest[sample.case] / sample.measured_us for sample in found])

    def misses(logs: np.ndarray) -> np.ndarray:
        return weights * (np.log(estimates(found, target, Constants(*np.exp(logs).tolist()))) - measured)

    inside = np.clip(start, limits[:, 0] + 1e-6, limits[:, 1] - 1e-6)
    result = least_squares(misses, inside, bounds=(limits[:, 0], limits[:, 1]), loss="soft_l1", f_scale=0.1)
    return Constants(*(float(f"{value:.4g}") for value in np.exp(result.x)))


def report(name: str, estimated: np.ndarray, found: list[Sample]) -> None:
    """Prints a model's rank correlation and errors, and its worst case of each strategy."""
    measured = np.array([sample.measured_us for sample in found])
    errors = np.abs(estimated / measured - 1)
    rank = spearmanr(estimated, measured).statistic
    print(
        f"{name}: {len(found)} results, Spearman {rank:.4f}, absolute error median {100 * np.median(errors):.1f} %, "
        f"90 % of results within {100 * np.quantile(errors, 0.9):.1f} %"
    )
    for strategy in dict.fromkeys(sample.strategy for sample in found):
        own = np.array([sample.strategy == strategy for sample in found])
        worst = int(np.where(own, errors, -1).argmax())
        print(
            f"  {strategy:18} median {100 * np.median(errors[own]):5.1f} %, worst {100 * errors[worst]:5.0f} % "
            f"({found[worst].case}: {estimated[worst]:.1f} us, measured {measured[worst]:.1f})"
        )


def ship(folder: Path, target: Target, constants: Constants) -> None:
    """Writes the constants to `targets.json` and the target's grid, if it has one, to `grids.json`."""
    table = json.loads((folder / "targets.json").read_text())
    table["constants"] = {field.name: getattr(constants, field.name) for field in fields(Constants)}
    table["constants_of"] = target.name
    (folder / "targets.json").write_text(text_of(table) + "\n")
    if target.grid is not None:
        grids = json.loads((folder / "grids.json").read_text())
        grids[target.name] = target.grid.to_object()
        (folder / "grids.json").write_text(text_of(grids) + "\n")


def text_of(value: object, indent: str = "") -> str:
    """Formats JSON with a line for each list of plain values and for each object in a list."""
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {text_of(entry, inner)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n" + ",\n".join(f"{inner}{json.dumps(entry)}" for entry in value) + f"\n{indent}]"
    return json.dumps(value)


def main() -> None:
    """Fits constants, reports on them, and writes them with --ship."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of measured_cases.py or choices.py")
    parser.add_argument("--target", default="h200", help="the measured target: a name or a file (default: %(default)s)")
    parser.add_argument(
        "--ship", type=Path, metavar="FOLDER", help="update targets.json and grids.json there (default: only report)"
    )
    arguments = parser.parse_args()
    target = target_from(arguments.target)
    found = samples(arguments.results, target)
    report("analytic, constants as they are", estimates(found, target, target.constants), found)
    fitted = fit(found, target)
    report("analytic, fitted", estimates(found, target, fitted), found)
    report("profiled", np.array([sample.profiled_us for sample in found]), found)
    for field in fields(Constants):
        print(f"  {field.name:22}{getattr(fitted, field.name):>12g}")
    if arguments.ship:
        ship(arguments.ship, target, fitted)
        print(f"written to {arguments.ship}")


if __name__ == "__main__":
    main()
