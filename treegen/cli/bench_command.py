"""The command bench: treegen and its peers on tables of trees, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treegen.cli.arguments import print_table, shapes_from
from treegen.cli.progress_bars import progress_bar
from treegen.ir.errors import BackendError, InputError
from treegen.workloads.specs import STRIDE, trees_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from treegen.bench.batch_results import BatchResult
    from treegen.bench.providers import Provider
    from treegen.bench.results import Result
    from treegen.ir.shape import Shape
    from treegen.ir.tree import Tree

_DEFAULT_PROVIDERS = "auto,query"


def bench(
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC...",
            help="Trees, files or folders of them, decodings as `treegen io` takes them, .jsonl traces of trees.",
            show_default="the table of FastTree's kernel benchmark",
        ),
    ] = None,
    providers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Strategies, or peers: sdpa, flex, flashinfer-decode, flashinfer-cascade, flashinfer-cascade-fa2, "
            "flashinfer-prefill, fasttree-artifact, fasttree-artifact-planner-tiles.",
            show_default="auto,query; with --from all",
        ),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(metavar="QUERY:KV", help="Numbers of heads; again.", show_default="16:1, 32:8 and 32:32"),
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Head dimension; again.", show_default="128")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Element type; again.", show_default="fp16")] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page of the KV cache.")] = 1,
    shuffled: Annotated[
        int | None, typer.Option(min=1, help="Put KV into shuffled pages of so many tokens.", show_default="in order")
    ] = None,
    fasttree: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A checkout of FastTree-Artifact for `fasttree-artifact`."),
    ] = None,
    stride: Annotated[int, typer.Option(min=1, help="Steps between the trees taken of a decoding.")] = STRIDE,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls.")] = 20,
    rows: Annotated[int, typer.Option(min=1, help="Rows compared with the oracle, at most.")] = 256,
    table: Annotated[
        str | None,
        typer.Option(
            metavar="batches", help="Measure a suite of running batches in place of trees: layers, plans and steps."
        ),
    ] = None,
    family: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Batches of these families, or by these names.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a batch.")] = 200,
    layers: Annotated[int, typer.Option(min=1, help="Attention layers of a batch's step.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Batches of the same kinds by another seed.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", envvar="TREEGEN_DATA", help="Recorded traces for batches.", show_envvar=True),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all results here.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them here (.svg or .png).")] = None,
    results: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show what --json wrote, measuring nothing.")
    ] = None,
) -> None:
    """Measure attention over trees by treegen and its peers on this machine's GPU; outputs are checked first.

    A time is the faster of a call's and of its replay's as a CUDA graph, a median on a cold L2 without the host's
    launch time. The floor is what the GPU needs to move every seen token's KV, q and out once as fast as it copies, or
    for the arithmetic. With `--table batches`, requests come, grow and go: a layer's time, the host's time to plan, and
    the wall time of whole steps are measured, beside FlashInfer's best. The exit code is 1 when an output is wrong or a
    provider fails.
    """
    from treegen.bench import result_tables

    if table is not None:
        if table != "batches":
            raise InputError("table", table, "is unknown", "use batches, or name trees")
        if specs or shuffled is not None or plot is not None:
            raise InputError("table", table, "goes with neither trees nor --plot", "leave these out")
        chosen = _BatchOptions(family, heads, providers, steps, layers, repeats, seed, data)
        raise typer.Exit(_bench_batches(chosen, json, results))
    if results is not None:
        machine, found = result_tables.load(results)
        found = found if providers is None else result_tables.only(found, providers)
    else:
        from treegen.bench.peers import providers_from
        from treegen.bench.tables import FASTTREE_HEADS, FASTTREE_TREES, named

        listed = providers_from(providers or _DEFAULT_PROVIDERS, fasttree)
        shapes = shapes_from(heads or FASTTREE_HEADS, head_dim or (128,), dtype or ("fp16",), (page_size,))
        trees = [
            named(name, tree, shuffled) for spec in specs or FASTTREE_TREES for name, tree in trees_of(spec, stride)
        ]
        machine, found = _measured(trees, shapes, listed, repeats, rows)
    if json is not None:
        result_tables.save(json, machine, found)
    print_table(result_tables.table(found))
    for line in result_tables.problems(found):
        print(line)
    print_table(result_tables.summary(found))
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    if plot is not None:
        result_tables.plot(plot, machine, found)
    statuses = {outcome.status for result in found for outcome in result.outcomes}
    raise typer.Exit(int(bool(statuses & {"wrong", "failed"})))


@dataclass(frozen=True, slots=True)
class _BatchOptions:
    """The options of `--table batches`."""

    family: str | None
    heads: list[str] | None
    providers: str | None
    steps: int
    layers: int
    repeats: int
    seed: int
    data: Path | None


def _bench_batches(options: _BatchOptions, json: Path | None, loaded: Path | None) -> int:
    """Measures the suite of batches, or loads its results, prints the table and returns the exit code."""
    from treegen.bench import batch_results

    if loaded is not None:
        machine, found = batch_results.load_batches(loaded)
    else:
        machine, found = _measured_batches(options, json)
    if json is not None:
        batch_results.save_batches(json, machine, found)
    for line in batch_results.batch_problems(found):
        print(line)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print_table(batch_results.batch_summary(found))
    print_table(batch_results.batch_table(found))
    statuses = {outcome.status for result in found for outcome in result.outcomes}
    return int(bool(statuses & {"wrong", "failed"}))


def _measured_batches(options: _BatchOptions, json: Path | None) -> tuple[dict[str, Any], list[BatchResult]]:
    """The machine and all results; `json` is written after each, so that what an end of time cuts off is short."""
    import torch

    from treegen.backends.devices import default_device
    from treegen.bench import batch_results, batch_runs, bench_runs
    from treegen.bench.batch_case import BATCH_HEADS, BatchShapes
    from treegen.tuning.timing import copy_gbps
    from treegen.workloads.batches import batches, chosen_batches

    chosen = chosen_batches(batches(options.data, options.seed), options.family)
    providers = batch_runs.batch_providers_from(options.providers)
    shapes_from(options.heads or (), (), (), ())  # checks the heads
    if options.data is None:
        print("batches of traces are left out: name the folder of recorded traces with --data")
    if not torch.cuda.is_available():
        raise BackendError("device", "cpu", "is no CUDA device to measure on", "run it on a GPU, or with --from")
    gbps = copy_gbps()
    machine = bench_runs.machine(gbps)
    settings = batch_runs.BatchSettings(options.steps, options.layers, options.repeats)
    heads = [text.replace("/", ":") for text in options.heads or BATCH_HEADS]
    found: list[BatchResult] = []
    with progress_bar(sum(1 if batch.mla else len(heads) for batch in chosen)) as on_case:
        for result in batch_runs.run_batches(chosen, BatchShapes(heads), providers, settings, default_device(), gbps):
            found.append(result)
            on_case()
            if json is not None:
                batch_results.save_batches(json, machine, found)
    return machine, found


def _measured(
    trees: Sequence[tuple[str, Tree]],
    shapes: Sequence[Shape],
    providers: Sequence[Provider],
    repeats: int,
    rows: int,
) -> tuple[dict[str, Any], list[Result]]:
    import torch

    from treegen.backends.devices import current_target
    from treegen.bench import bench_runs
    from treegen.tuning.timing import copy_gbps

    if not torch.cuda.is_available():
        raise BackendError("device", "cpu", "is no CUDA device to measure on", "run it on a GPU, or with --from")
    gbps = copy_gbps()
    settings = bench_runs.RunSettings(repeats, rows, gbps)
    with progress_bar(len(trees) * len(shapes)) as on_case:
        found = bench_runs.run(trees, shapes, providers, current_target(), settings, on_case)
        return bench_runs.machine(gbps), list(found)
