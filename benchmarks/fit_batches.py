"""Fits the cost model's constants for running batches to measured policies, and reports how good its choices are.

    treegen tune --suite --data traces --heads 32:8,8:1 --seed 0 --seed 1 --json suite.json      # on the GPU
    treegen tune --suite --family trees --heads 16:1,32:8 --json trees.json
    python benchmarks/fit_batches.py suite.json --data traces

Least squares of the logarithm of estimate over time, relative to the batch's mean, with less weight for slow policies.
For each family: the time of the policies with the least estimates over that of the fastest ones (geometric mean, most),
and Spearman's correlation of estimates and times over all policies. The last fit leaves out the batches of the last
seed, and the line after it tells how it chooses for these.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from treegen.bench.batch_case import BatchShapes
from treegen.ir.arrays import Floats
from treegen.runtime.batch_room import batch_config
from treegen.search.batch_choices import place_of
from treegen.search.weigh import weights_of
from treegen.target.problem import Problem
from treegen.target.targets import DEFAULT_TARGET, BatchConstants, target_from, targets
from treegen.workloads.batch_pages import live_batch_of
from treegen.workloads.batches import batches
from treegen.workloads.tree_batches import fasttree_batches

NEAR = 0.15
"""Policies slower than the fastest by this part weigh a factor of e less."""
OF_MEAN = 0.3
"""The weight of a batch's mean error, beside those of its policies."""


class Case(NamedTuple):
    """A batch with a shape: its measured policies, by their places among the weighed ones, and their microseconds."""

    family: str
    seed: int
    problem: Problem
    places: tuple[tuple[int, int], ...]
    measured: Floats

    def estimated(self, constants: BatchConstants) -> Floats:
        """Estimates the policies with these constants."""
        problem = self.problem._replace(target=replace(self.problem.target, batch_constants=constants))
        weights = weights_of(problem, batch_config(*problem[1:]))
        assert weights is not None  # every batch has tokens
        return np.array([weights.time_us(place) for place in self.places])

    def residuals(self, constants: BatchConstants) -> Floats:
        """Returns what the fit makes small."""
        errors = np.log(self.estimated(constants) / self.measured)
        weights = np.exp(-(self.measured / self.measured.min() - 1) / NEAR)
        mean = np.average(errors, weights=weights)
        return np.append((errors - mean) * np.sqrt(weights), OF_MEAN * mean)

    def over_best(self, constants: BatchConstants) -> float:
        """Returns the time of the policy with the least estimate over that of the fastest one."""
        return float(self.measured[self.estimated(constants).argmin()] / self.measured.min())


def cases_in(paths: Sequence[Path], data: Path | None) -> list[Case]:
    """Reads results of `treegen tune --suite`, without batches of one latent KV head, which have few policies."""
    suites, trees, found = {}, {}, []
    for result in (each for path in paths for each in json.loads(path.read_text())["batches"]):
        seed, name, text = result["seed"], result["batch"], result["key"]["shape"]
        target = target_from(result["key"]["target"].split()[0])
        if seed not in suites:
            suites[seed] = {batch.name: batch for batch in (*batches(data, seed), *fasttree_batches(seed))}
        batch = suites[seed][name]
        if batch.mla:
            continue
        if (seed, name) not in trees:
            trees[seed, name] = live_batch_of(batch).tree()
        heads, _, others = text.partition(" heads, head_dim ")
        kv_dtype = re.search(r"kv_dtype (\w+)", others)
        (shape,) = BatchShapes([heads], int(others.partition(",")[0]), kv_dtype=kv_dtype and kv_dtype[1]).of(batch)
        problem = Problem(trees[seed, name], shape, target)
        weights = weights_of(problem, batch_config(shape, target))
        assert weights is not None
        placed = [(place_of(weights, policy), us) for policy, _, us in result["policies"]]
        known = [(place, us) for place, us in placed if place is not None]
        places, times = zip(*known, strict=True)
        found.append(Case(result["family"], seed, problem, places, np.array(times)))
    return found


def fitted(cases: Sequence[Case], start: BatchConstants) -> BatchConstants:
    """Fits the constants, from these on; all but the time of an idle merge, which is measured apart."""

    def constants_at(logs: Floats) -> BatchConstants:
        return BatchConstants(*np.exp(logs).tolist(), start.idle_merge_us)

    def residuals(logs: Floats) -> Floats:
        return np.concatenate([case.residuals(constants_at(logs)) for case in cases])

    return constants_at(least_squares(residuals, np.log(astuple(start)[:-1])).x)


def report(title: str, cases: Sequence[Case], constants: BatchConstants) -> None:
    """Prints the constants, and what choices by them take."""
    print(f"{title}: {', '.join(f'{name} {value:.3g}' for name, value in asdict(constants).items())}")
    families = {family: [case for case in cases if case.family == family] for family in {c.family: 0 for c in cases}}
    for family, chosen in {**families, "all": list(cases)}.items():
        over = [case.over_best(constants) for case in chosen]
        estimated = np.concatenate([case.estimated(constants) for case in chosen])
        measured = np.concatenate([case.measured for case in chosen])
        mean, rank = math.exp(float(np.log(over).mean())), spearmanr(estimated, measured).statistic
        error = float(np.median(np.abs(np.log(estimated / measured))))
        print(
            f"  {family:9} {len(chosen):4} batches, choices over the fastest {mean:.3f}, most {max(over):.3f}; "
            f"rank correlation {rank:.3f}; median error {100 * error:.0f} %"
        )


def main() -> None:
    """Fits and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="files that `treegen tune --suite --json` wrote")
    parser.add_argument("--data", type=Path, help="the folder of recorded traces that the suite was made with")
    arguments = parser.parse_args()
    cases = cases_in(arguments.results, arguments.data)
    present = targets()[DEFAULT_TARGET].batch_constants
    report("present constants", cases, present)
    report("fitted", cases, fitted(cases, present))
    last = max(case.seed for case in cases)
    earlier = [case for case in cases if case.seed != last]
    if earlier:
        report(
            f"fitted without seed {last}, for this seed", [case for case in cases if case.seed == last],
            fitted(earlier, present),
        )  # fmt: skip


if __name__ == "__main__":
    main()
