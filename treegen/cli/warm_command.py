"""The command warm: fills the cache before a deployment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from treegen.autotune_cache.listed_entries import Where
from treegen.autotune_cache.policy_cache import POLICY_CACHE
from treegen.cli.arguments import each_pair, print_table, shapes_from
from treegen.cli.progress_bars import progress_bar
from treegen.cli.rank_commands import place_of_rank, serve_on_ranks, warm_on_ranks
from treegen.cli.tune_command import AgainOption, CandidatesOption, RepeatsOption, TimeoutOption
from treegen.ir.errors import BackendError, InputError
from treegen.search.policies import accepts
from treegen.workloads.specs import STRIDE, trees_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treegen.codegen.emit import Source
    from treegen.ir.shape import Shape
    from treegen.target.targets import Target
    from treegen.tuning.tune import Tuning
    from treegen.tuning.warm import WarmJob

SpecsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SPEC...",
        help="Trees, files or folders of trees, decodings as in `treegen io`, or .jsonl files of trees.",
        show_default=False,
    ),
]
HeadPairsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="QUERY:KV",
        help="Query heads and KV heads; several with commas, or repeated.",
        callback=each_pair,
        show_default="32:8",
    ),
]
HeadDimsOption = Annotated[
    list[int] | None, typer.Option(help="Elements of a head; can be repeated.", show_default="128")
]
DtypesOption = Annotated[
    list[str] | None, typer.Option(help="Element type: fp16, bf16 or fp32; can be repeated.", show_default="bf16")
]
PageSizesOption = Annotated[
    list[int] | None, typer.Option(help="Tokens per page of the KV cache; can be repeated.", show_default="1")
]
StrideOption = Annotated[int, typer.Option(min=1, help="Steps between the trees taken from a decoding.")]
ServingOption = Annotated[
    bool, typer.Option("--serving", help="Compile the kernels of compile_batch for these shapes, without trees.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only print the work, without doing it.")]


def warm(
    specs: SpecsArgument = None,
    heads: HeadPairsOption = None,
    head_dim: HeadDimsOption = None,
    dtype: DtypesOption = None,
    page_size: PageSizesOption = None,
    stride: StrideOption = STRIDE,
    candidates: CandidatesOption = 8,
    repeats: RepeatsOption = 15,
    timeout: TimeoutOption = 60.0,
    again: AgainOption = False,
    serving: ServingOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Fill the cache before a deployment: measure policies for all trees, and compile kernels for all shapes.

    All GPUs of the current GPU's kind share the work. Under torchrun all ranks do, each with its GPU, and every host
    gets all kernels and policies. An interrupted run continues where it stopped. The exit code is 1 when anything
    failed, and 130 after Ctrl-C.
    """
    from treegen.api.compile_batch import check_page_sizes
    from treegen.backends.devices import current_target, devices_of
    from treegen.distributed.warm_together import WarmWork
    from treegen.tuning.tune import Tuning
    from treegen.tuning.warm import jobs_of, kernels_of

    shapes = shapes_from(heads or (), head_dim or (), dtype or (), page_size or ())
    tuning = Tuning(candidates, repeats, timeout)
    place = place_of_rank()
    if place is not None and place.rank and dry_run:
        return  # rank 0 prints
    target = current_target()
    devices = devices_of(target)
    if not devices and not dry_run:
        raise BackendError("device", "cpu", "is not a CUDA device to measure on", "run it on a GPU, or with --dry-run")
    if serving or not specs:
        if not serving or specs:
            reason = "excludes --serving" if specs else "is needed without --serving"
            fix = "give trees to measure policies for, or --serving alone"
            raise InputError("SPEC", " ".join(specs or ()), reason, fix)
        check_page_sizes(shapes)
        if place is not None and not dry_run:
            raise typer.Exit(serve_on_ranks(place, shapes, target))
        _warm_serving(shapes, target, dry_run)
        return
    kernels = kernels_of(shapes, target)
    jobs = jobs_of((named for spec in specs for named in trees_of(spec, stride)), shapes, target)
    if dry_run:
        print(f"kernels: {len(kernels)} for {len(shapes)} shapes on {target.name}")
        titles = ("policy", "of", "trees", "bucket", "shape")
        rows = [(_state(job, again), job.name, str(job.trees), job.key.bucket, job.key.shape) for job in jobs]
        print_table([titles, *rows])
        return
    if place is not None:
        raise typer.Exit(warm_on_ranks(place, WarmWork(kernels, jobs, target, tuning, again)))
    raise typer.Exit(_warm(kernels, jobs, target, devices, tuning, again))


def _warm_serving(shapes: Sequence[Shape], target: Target, dry_run: bool) -> None:
    """Compiles the kernels for batches of these shapes, and prints their numbers."""
    import torch

    from treegen.runtime.warm_batches import warm_batches

    if dry_run:
        print(f"kernels for batches of {len(shapes)} shapes on {target.name}")
        return
    begin = time.perf_counter()
    for shape, compiled in warm_batches(shapes, target, torch.device("cuda", torch.cuda.current_device())):
        print(f"{shape}: {compiled} kernels compiled, {time.perf_counter() - begin:.1f} s")


def _state(job: WarmJob, again: bool) -> str:
    where: Where = "none" if again else POLICY_CACHE.lookup(job.key, accepts).where
    return "measure" if where == "none" else f"known ({where})"


def _warm(
    kernels: Sequence[tuple[Source, Shape]],
    jobs: Sequence[WarmJob],
    target: Target,
    devices: Sequence[int],
    tuning: Tuning,
    again: bool,
) -> int:
    """Compiles kernels, measures policies, prints summaries, and returns the exit code."""
    from treegen.tuning import compile_pool, warm

    compiled: list[compile_pool.Compiled] = []
    measured: list[warm.Warmed] = []
    code = 0
    begin = compiled_at = time.perf_counter()
    try:
        with progress_bar(len(kernels) + len(jobs)) as on_step:

            def finish_kernel(outcome: compile_pool.Compiled) -> None:
                compiled.append(outcome)
                on_step()

            def finish_job(outcome: warm.Warmed) -> None:
                measured.append(outcome)
                on_step()

            compile_pool.compile_all(kernels, target, on_variant=finish_kernel)
            compiled_at = time.perf_counter()
            warm.warm(jobs, target, devices, tuning, again=again, on_job=finish_job)
    except KeyboardInterrupt:
        done = f"{len(compiled)} of {len(kernels)} kernels and {len(measured)} of {len(jobs)} policies"
        print(f"interrupted after {done}; run it again to continue")
        code = 130
    print(warm.kernel_summary(compiled, compiled_at - begin))
    print(warm.summary(measured, time.perf_counter() - compiled_at))
    failed = any(each.problem for each in compiled) or any(each.problem for each in measured)
    return code or int(failed)
