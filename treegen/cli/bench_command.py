"""The command bench: treegen and other libraries on the same trees or batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from treegen.cli.arguments import (
    DataOption,
    FamilyOption,
    HtmlOption,
    KvDtypeOption,
    SeedOption,
    WindowLeftOption,
    check_shapes_of_batches,
    print_table,
    shapes_from,
)
from treegen.cli.bench_options import (
    DtypesOption,
    FasttreeOption,
    FromOption,
    HeadDimsOption,
    HeadPairsOption,
    JsonOption,
    LayersOption,
    PagesOption,
    PlotOption,
    ProvidersOption,
    RepeatsOption,
    RowsOption,
    ShuffledOption,
    SpecsArgument,
    StepsOption,
    StrideOption,
    TableOption,
)
from treegen.cli.progress_bars import progress_bar
from treegen.cli.rank_commands import bench_on_ranks, place_of_rank
from treegen.ir.errors import BackendError, InputError
from treegen.text_files import save_text
from treegen.workloads.specs import STRIDE, trees_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from treegen.bench.batch_results import BatchResult
    from treegen.bench.providers import Provider
    from treegen.bench.results import Result
    from treegen.distributed.rank_place import RankPlace
    from treegen.ir.shape import Shape
    from treegen.ir.tree import Tree

_DEFAULT_PROVIDERS = "auto,query"


def bench(
    specs: SpecsArgument = None,
    providers: ProvidersOption = None,
    heads: HeadPairsOption = None,
    head_dim: HeadDimsOption = None,
    dtype: DtypesOption = None,
    kv_dtype: KvDtypeOption = None,
    page_size: PagesOption = 1,
    shuffled: ShuffledOption = None,
    fasttree: FasttreeOption = None,
    stride: StrideOption = STRIDE,
    repeats: RepeatsOption = 20,
    rows: RowsOption = 256,
    table: TableOption = None,
    family: FamilyOption = None,
    steps: StepsOption = None,
    layers: LayersOption = None,
    window_left: WindowLeftOption = None,
    seed: SeedOption = 0,
    data: DataOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
    html: HtmlOption = None,
    results: FromOption = None,
) -> None:
    """Measure attention over trees by treegen and by other libraries on this machine's GPU.

    Outputs are checked before times are taken. A time is the median of calls on a cold L2 without the host's launch
    time, of the call itself or of its replay as a CUDA graph, whichever is faster. The floor is the time to move KV of
    all seen tokens, q and out once at the GPU's copy rate, or the time for the arithmetic, whichever is longer.

    With `--table batches`, requests come, grow and go. The time of a layer, the host's time to plan and the time of
    whole steps are compared with FlashInfer's best.

    Under torchrun each case is measured by one rank on its GPU, and rank 0 prints and writes files.

    The exit code is 1 when an output is wrong or a provider fails.
    """
    from treegen.bench import result_tables

    if table is not None:
        if table != "batches":
            raise InputError("table", table, "is unknown", "use batches, or name trees")
        if specs or shuffled is not None or plot is not None:
            raise InputError("table", table, "excludes trees, --shuffled and --plot", "leave these out")
        shape = _shape_of_batches(head_dim or [128], dtype or ["bf16"], page_size)
        chosen = _BatchOptions(
            family, heads, *shape, kv_dtype, providers, steps or 200, layers or 32, repeats, window_left, seed, data
        )
        raise typer.Exit(_bench_batches(chosen, _Files(json, html, results)))
    of_batches = {"family": family, "kv_dtype": kv_dtype, "steps": steps, "layers": layers, "window_left": window_left}
    for name, given in {**of_batches, "seed": seed or None}.items():
        if given is not None:
            raise InputError(name, given, "is about batches", "give --table batches as well, or leave it out")
    place = None if results is not None else place_of_rank()
    if results is not None:
        machine, found = result_tables.load(results)
        found = found if providers is None else result_tables.only(found, providers)
    else:
        from treegen.bench.peers import providers_from
        from treegen.bench.tables import FASTTREE_HEADS, named
        from treegen.workloads.tree_batches import FASTTREE_TREES

        listed = providers_from(providers or _DEFAULT_PROVIDERS, fasttree)
        shapes = shapes_from(heads or FASTTREE_HEADS, head_dim or (128,), dtype or ("fp16",), (page_size,))
        trees = [
            named(name, tree, shuffled) for spec in specs or FASTTREE_TREES for name, tree in trees_of(spec, stride)
        ]
        machine, found = _measured(trees, shapes, listed, (repeats, rows), place)
    if place is None or not place.rank:
        _show(machine, found, _Files(json, html, results), plot)
    raise typer.Exit(_code_of(found))


def _show(machine: dict[str, Any], found: Sequence[Result], files: _Files, plot: Path | None) -> None:
    """Writes results of trees to files, and prints them."""
    from treegen.bench import result_tables

    if files.json is not None:
        result_tables.save(files.json, machine, found)
    _write_page(files.html, machine, found, files.loaded)
    print_table(result_tables.table(found))
    for line in result_tables.problems(found):
        print(line)
    print_table(result_tables.summary(found))
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    if plot is not None:
        result_tables.plot(plot, machine, found)


def _code_of(found: Sequence[Result] | Sequence[BatchResult]) -> int:
    """Returns the exit code."""
    return int(any(outcome.status in ("wrong", "failed") for result in found for outcome in result.outcomes))


def _shape_of_batches(head_dims: list[int], dtypes: list[str], page_size: int) -> tuple[int, str]:
    """Returns the head dim and the type of all batches. Raises InputError for several, and for other pages."""
    if len(head_dims) > 1 or len(dtypes) > 1 or page_size > 1:
        reason = "takes one --head-dim, one --dtype and no --page-size"
        raise InputError("table", "batches", reason, "divide the run")
    return head_dims[0], dtypes[0]


@dataclass(frozen=True, slots=True)
class _BatchOptions:
    """The options of `--table batches`; None for defaults."""

    family: str | None
    heads: list[str] | None
    head_dim: int
    dtype: str
    kv_dtype: str | None
    providers: str | None
    steps: int
    layers: int
    repeats: int
    window_left: int | None
    seed: int
    data: Path | None


class _Files(NamedTuple):
    """Where results are written as JSON and as a page, and where they are loaded from; None for none of these."""

    json: Path | None
    html: Path | None
    loaded: Path | None


def _bench_batches(options: _BatchOptions, files: _Files) -> int:
    """Measures the suite of batches, or loads results, prints tables and returns the exit code."""
    from treegen.bench import batch_results

    place = None if files.loaded is not None else place_of_rank()
    if files.loaded is not None:
        machine, found = batch_results.load_batches(files.loaded)
    else:
        machine, found = _measured_batches(options, files.json, place)
    code = _code_of(found)
    if place is not None and place.rank:
        return code
    if files.json is not None:
        batch_results.save_batches(files.json, machine, found)
    _write_page(files.html, machine, found, files.loaded)
    for line in batch_results.batch_problems(found):
        print(line)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print_table(batch_results.batch_summary(found))
    print_table(batch_results.batch_table(found))
    return code


def _write_page(
    html: Path | None,
    machine: dict[str, Any],
    results: Sequence[Result] | Sequence[BatchResult],
    loaded: Path | None,
) -> None:
    """Writes results as a page, if one is wanted. loaded: the file that they come from."""
    if html is not None:
        from treegen.bench.results_page import results_html

        save_text(html, results_html(machine, results, "treegen bench" if loaded is None else loaded.name))


def _measured_batches(
    options: _BatchOptions, json: Path | None, place: RankPlace | None
) -> tuple[dict[str, Any], list[BatchResult]]:
    """Measures the suite, and returns the machine and all results. `json` is written after each result."""
    import torch

    from treegen.backends.devices import default_device
    from treegen.bench import batch_results, batch_runs, bench_runs
    from treegen.bench.batch_case import BATCH_HEADS, BatchShapes
    from treegen.tuning.timing import copy_gbps
    from treegen.workloads.batches import chosen_batches

    chosen = chosen_batches(options.data, options.family, options.seed)
    providers = batch_runs.batch_providers_from(options.providers)
    heads = options.heads or list(BATCH_HEADS)
    check_shapes_of_batches(heads, options.head_dim, options.dtype, options.kv_dtype)
    if options.data is None and (place is None or place.rank == 0):
        print("batches of traces are left out: name the folder of recorded traces with --data")
    if not torch.cuda.is_available():
        raise BackendError("device", "cpu", "is not a CUDA device to measure on", "run it on a GPU, or with --from")
    gbps = copy_gbps()
    machine = bench_runs.machine(gbps)
    window_left = -1 if options.window_left is None else options.window_left
    settings = batch_runs.BatchSettings(options.steps, options.layers, options.repeats, window_left=window_left)
    shapes = BatchShapes(heads, options.head_dim, options.dtype, options.kv_dtype)
    cases = [(batch, shape) for batch in chosen for shape in shapes.of(batch)]

    def save(results: list[BatchResult]) -> None:
        if json is not None:
            batch_results.save_batches(json, machine, results)

    if place is not None:
        from treegen.bench.shared_runs import batch_run

        machine["ranks"] = place.ranks
        return machine, bench_on_ranks(place, batch_run(cases, providers, settings, gbps), save)
    found: list[BatchResult] = []
    with progress_bar(len(cases)) as on_case:
        for result in batch_runs.run_batches(chosen, shapes, providers, settings, default_device(), gbps):
            found.append(result)
            on_case()
            save(found)
    return machine, found


def _measured(
    trees: Sequence[tuple[str, Tree]],
    shapes: Sequence[Shape],
    providers: Sequence[Provider],
    counts: tuple[int, int],
    place: RankPlace | None,
) -> tuple[dict[str, Any], list[Result]]:
    """Measures trees, and returns the machine and all results.

    counts: timed calls, and the most rows to compare with the oracle.
    """
    import torch

    from treegen.backends.devices import current_target
    from treegen.bench import bench_runs
    from treegen.tuning.timing import copy_gbps

    if not torch.cuda.is_available():
        raise BackendError("device", "cpu", "is not a CUDA device to measure on", "run it on a GPU, or with --from")
    gbps = copy_gbps()
    settings = bench_runs.RunSettings(*counts, gbps)
    if place is not None:
        from treegen.bench.shared_runs import tree_run

        found = bench_on_ranks(place, tree_run(trees, shapes, providers, settings))
        return {**bench_runs.machine(gbps), "ranks": place.ranks}, found
    with progress_bar(len(trees) * len(shapes)) as on_case:
        results = bench_runs.run(trees, shapes, providers, current_target(), settings, on_case)
        return bench_runs.machine(gbps), list(results)
