"""The command warm: fill the cache ahead of a deployment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from treegen.autotune_cache.policies import POLICY_CACHE, Where
from treegen.cli.options import print_table, progress_bar, shapes_from
from treegen.cli.tuning import AgainOption, CandidatesOption, RepeatsOption, TimeoutOption
from treegen.ir.errors import BackendError
from treegen.search.policies import accepts
from treegen.specs import STRIDE, trees_of

if TYPE_CHECKING:
    from treegen.warm import Job


def warm(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC...",
            help="Trees, files or folders of them, decodings as `treegen io` takes them, .jsonl traces of trees.",
            show_default=False,
        ),
    ],
    heads: Annotated[
        list[str] | None,
        typer.Option(metavar="QUERY:KV", help="Numbers of heads; for several shapes again.", show_default="32:8"),
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Head dimension; again.", show_default="128")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Element type: fp16, bf16 or fp32; again.", show_default="bf16")
    ] = None,
    page_size: Annotated[
        list[int] | None, typer.Option(help="Tokens of a page of the KV cache; again.", show_default="1")
    ] = None,
    stride: Annotated[int, typer.Option(min=1, help="Steps between the trees taken of a decoding.")] = STRIDE,
    candidates: CandidatesOption = 8,
    repeats: RepeatsOption = 15,
    timeout: TimeoutOption = 60.0,
    again: AgainOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
) -> None:
    """Fill the cache ahead of a deployment: policies of all trees and kernels of all shapes, on all GPUs of this kind.

    A run that was interrupted goes on where it was. The exit code is 1 when anything failed, 130 after Ctrl-C.
    """
    from treegen.devices import current_target, devices_of
    from treegen.tune import Tuning
    from treegen.warm import Warmed, jobs_of, summary
    from treegen.warm import warm as warm_policies

    shapes = shapes_from(heads or (), head_dim or (), dtype or (), page_size or ())
    tuning = Tuning(candidates, repeats, timeout)
    target = current_target()
    devices = devices_of(target)
    if not devices and not dry_run:
        raise BackendError("device", "cpu", "is no CUDA device to measure on", "run it on a GPU, or with --dry-run")
    jobs = jobs_of((named for spec in specs for named in trees_of(spec, stride)), shapes, target)
    if dry_run:
        titles = ("policy", "of", "trees", "bucket", "shape")
        rows = [(_state(job, again), job.name, str(job.trees), job.key.bucket, job.key.shape) for job in jobs]
        print_table([titles, *rows])
        return
    done: list[Warmed] = []
    code = 0
    begin = time.perf_counter()
    try:
        with progress_bar(len(jobs)) as on_job:

            def finish(warmed: Warmed) -> None:
                done.append(warmed)
                on_job()

            warm_policies(jobs, target, devices, tuning, again=again, on_job=finish)
    except KeyboardInterrupt:
        print(f"interrupted after {len(done)} of {len(jobs)} policies; run it again to go on")
        code = 130
    print(summary(done, time.perf_counter() - begin))
    raise typer.Exit(code or int(any(warmed.problem for warmed in done)))


def _state(job: Job, again: bool) -> str:
    where: Where = "none" if again else POLICY_CACHE.lookup(job.key, accepts).where
    return "measure" if where == "none" else f"known ({where})"
