"""Warming: what a deployment needs, ahead of it: its kernels compiled, and the policies of all of its trees measured on
all GPUs of a kind at once.

Every policy is kept as soon as it is measured, so that a run which was interrupted goes on where it was.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeAlias

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
    """A key of the cache and the tree that is measured for it, under its name. trees: how many share the key."""

    name: str
    tree: Tree
    shape: Shape
    key: PolicyKey
    trees: int


@dataclass(frozen=True, slots=True, eq=False)
class Warmed:
    """What became of a job: where its policy is from ("made": it was measured), or "none" and a problem.

    device: the CUDA device that it was given to. seconds: that it took there.
    """

    job: WarmJob
    where: Where
    problem: str
    device: int | None
    seconds: float


def kernels_of(shapes: Sequence[Shape], target: Target) -> list[tuple[Source, Shape]]:
    """Every kernel that plans of `auto` can launch for these shapes, for `treegen.tuning.compile_pool.compile_all`.

    Raises ShapeError for a shape that no tile fits.
    """
    return [(source, shape) for shape in dict.fromkeys(shapes) for source in kernel_sources(shape, target)]


def jobs_of(trees: Iterable[tuple[str, Tree]], shapes: Sequence[Shape], target: Target) -> list[WarmJob]:
    """A job for every bucket of trees and shape, in the order in which buckets first occur, shape by shape.

    Of the trees of a bucket the one with the median of unique tokens stands for all (of equals the first, of two the
    smaller). Trees without rows, or whose rows see nothing, need no policy and have no job.
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


def warm(
    jobs: Sequence[WarmJob],
    target: Target,
    devices: Sequence[int | None],
    tuning: Tuning | None = None,
    *,
    again: bool = False,
    on_job: Callable[[Warmed], None] | None = None,
) -> list[Warmed]:
    """What became of all jobs, in the order in which they were done; a job that fails does not end the others.

    devices: CUDA devices, each with a measuring process of its own, that take jobs one by one; all are the target.
    again: measures what the cache has, too. on_job(warmed): called in this thread after each job. An exception here, as
    on Ctrl-C, ends the measuring processes; policies that were measured before are kept. Raises BackendError and
    InputError before any process starts.
    """
    chosen = tuning or Tuning()
    measurers = [chosen.measurer(device) for device in devices]
    todo: SimpleQueue[WarmJob] = SimpleQueue()
    done: _Done = SimpleQueue()
    stopped = Event()
    for job in jobs:
        todo.put(job)
    threads = [
        Thread(target=_work, args=(measurer, device, target, chosen, again, todo, done, stopped), daemon=True)
        for measurer, device in zip(measurers, devices, strict=True)
    ]
    found: list[Warmed] = []
    try:
        for thread in threads:
            thread.start()
        while len(found) < len(jobs):
            warmed = _next(done)
            found.append(warmed)
            if on_job:
                on_job(warmed)
    finally:
        stopped.set()
        if len(found) < len(jobs):
            for measurer in measurers:
                measurer.stop()
        for thread in threads:
            thread.join()
    return found


def kernel_summary(compiled: Sequence[Compiled], seconds: float) -> str:
    """What became of kernels, in lines: how many were compiled, known and failed, and each failure. seconds: in all."""
    failed = [each for each in compiled if each.problem]
    cached = sum(each.cached for each in compiled)
    made = len(compiled) - cached - len(failed)
    lines = [f"kernels: {made} compiled, {cached} known, {len(failed)} failed, {seconds:.1f} s"]
    lines += [f"  failed: {each.source.kernel} {each.source.digest}, {each.shape}: {each.problem}" for each in failed]
    return "\n".join(lines)


def summary(warmed: Sequence[Warmed], seconds: float) -> str:
    """What a run did, in lines: how many policies it measured, knew and failed at, and each device's and failure's own.

    seconds: that the run took.
    """
    made = [each for each in warmed if each.where == "made"]
    failed = [each for each in warmed if each.problem]
    places = Counter(each.where for each in warmed if each.where not in ("made", "none"))
    known_in = f" ({', '.join(f'{place} {count}' for place, count in sorted(places.items()))})" if places else ""
    lines = [
        f"policies: {len(made)} measured, {places.total()} known{known_in}, {len(failed)} failed, {seconds:.1f} s",
    ]
    for device in sorted({each.device for each in made if each.device is not None}):
        own = [each for each in made if each.device == device]
        lines.append(f"  cuda:{device}: {len(own)} measured in {sum(each.seconds for each in own):.1f} s")
    lines += [f"  failed: {each.job.name}, {each.job.key.shape}: {each.problem}" for each in failed]
    return "\n".join(lines)


def _next(done: _Done) -> Warmed:
    """What is done next. It waits in short steps: Windows delivers no Ctrl-C to a thread that waits for a queue."""
    while True:
        try:
            warmed = done.get(timeout=_POLL_S)
        except Empty:
            continue
        if isinstance(warmed, BaseException):
            raise warmed
        return warmed


def _work(
    measurer: Measurer,
    device: int | None,
    target: Target,
    tuning: Tuning,
    again: bool,
    todo: SimpleQueue[WarmJob],
    done: _Done,
    stopped: Event,
) -> None:
    """Does jobs until there are no more."""
    try:
        with measurer:
            while not stopped.is_set():
                try:
                    job = todo.get_nowait()
                except Empty:
                    return
                begin = time.perf_counter()
                where: Where = "none"
                problem = ""
                try:
                    where = tuned(Problem(job.tree, job.shape, target), tuning, again=again, measurer=measurer).where
                except TreegenError as error:
                    problem = str(error)
                done.put(Warmed(job, where, problem, device, time.perf_counter() - begin))
    except BaseException as error:  # the caller's thread raises it
        done.put(error)
