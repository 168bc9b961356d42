"""The command tune: measures candidates and keeps the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treegen.autotune_cache.entry import policy_text
from treegen.autotune_cache.policy_cache import CachedPolicy
from treegen.cli.arguments import (
    DataOption,
    DtypeOption,
    FamilyOption,
    HeadDimOption,
    KvDtypeOption,
    PageSizeOption,
    WindowLeftOption,
    print_table,
    shape_from,
)
from treegen.cli.progress_bars import progress_bar
from treegen.cli.suite_tuning_command import SuiteOptions, tune_suite
from treegen.ir.errors import BackendError, InputError
from treegen.ir.shape import DEFAULT_SHAPE
from treegen.target.problem import Problem
from treegen.workloads.tree_files import tree_from_argument

_TIMEOUT = 60.0

CandidatesOption = Annotated[int, typer.Option(min=1, help="Number of the cost model's best policies to measure.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timed calls of each candidate; times are their medians.")]
TimeoutOption = Annotated[
    float, typer.Option(help="Seconds for each candidate, including the time to compile and check it.")
]
AgainOption = Annotated[bool, typer.Option("--again", help="Measure buckets again that the cache already knows.")]
TreesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="TREE...", help="Trees, as in `treegen explain`.", show_default=False),
]
SuiteHeadsOption = Annotated[
    str | None,
    typer.Option(
        metavar="QUERY:KV",
        help="Query heads and KV heads; with --suite several pairs, with commas.",
        show_default="32:8; with --suite 32:8,8:1",
    ),
]
MostOption = Annotated[
    int | None,
    typer.Option(min=1, help="Number of the cost model's best policies to measure.", show_default="8; with --suite 12"),
]
TimedOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Timed calls of each candidate; times are their medians. --suite measures each twice.",
        show_default="15; with --suite 7",
    ),
]
SuiteOption = Annotated[
    bool,
    typer.Option("--suite", help="Tune kernels for running batches, over a suite of batches instead of trees."),
]
SeedsOption = Annotated[
    list[int] | None,
    typer.Option(
        min=0,
        help="Seed of the batches, as in `treegen bench`; can be repeated.",
        show_default="0, which is the suite",
    ),
]
JsonOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the results of --suite to this file.", show_default="not written"),
]


def tune(
    trees: TreesArgument = None,
    heads: SuiteHeadsOption = None,
    head_dim: HeadDimOption = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    page_size: PageSizeOption = None,
    candidates: MostOption = None,
    repeats: TimedOption = None,
    timeout: TimeoutOption = _TIMEOUT,
    again: AgainOption = False,
    suite: SuiteOption = False,
    window_left: WindowLeftOption = None,
    family: FamilyOption = None,
    seed: SeedsOption = None,
    data: DataOption = None,
    json: JsonOption = None,
) -> None:
    """Measure the cost model's best policies on this machine's GPU, and keep the fastest for similar trees.

    `auto` uses the policy that was kept for a tree's bucket, a set of similar trees (`treegen cache why TREE`). With
    `--suite`, kernels of `compile_batch` use the policy that was kept for their batch's bucket. There a policy is kept
    only if it is at least 2 % faster than the policy that estimates choose.
    """
    if suite:
        if trees or page_size is not None or again or timeout != _TIMEOUT:
            reason = "excludes TREE, --page-size, --timeout and --again"
            raise InputError("suite", "--suite", reason, "leave these out")
        shape_options = (heads, head_dim, dtype, kv_dtype, window_left)
        tune_suite(SuiteOptions(*shape_options, family, data, seed or [0], candidates or 12, repeats or 7, json))
        return
    if not trees:
        raise InputError("trees", "none", "are named", "name trees, or give --suite")
    of_suite = {"kv_dtype": kv_dtype, "window_left": window_left, "family": family, "seed": seed, "json": json}
    for option, given in of_suite.items():
        if given is not None:
            raise InputError(option, str(given), "is about batches", "give --suite as well, or leave it out")
    from treegen.backends.devices import current_target, devices_of
    from treegen.strategies import auto
    from treegen.tuning.tune import DEFAULT_CANDIDATES, DEFAULT_REPEATS, Tuning, check_tuning, tuned

    shape = shape_from(heads, head_dim, dtype, page_size) or DEFAULT_SHAPE
    tuning = Tuning(candidates or DEFAULT_CANDIDATES, repeats or DEFAULT_REPEATS, timeout)
    listed = [tree_from_argument(tree) for tree in trees]
    target = current_target()
    if not devices_of(target):
        raise BackendError("device", "cpu", "is not a CUDA device to measure on", "run it on a GPU")
    check_tuning(auto(), target)
    for name, tree in zip(trees, listed, strict=True):
        with progress_bar(tuning.most + 1) as on_candidate:
            found = tuned(
                Problem(tree, shape, target), tuning, again=again, on_candidate=lambda outcome: on_candidate()
            )
        _print_kept(name, found)


def _print_kept(name: str, found: CachedPolicy) -> None:
    """Prints the policy that was kept for a tree, and the candidates if they were measured now."""
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
