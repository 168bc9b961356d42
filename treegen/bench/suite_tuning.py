"""Tuning for running batches: measures policies over the suite of batches, and keeps the fastest for each bucket.

Every batch of the suite is at its first step. Its best policies by estimates take turns in one BatchKernel. The
attention launch is captured once, because policies differ only in tables. Only this launch is timed, on a cold L2.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from treegen.autotune_cache.entry import Entry, Policy, installed_versions, policy_text
from treegen.autotune_cache.key import PolicyKey
from treegen.backends import oracle
from treegen.bench.batch_case import BatchCase, BatchShapes, BatchStart
from treegen.bench.batch_providers import LiveServer
from treegen.bench.batch_runs import BatchSettings
from treegen.codegen.compile_counter import expected_compiles
from treegen.ir.errors import BackendError
from treegen.ir.shape import Shape
from treegen.search.batch_choices import batch_key, policy_at
from treegen.search.weigh import weights_of
from treegen.strategies.cohort import Cohort
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.text_files import save_text
from treegen.workloads.served_batch import ServedBatch

BETTER = 0.98
"""The largest ratio of a policy's time to the time of the weighed choice for which the policy is kept."""
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class MeasuredPolicy:
    """A policy for batches, with its estimated and its measured microseconds."""

    policy: Policy
    estimated_us: float
    measured_us: float

    @property
    def text(self) -> str:
        """The policy as text."""
        return policy_text(self.policy)


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """Measured policies of a batch, in order of their estimates. Without measurements the first one is chosen.

    seed: the seed of the suite that the batch belongs to.
    """

    name: str
    family: str
    key: PolicyKey
    policies: tuple[MeasuredPolicy, ...]
    seed: int = 0

    @property
    def title(self) -> str:
        """The batch's name, with the seed if that is not the suite's."""
        return f"{self.name} of seed {self.seed}" if self.seed else self.name

    @property
    def weighed_over_best(self) -> float:
        """The time of the weighed choice divided by the time of the fastest policy."""
        return self.policies[0].measured_us / min(each.measured_us for each in self.policies)

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation of estimates and measurements; 1 for a single policy."""
        return _rank_correlation(self.policies)


def measure_suite(
    batches: Iterable[ServedBatch],
    shapes: BatchShapes,
    target: Target,
    settings: BatchSettings,
    device: torch.device,
    *,
    most: int = 12,
    on_batch: Callable[[], object] = lambda: None,
) -> Iterator[MeasuredBatch]:
    """Measures the `most` best policies of each batch with each shape, and calls `on_batch` after each.

    Raises BackendError where an output is wrong.
    """
    for batch in batches:
        start = BatchStart.of(batch, 0)
        for shape in shapes.of(batch):
            with expected_compiles():
                yield _measured(start, shape, target, settings, device, most)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            on_batch()


def _measured(
    start: BatchStart, shape: Shape, target: Target, settings: BatchSettings, device: torch.device, most: int
) -> MeasuredBatch:
    case, pages = BatchCase(start, shape, 1, device, settings.window_left), start.pages(start.batch)
    case.upload(pages)
    server = LiveServer(case)
    server.plan(pages)
    assert server.kernel.planned is not None
    problem = server.kernel.planned.problem._replace(target=target)
    chosen = _proposals(problem, server, most)
    server.begin()
    server.attend(0)  # compiles outside of the capture
    replay, out = settings.capture(lambda: server.attend(0))
    rows = torch.from_numpy(pages.rows.astype(np.int64)).to(device)
    first: torch.Tensor | None = None
    times: dict[Cohort, list[float]] = {strategy: [] for strategy in chosen}
    tolerance = oracle.TOLERANCE[shape.dtype]
    for _ in range(_ROUNDS):
        for strategy, taken in times.items():
            server.kernel.update(server.live, strategy)
            server.begin()
            out.fill_(math.nan)
            replay()
            if first is None:
                first, error = out[rows].clone(), case.error_of(out, pages)
            else:
                found = out[rows]
                error = math.inf if bool(found.isnan().any()) else oracle.error(found, first) / 2
            if not error <= tolerance:
                reason = f"gives a wrong output for {start.batch.name}: error {error:.1e} exceeds {tolerance:.1e}"
                raise BackendError("strategy", str(strategy), reason, "report this")
            taken.append(settings.timer(replay, settings.repeats))
    policies = tuple(MeasuredPolicy(*chosen[strategy], median(taken)) for strategy, taken in times.items())
    return MeasuredBatch(start.batch.name, start.batch.family, batch_key(problem), policies)


def _proposals(problem: Problem, server: LiveServer, most: int) -> dict[Cohort, tuple[Policy, float]]:
    """Returns the strategies with the least estimated times that fit the kernel, with policies and microseconds."""
    choices = server.kernel.choices
    weights = weights_of(problem, choices.config)
    assert weights is not None  # every batch has tokens
    found: dict[Cohort, tuple[Policy, float]] = {}
    weights = weights.exact()
    for place in weights.order():
        strategy = weights.policy(place)
        if strategy not in found and weights.items(place) <= choices.most_items:
            found[strategy] = policy_at(weights, place), float(weights.times_us[place])
        if len(found) == most:
            break
    return found


def suite_entries(measured: Iterable[MeasuredBatch], source: str) -> list[Entry]:
    """Makes the entries for the policy cache: for each bucket its fastest policy, where that is fast enough.

    Times of a bucket are geometric means over its batches. A policy is kept if its time is at most BETTER times that of
    the weighed choices. source: how times were measured, for the entries.
    """
    buckets: dict[PolicyKey, list[MeasuredBatch]] = {}
    for batch in measured:
        buckets.setdefault(batch.key, []).append(batch)
    entries = []
    for key, batches in buckets.items():
        weighed = _mean(batch.policies[0].measured_us for batch in batches)
        of_batches = [{each.text: each for each in batch.policies} for batch in batches]
        common = [text for text in of_batches[0] if all(text in others for others in of_batches)]
        times = {text: _mean(policies[text].measured_us for policies in of_batches) for text in common}
        best = min(times, key=times.__getitem__, default="")
        if best and times[best] <= BETTER * weighed:
            candidates = tuple((text, time_us, "measured") for text, time_us in times.items())
            names = ", ".join(batch.title for batch in batches)
            told = f"{source}: {names}, {weighed / times[best]:.2f}x the weighed choice"
            policy = of_batches[0][best].policy
            entries.append(Entry(key, policy, times[best], candidates, told, installed_versions()))
    return entries


def suite_table(measured: Sequence[MeasuredBatch], entries: Sequence[Entry]) -> list[tuple[str, ...]]:
    """Makes a table, a row per family.

    Batches, policies, weighed choices over the best, rank correlations of a batch's policies (their mean and the least)
    and of all policies of the family, and batches whose buckets have entries.
    """
    kept = {entry.key for entry in entries}
    rows: list[tuple[str, ...]] = [
        ("family", "batches", "policies", "weighed/best", "worst", "rank corr.", "least", "of all", "kept for")
    ]
    for family in dict.fromkeys(batch.family for batch in measured):
        own = [batch for batch in measured if batch.family == family]
        over, ranks = [batch.weighed_over_best for batch in own], [batch.rank_correlation for batch in own]
        cells = (f"{_mean(over):.3f}", f"{max(over):.3f}", f"{sum(ranks) / len(ranks):.2f}", f"{min(ranks):.2f}")
        policies = [policy for batch in own for policy in batch.policies]
        of_all, kept_for = f"{_rank_correlation(policies):.3f}", str(sum(batch.key in kept for batch in own))
        rows.append((family, str(len(own)), str(len(policies)), *cells, of_all, kept_for))
    return rows


def save_suite(
    path: Path, machine: dict[str, Any], measured: Sequence[MeasuredBatch], entries: Sequence[Entry]
) -> None:
    """Writes all measurements and the entries as JSON. Raises FormatError if that fails."""
    batches = [
        {
            "batch": batch.name,
            "seed": batch.seed,
            "family": batch.family,
            "key": batch.key.to_object(),
            "policies": [[dict(each.policy), each.estimated_us, each.measured_us] for each in batch.policies],
        }
        for batch in measured
    ]
    value = {"machine": machine, "batches": batches, "entries": [entry.to_object() for entry in entries]}
    save_text(path, json.dumps(value, indent=1) + "\n")


def _rank_correlation(policies: Sequence[MeasuredPolicy]) -> float:
    """Returns Spearman's correlation of estimates and measurements; 1 for a single policy."""
    estimated = np.argsort(np.argsort([each.estimated_us for each in policies]))
    measured = np.argsort(np.argsort([each.measured_us for each in policies]))
    return float(np.corrcoef(estimated, measured)[0, 1]) if len(policies) > 1 else 1.0


def _mean(values: Iterable[float]) -> float:
    """Returns the geometric mean."""
    return math.exp(float(np.mean([math.log(value) for value in values])))
