"""The command tune: measure candidates and keep the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treegen.autotune_cache.entry import policy_text
from treegen.cli.arguments import (
    DtypeOption,
    HeadDimOption,
    PageSizeOption,
    print_table,
    shape_from,
)
from treegen.cli.progress_bars import progress_bar
from treegen.cli.suite_tuning_command import SuiteOptions, tune_suite
from treegen.ir.errors import InputError
from treegen.ir.shape import DEFAULT_SHAPE
from treegen.target.problem import Problem
from treegen.workloads.tree_files import tree_from_argument

CandidatesOption = Annotated[int, typer.Option(min=1, help="How many of the model's best are measured.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timed calls of every candidate.")]
TimeoutOption = Annotated[float, typer.Option(help="Seconds for a candidate, with compiling and checking it.")]
AgainOption = Annotated[bool, typer.Option("--again", help="Measure even what the cache knows.")]


def tune(
    trees: Annotated[
        list[str] | None,
        typer.Argument(metavar="TREE...", help="Trees, as `treegen explain` takes them.", show_default=False),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="QUERY:KV",
            help="Numbers of query heads and KV heads, as 32:8; with --suite several, with commas.",
            show_default="32:8; with --suite 32:8,8:1",
        ),
    ] = None,
    head_dim: HeadDimOption = None,
    dtype: DtypeOption = None,
    page_size: PageSizeOption = None,
    candidates: Annotated[
        int | None,
        typer.Option(min=1, help="How many of the model's best are measured.", show_default="8; with --suite 12"),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Timed calls of every candidate.", show_default="15; with --suite 2 x 7"),
    ] = None,
    timeout: TimeoutOption = 60.0,
    again: AgainOption = False,
    suite: Annotated[
        bool,
        typer.Option("--suite", help="Tune kernels for running batches over the suite of batches, in place of trees."),
    ] = False,
    family: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Batches of these families, or by these names.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Batches of the same kinds by another seed.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", envvar="TREEGEN_DATA", help="Recorded traces for batches.", show_envvar=True),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write what --suite measured here.")] = None,
) -> None:
    """Measure the cost model's best candidates on this machine's GPU and keep the fastest for such trees.

    `auto` takes what is kept for all trees of the same bucket (`treegen cache why TREE`). With `--suite`, kernels of
    `compile_batch` take what is kept for batches of the same bucket; where no policy is 2 % faster than the one that is
    chosen by estimates, nothing is kept.
    """
    if suite:
        if trees or page_size is not None or again:
            raise InputError("suite", "--suite", "goes with neither TREE, --page-size nor --again", "leave these out")
        options = SuiteOptions(heads, head_dim, dtype, family, data, seed, candidates or 12, repeats or 7, json)
        tune_suite(options)
        return
    if not trees:
        raise InputError("trees", "none", "are named", "name trees, or give --suite")
    from treegen.backends.devices import current_target
    from treegen.strategies import auto
    from treegen.tuning.tune import DEFAULT_CANDIDATES, DEFAULT_REPEATS, Tuning, check_tuning, tuned

    shape = shape_from(heads, head_dim, dtype, page_size) or DEFAULT_SHAPE
    tuning = Tuning(candidates or DEFAULT_CANDIDATES, repeats or DEFAULT_REPEATS, timeout)
    listed = [tree_from_argument(tree) for tree in trees]
    target = current_target()
    check_tuning(auto(), target)
    for name, tree in zip(trees, listed, strict=True):
        with progress_bar(tuning.most + 1) as on_candidate:
            found = tuned(
                Problem(tree, shape, target), tuning, again=again, on_candidate=lambda outcome: on_candidate()
            )
        assert found.entry is not None
        time = "not measured" if found.entry.measured_us is None else f"{found.entry.measured_us:.1f} us"
        how = "measured" if found.where == "made" else f"known ({found.where})"
        print(f"{name}: {policy_text(found.entry.policy)}, {time}, {how}")
        if found.where == "made":
            rows = [
                (f"  {text}", "" if microseconds is None else f"{microseconds:.1f} us", outcome)
                for text, microseconds, outcome in found.entry.candidates
            ]
            print_table(rows)
