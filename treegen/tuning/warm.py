"""Warming: the kernels of a deployment compiled, and the policies of its trees measured, before it begins.

Policies are measured on all GPUs of a kind at once. Each is kept as soon as it is measured, so that a run that was
interrupted goes on where it was.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import NamedTuple, TypeAlias

from treegen.autotune_cache.entry import Entry
from treegen.autotune_cache.key import PolicyKey, key_for
from treegen.autotune_cache.listed_entries import Where
from treegen.codegen.emit import Source
from treegen.ir.errors import TreegenError
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.search.bucket import policy_bucket
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.tuning.compile_pool import Compiled
from treegen.tuning.kernel_variants import kernel_sources
from treegen.tuning.measurer import Measurer
from treegen.tuning.tune import Tuning, tuned

_POLL_S = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class WarmJob:
    """A key of the cache, and the tree that is measured for it.

    Attributes:
        name: The name of the tree.
        tree: The tree.
        shape: The attention shape.
        key: The key.
        trees: The number of trees that share the key.
    """

    name: str
    tree: Tree
    shape: Shape
    key: PolicyKey
    trees: int


@dataclass(frozen=True, slots=True, eq=False)
class Warmed:
    """The outcome of a job.

    Attributes:
        job: The job.
        where: The place of its policy ("made": it was measured), or "none".
        problem: The problem, if there is no policy.
        device: The CUDA device that did the job.
        seconds: The seconds that it took there.
        entry: The entry of the cache, if there is a policy.
        rank: The rank that did the job, where there are several.
    """

    job: WarmJob
    where: Where
    problem: str
    device: int | None
    seconds: float
    entry: Entry | None = None
    rank: int | None = None

    @property
    def place(self) -> str:
        """The rank and the device that did the job; empty without a device."""
        texts = (f"rank {self.rank}" if self.rank is not None else "", f"cuda:{self.device}")
        return "" if self.device is None else ", ".join(filter(None, texts))


def kernels_of(shapes: Sequence[Shape], target: Target) -> list[tuple[Source, Shape]]:
    """Returns all kernels that plans of `auto` can launch for these shapes, as `compile_all` takes them.

    Raises ShapeError for a shape that no tile fits.
    """
    return [(source, shape) for shape in dict.fromkeys(shapes) for source in kernel_sources(shape, target)]


def jobs_of(trees: Iterable[tuple[str, Tree]], shapes: Sequence[Shape], target: Target) -> list[WarmJob]:
    """Returns a job for every bucket of trees and shape, shape by shape, in the order in which buckets first occur.

    The tree with the median of unique tokens stands for its bucket (of equal ones the first, of two the smaller). Trees
    without rows, or whose rows see nothing, need no policy and have no job.
    """
    buckets: dict[str, list[tuple[int, int, str, Tree]]] = {}
    for number, (name, tree) in enumerate(trees):
        if tree.unique_tokens and tree.num_rows:
            buckets.setdefault(policy_bucket(tree), []).append((tree.unique_tokens, number, name, tree))
    jobs = []
    for shape in dict.fromkeys(shapes):
        for bucket, alike in buckets.items():
            _, _, name, tree = sorted(alike)[(len(alike) - 1) // 2]
            jobs.append(WarmJob(name, tree, shape, key_for(bucket, shape, target), len(alike)))
    return jobs


_Done: TypeAlias = SimpleQueue[Warmed | BaseException]


class _Run(NamedTuple):
    """The parts of a run that its threads share: settings, the jobs to do, the outcomes, and whether it was stopped."""

    target: Target
    tuning: Tuning
    again: bool
    todo: SimpleQueue[WarmJob]
    done: _Done
    stopped: Event


def warm(
    jobs: Sequence[WarmJob],
    target: Target,
    devices: Sequence[int | None],
    tuning: Tuning | None = None,
    *,
    again: bool = False,
    on_job: Callable[[Warmed], None] | None = None,
) -> list[Warmed]:
    """Does all jobs and returns their outcomes, in the order in which they were done.

    A job that fails does not end the others. An exception of `on_job`, or a Ctrl-C, ends the measuring processes;
    policies that were measured before are kept.

    Args:
        jobs: The jobs.
        target: The target that all devices are.
        devices: CUDA devices, each with a measuring process of its own, that take jobs one by one.
        tuning: The settings.
        again: Measures policies that the cache has, too.
        on_job: Called in this thread as `on_job(warmed)` after each job.

    Raises:
        BackendError: There is no such device; raised before a process starts.
        InputError: A setting is out of range; raised before a process starts.
    """
    chosen = tuning or Tuning()
    measurers = [chosen.measurer(device) for device in devices]
    run = _Run(target, chosen, again, SimpleQueue(), SimpleQueue(), Event())
    for job in jobs:
        run.todo.put(job)
    threads = [
        Thread(target=_work, args=(run, measurer, device), daemon=True)
        for measurer, device in zip(measurers, devices, strict=True)
    ]
    found: list[Warmed] = []
    try:
        for thread in threads:
            thread.start()
        while len(found) < len(jobs):
            warmed = _next(run.done)
            found.append(warmed)
            if on_job:
                on_job(warmed)
    finally:
        run.stopped.set()
        if len(found) < len(jobs):
            for measurer in measurers:
                measurer.stop()
        for thread in threads:
            thread.join()
    return found


def warmed_by(
    job: WarmJob, target: Target, tuning: Tuning, measurer: Measurer, *, device: int | None, again: bool = False
) -> Warmed:
    """Does one job with a measurer, and returns its outcome. device: the CUDA device of the measurer."""
    begin = time.perf_counter()
    try:
        found = tuned(Problem(job.tree, job.shape, target), tuning, again=again, measurer=measurer)
    except TreegenError as error:
        return Warmed(job, "none", str(error), device, time.perf_counter() - begin)
    return Warmed(job, found.where, "", device, time.perf_counter() - begin, found.entry)


def kernel_summary(compiled: Sequence[Compiled], seconds: float, where: str = "") -> str:
    """Returns lines about kernels: the numbers of compiled, known and failed ones, and each failure.

    Args:
        compiled: Outcomes of kernels.
        seconds: The time of all of them.
        where: Their host, where there are several.
    """
    failed = [each for each in compiled if each.problem]
    cached = sum(each.cached for each in compiled)
    made = len(compiled) - cached - len(failed)
    kernels = f"kernels of host {where}" if where else "kernels"
    lines = [f"{kernels}: {made} compiled, {cached} known, {len(failed)} failed, {seconds:.1f} s"]
    lines += [f"  failed: {each.source.kernel} {each.source.digest}, {each.shape}: {each.problem}" for each in failed]
    return "\n".join(lines)


def summary(warmed: Sequence[Warmed], seconds: float) -> str:
    """Returns lines about a run: the numbers of measured, known and failed policies, by device, and each failure.

    seconds: the time of the run.
    """
    made = [each for each in warmed if each.where == "made"]
    failed = [each for each in warmed if each.problem]
    places = Counter(each.where for each in warmed if each.where not in ("made", "none"))
    known_in = f" ({', '.join(f'{place} {count}' for place, count in sorted(places.items()))})" if places else ""
    lines = [
        f"policies: {len(made)} measured, {places.total()} known{known_in}, {len(failed)} failed, {seconds:.1f} s",
    ]
    places_of_made = sorted({(each.rank or 0, each.device, each.place) for each in made if each.device is not None})
    for *_, place in places_of_made:
        own = [each for each in made if each.place == place]
        lines.append(f"  {place}: {len(own)} measured in {sum(each.seconds for each in own):.1f} s")
    lines += [f"  failed: {each.job.name}, {each.job.key.shape}: {each.problem}" for each in failed]
    return "\n".join(lines)


def _next(done: _Done) -> Warmed:
    """Returns the next outcome.

    It waits in short steps, because Windows delivers no Ctrl-C to a thread that waits for a queue.
    """
    while True:
        try:
            warmed = done.get(timeout=_POLL_S)
        except Empty:
            continue
        if isinstance(warmed, BaseException):
            raise warmed
        return warmed


def _work(run: _Run, measurer: Measurer, device: int | None) -> None:
    """Does jobs until there are no more."""
    try:
        with measurer:
            while not run.stopped.is_set():
                try:
                    job = run.todo.get_nowait()
                except Empty:
                    return
                outcome = warmed_by(job, run.target, run.tuning, measurer, device=device, again=run.again)
                run.done.put(outcome)
    except BaseException as error:  # the caller's thread raises it
        run.done.put(error)
