"""Warming on several ranks and hosts: kernels compiled on every host, policies measured once and kept on all hosts.

known      one rank of a host publishes the policies that its cache has
kernels    the ranks of a host divide all kernels, because Triton's cache belongs to the host
policies   all ranks divide the jobs that no host knows, each on its GPU
merge      one rank of a host stores the policies of the others
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from treegen.autotune_cache.entry import entry_from
from treegen.autotune_cache.policy_cache import POLICY_CACHE
from treegen.codegen.emit import Source
from treegen.distributed.crew import Crew
from treegen.distributed.tasks import MOST_TRIES, Tasks
from treegen.ir.errors import TreegenError
from treegen.ir.shape import Shape
from treegen.runtime.warm_batches import warm_batches
from treegen.search.policies import accepts
from treegen.target.targets import Target
from treegen.tuning import compile_pool
from treegen.tuning.compile_pool import Compiled
from treegen.tuning.measurer import Measurer
from treegen.tuning.tune import Tuning
from treegen.tuning.warm import Warmed, WarmJob, warmed_by

_LOST = f"{MOST_TRIES} processes died with it"


@dataclass(frozen=True, slots=True, eq=False)
class WarmWork:
    """What a deployment needs: kernels, and jobs with a policy each. All ranks have the same.

    Attributes:
        kernels: Sources, each with the shape of its launches.
        jobs: The jobs.
        target: The GPU of all ranks.
        tuning: The settings of measurements.
        again: Measures policies that a cache has, too.
    """

    kernels: Sequence[tuple[Source, Shape]]
    jobs: Sequence[WarmJob]
    target: Target
    tuning: Tuning
    again: bool = False

    def steps(self, hosts: int) -> int:
        """Returns the number of tasks. hosts: the number of hosts."""
        return hosts * (len(self.kernels) + (1 if self.again else 2)) + len(self.jobs)

    def text(self) -> str:
        """Describes the work; different work has another text."""
        parts = [*(f"{source.digest} {shape}" for source, shape in self.kernels)]
        parts += [*(job.key.digest for job in self.jobs), str((self.tuning.most, self.tuning.repeats, self.again))]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
        return f"{len(self.kernels)} kernels, {len(self.jobs)} policies on {self.target.name}, {digest}"


@dataclass(frozen=True, slots=True, eq=False)
class WarmedHost:
    """The outcome of a host.

    Attributes:
        host: Its name.
        compiled: The outcomes of its kernels.
        seconds: The time of all of them.
        taken: The number of policies that it took from other hosts.
        problem: Why its caches are not complete; empty if they are.
    """

    host: str
    compiled: list[Compiled]
    seconds: float
    taken: int
    problem: str


def warm_together(crew: Crew, work: WarmWork, device: int | None) -> tuple[list[WarmedHost], list[Warmed]]:
    """Does a share of the work, and waits until the crew has done all of it.

    Args:
        crew: The ranks.
        work: The work, the same on all ranks.
        device: The CUDA device of this rank.

    Returns:
        The outcomes of all hosts (on ranks other than 0 none), and those of all jobs in order.

    Raises:
        RankError: Ranks have different work, or the store is gone.
        BackendError: There is no such device.
    """
    crew.agree("work", work.text())
    measurer = work.tuning.measurer(device)
    policies = Tasks(
        crew, "policies", len(work.jobs), lambda number: _text(Warmed(work.jobs[number], "none", _LOST, None, 0.0))
    )
    if not work.again:
        _publish_known(crew, work, policies)
    begin = time.perf_counter()
    _compile(crew, work)
    seconds = time.perf_counter() - begin
    with measurer:
        _measure(crew, work, policies, measurer, device)
    _merge(crew, work, policies, seconds)
    hosts = crew.hosts() if crew.place.rank == 0 else []
    warmed = [_warmed(work.jobs[number], text) for number, text in sorted(policies.results.items())]
    return [_host(crew, work, host) for host in hosts], warmed


def serve_together(
    crew: Crew, shapes: Sequence[Shape], target: Target, device: torch.device
) -> list[tuple[str, Shape, str]]:
    """Compiles the kernels of compile_batch for these shapes on every host, each shape on one rank.

    Returns a host, a shape and an outcome in words, for all shapes on all hosts; on ranks other than 0 nothing.
    """
    wanted = list(dict.fromkeys(shapes))
    crew.agree("work", f"batches on {target.name} of {', '.join(map(str, wanted))}")

    def tasks_on(host: str) -> Tasks:
        return Tasks(crew, f"batches on {host}", len(wanted), lambda number: _LOST)

    own = tasks_on(crew.place.host)
    for number in own:
        begin = time.perf_counter()
        compiled = sum(count for _, count in warm_batches([wanted[number]], target, device))
        own.finish(number, f"{compiled} kernels compiled, {time.perf_counter() - begin:.1f} s")
    found = []
    for host in crew.hosts() if crew.place.rank == 0 else ():
        tasks = tasks_on(host)
        tasks.wait_while(lambda: crew.lives_on(host))  # noqa: B023 (called in this round)
        found += [(host, shape, tasks.results.get(number, "its ranks died")) for number, shape in enumerate(wanted)]
    return found


def _publish_known(crew: Crew, work: WarmWork, policies: Tasks) -> None:
    """Finishes the jobs whose policies are in the cache of some host."""
    for host in dict.fromkeys([crew.place.host, *crew.hosts()]):
        tasks = Tasks(crew, f"known on {host}", 1)
        if host != crew.place.host:
            tasks.wait_while(lambda: crew.lives_on(host))  # noqa: B023 (called in this round)
            continue
        for task in tasks:
            for number, job in enumerate(work.jobs):
                found = POLICY_CACHE.lookup(job.key, accepts)
                if found.entry is not None:
                    policies.finish(number, _text(Warmed(job, found.where, "", None, 0.0, found.entry)))
            tasks.finish(task, "published")


def _kernel_tasks(crew: Crew, work: WarmWork, host: str) -> Tasks:
    return Tasks(crew, f"kernels on {host}", len(work.kernels), lambda number: json.dumps([0.0, False, _LOST]))


def _compile(crew: Crew, work: WarmWork) -> None:
    """Compiles a share of the host's kernels in processes, and waits until the host has all of them."""
    tasks = _kernel_tasks(crew, work, crew.place.host)
    numbers = {(source.digest, shape): number for number, (source, shape) in enumerate(work.kernels)}

    def finish(outcome: Compiled) -> None:
        result = json.dumps([outcome.seconds, outcome.cached, outcome.problem])
        tasks.finish(numbers[outcome.source.digest, outcome.shape], result)

    processes = max(1, len(os.sched_getaffinity(0)) // crew.ranks_here())
    while (first := tasks.next_task()) is not None:
        dealt = chain([first], iter(tasks.next_dealt, None))
        taken = (work.kernels[number] for number in dealt)
        compile_pool.compile_all(taken, work.target, processes, on_variant=finish)


def _measure(crew: Crew, work: WarmWork, policies: Tasks, measurer: Measurer, device: int | None) -> None:
    """Measures policies until there is one for every job."""
    for number in policies:
        job = work.jobs[number]
        warmed = warmed_by(job, work.target, work.tuning, measurer, device=device, again=work.again)
        policies.finish(number, _text(warmed, crew.place.rank))


def _merge_tasks(crew: Crew, host: str) -> Tasks:
    return Tasks(crew, f"merge on {host}", 1, lambda task: json.dumps([0.0, 0, _LOST]))


def _merge(crew: Crew, work: WarmWork, policies: Tasks, seconds: float) -> None:
    """Stores the policies of other hosts in the cache of this one. seconds: the time of its kernels."""
    tasks = _merge_tasks(crew, crew.place.host)
    for task in tasks:
        found = [json.loads(text) for text in policies.results.values()]
        entries = [each["entry"] for each in found if each["where"] not in ("shipped", "none")]
        taken, problem = 0, ""
        try:
            taken = POLICY_CACHE.merge(entries, replace=work.again).taken
        except TreegenError as error:
            problem = str(error)
        tasks.finish(task, json.dumps([seconds, taken, problem]))


def _host(crew: Crew, work: WarmWork, host: str) -> WarmedHost:
    """Waits until a host has merged, or all its ranks are dead, and returns its outcome."""
    merge, kernels = _merge_tasks(crew, host), _kernel_tasks(crew, work, host)
    merge.wait_while(lambda: crew.lives_on(host))
    kernels.look()
    compiled = [Compiled(*work.kernels[number], *json.loads(text)) for number, text in sorted(kernels.results.items())]
    return WarmedHost(host, compiled, *(json.loads(merge.results[0]) if merge.results else (0.0, 0, "its ranks died")))


def _text(warmed: Warmed, rank: int | None = None) -> str:
    entry = None if warmed.entry is None else warmed.entry.to_object()
    value = {"where": warmed.where, "problem": warmed.problem, "device": warmed.device, "seconds": warmed.seconds}
    return json.dumps({**value, "entry": entry, "rank": rank})


def _warmed(job: WarmJob, text: str) -> Warmed:
    value = json.loads(text)
    return Warmed(job, **{**value, "entry": None if value["entry"] is None else entry_from(value["entry"])})
