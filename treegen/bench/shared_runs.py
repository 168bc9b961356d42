"""Runs on several ranks: each case is measured by one rank, alone on its GPU, and every rank gets all results.

Providers of a case are measured one after another on the same GPU, because their times are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from treegen.backends.devices import current_target, default_device
from treegen.bench.batch_case import BatchStart
from treegen.bench.batch_providers import BatchProvider
from treegen.bench.batch_results import BatchOutcome, BatchResult
from treegen.bench.batch_runs import BatchSettings, batch_result, run_batch
from treegen.bench.bench_runs import RunSettings, result_of, run_case
from treegen.bench.providers import Provider
from treegen.bench.results import ProviderOutcome, Result
from treegen.distributed.crew import Crew
from treegen.distributed.tasks import MOST_TRIES, Tasks
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.version import VERSION
from treegen.workloads.served_batch import ServedBatch

_LOST = f"{MOST_TRIES} processes died with this case"
ResultT = TypeVar("ResultT", Result, BatchResult)


@dataclass(frozen=True, slots=True, eq=False)
class SharedRun(Generic[ResultT]):
    """Cases that ranks share.

    Attributes:
        cases: A text for each case, with what tells it from others.
        measure: Measures the case of a number on this rank's GPU.
        lost: Makes the result of a case that no rank survived.
        read: Makes a result of a JSON object with its fields.
        settings: Everything else that has to be equal on all ranks, as text.
    """

    cases: Sequence[str]
    measure: Callable[[int], ResultT]
    lost: Callable[[int], ResultT]
    read: Callable[[dict[str, Any]], ResultT]
    settings: str

    def results(self, crew: Crew, on_results: Callable[[list[ResultT]], None] | None = None) -> list[ResultT]:
        """Measures a share of the cases, waits for the others, and returns all results in order.

        Args:
            crew: The ranks.
            on_results: Called with all results so far, after each case of this rank.

        Raises:
            RankError: Ranks have different cases, settings or GPUs, or the store is gone.
        """
        crew.agree("cases", f"{len(self.cases)}: {'; '.join(self.cases)}")
        crew.agree("settings", f"{self.settings}, treegen {VERSION}")
        tasks = Tasks(crew, "cases", len(self.cases), lambda number: json.dumps(asdict(self.lost(number))))
        for number in tasks:
            result = replace(self.measure(number), measured_on=crew.place.text)
            tasks.finish(number, json.dumps(asdict(result)))
            if on_results is not None:
                tasks.look()
                on_results(self._read(tasks))
        return self._read(tasks)

    def _read(self, tasks: Tasks) -> list[ResultT]:
        return [self.read(json.loads(text)) for _, text in sorted(tasks.results.items())]


def tree_run(
    trees: Sequence[tuple[str, Tree]], shapes: Sequence[Shape], providers: Sequence[Provider], settings: RunSettings
) -> SharedRun[Result]:
    """Returns the run of `treegen bench`: every tree with every shape."""
    target = current_target()
    cases = [(named, shape) for shape in shapes for named in trees]
    failed = [ProviderOutcome(provider.name, "failed", detail=_LOST) for provider in providers]
    return SharedRun(
        [f"{name} {tree.num_rows} {tree.unique_tokens} {shape}" for (name, tree), shape in cases],
        lambda number: run_case(*cases[number], providers, target, settings),
        lambda number: result_of(*cases[number], target, settings.gbps, failed),
        Result.from_object,
        f"{target.name}, {settings.repeats} repeats, {', '.join(outcome.provider for outcome in failed)}",
    )


def batch_run(
    cases: Sequence[tuple[ServedBatch, Shape]],
    providers: Sequence[BatchProvider],
    settings: BatchSettings,
    gbps: float,
    device: torch.device | None = None,
) -> SharedRun[BatchResult]:
    """Returns the run of `treegen bench --table batches`.

    Args:
        cases: Batches, each with a shape.
        providers: The providers.
        settings: How batches are measured.
        gbps: The copy rate of this rank's device in GB/s, for the floors.
        device: The device, by default the current one.
    """
    place = default_device() if device is None else device
    failed = [BatchOutcome(provider.name, "failed", detail=_LOST) for provider in providers]

    def measure(number: int) -> BatchResult:
        batch, shape = cases[number]
        return run_batch(BatchStart.of(batch, settings.steps), shape, providers, settings, place, gbps)

    def lost(number: int) -> BatchResult:
        batch, shape = cases[number]
        return batch_result(batch, shape, settings, gbps, failed)

    counts = f"{settings.steps} steps, {settings.layers} layers, {settings.repeats} repeats"
    return SharedRun(
        [f"{batch.name} {batch.seed} {batch.unique_tokens} {shape}" for batch, shape in cases],
        measure,
        lost,
        BatchResult.from_object,
        f"{current_target().name}, {counts}, {', '.join(outcome.provider for outcome in failed)}",
    )
