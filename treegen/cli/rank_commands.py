"""The commands warm and bench under torchrun: ranks share the work, and rank 0 prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from treegen.cli.progress_bars import progress_bar

if TYPE_CHECKING:
    from treegen.bench.shared_runs import ResultT, SharedRun
    from treegen.distributed.crew import Crew
    from treegen.distributed.rank_place import RankPlace
    from treegen.distributed.warm_together import WarmWork
    from treegen.ir.shape import Shape
    from treegen.target.targets import Target


def place_of_rank() -> RankPlace | None:
    """Returns the place of this process among ranks, with its GPU made the current one; None if it works alone."""
    from treegen.distributed.rank_place import RankPlace

    place = RankPlace.of_environment()
    if place is not None:
        place.take_gpu()
    return place


@contextmanager
def crew_of(place: RankPlace) -> Iterator[Crew]:
    """Joins the crew of all ranks; yields after they have started."""
    from treegen.distributed.crew import Crew

    with Crew(place.store(), place, serves=place.serves()) as crew:
        yield crew


@contextmanager
def crew_progress(crew: Crew, steps: int) -> Iterator[None]:
    """Shows the finished tasks of all ranks as a bar, on rank 0."""
    if crew.place.rank != 0:
        yield
        return
    with progress_bar(steps) as advance:
        shown = 0

        def show(finished: int) -> None:
            nonlocal shown
            advance(finished - shown)
            shown = finished

        crew.on_progress = show
        try:
            yield
        finally:
            crew.on_progress = None


def warm_on_ranks(place: RankPlace, work: WarmWork) -> int:
    """Does the work of `treegen warm` with the other ranks, prints summaries on rank 0, and returns the exit code."""
    import time

    from treegen.distributed.warm_together import warm_together
    from treegen.tuning.warm import kernel_summary, summary

    begin = time.perf_counter()
    try:
        with crew_of(place) as crew, crew_progress(crew, work.steps(len(crew.hosts()))):
            hosts, warmed = warm_together(crew, work, place.local_rank)
            notes = _notes(crew)
    except KeyboardInterrupt:
        if place.rank == 0:
            print("interrupted; run it again to continue")
        return 130
    failed = any(each.problem for each in warmed)
    for host in hosts:
        print(kernel_summary(host.compiled, host.seconds, host.host))
        failed = failed or bool(host.problem) or any(each.problem for each in host.compiled)
    if place.rank == 0:
        print(summary(warmed, time.perf_counter() - begin - max((host.seconds for host in hosts), default=0.0)))
        for host in hosts:
            print(f"  host {host.host}: {host.problem or f'took {host.taken} policies from others'}")
        print("".join(f"{note}\n" for note in notes), end="")
    return int(failed)


def serve_on_ranks(place: RankPlace, shapes: Sequence[Shape], target: Target) -> int:
    """Does the work of `treegen warm --serving` with the other ranks, prints outcomes, and returns the exit code."""
    import torch

    from treegen.distributed.warm_together import serve_together

    with crew_of(place) as crew, crew_progress(crew, len(shapes) * len(crew.hosts())):
        found = serve_together(crew, shapes, target, torch.device("cuda", place.local_rank))
    for host, shape, outcome in found:
        print(f"host {host}: {shape}: {outcome}")
    return int(any("died" in outcome for *_, outcome in found))


def bench_on_ranks(
    place: RankPlace, run: SharedRun[ResultT], on_results: Callable[[list[ResultT]], None] | None = None
) -> list[ResultT]:
    """Measures the cases of `treegen bench` with the other ranks, and returns all results in order.

    on_results: called on rank 0 with all results so far.
    """
    with crew_of(place) as crew, crew_progress(crew, len(run.cases)):
        return run.results(crew, on_results if place.rank == 0 else None)


def _notes(crew: Crew) -> list[str]:
    """Returns lines about ranks that did not take part to the end."""
    notes = []
    if missing := crew.missing():
        notes.append(f"ranks that did not start: {', '.join(map(str, missing))}")
    if repeated := crew.repeated():
        notes.append(f"tasks that were done again, because their ranks died: {repeated}")
    return notes
