"""The command tune: measure candidates and keep the fastest."""

from __future__ import annotations

from typing import Annotated

import typer

from treegen.autotune_cache.entry import policy_text
from treegen.cli.arguments import (
    DtypeOption,
    HeadDimOption,
    HeadsOption,
    PageSizeOption,
    print_table,
    shape_from,
)
from treegen.cli.progress_bars import progress_bar
from treegen.ir.shape import DEFAULT_SHAPE
from treegen.target.problem import Problem
from treegen.workloads.tree_files import tree_from_argument

CandidatesOption = Annotated[int, typer.Option(min=1, help="How many of the model's best are measured.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timed calls of every candidate.")]
TimeoutOption = Annotated[float, typer.Option(help="Seconds for a candidate, with compiling and checking it.")]
AgainOption = Annotated[bool, typer.Option("--again", help="Measure even what the cache knows.")]


def tune(
    trees: Annotated[
        list[str], typer.Argument(metavar="TREE...", help="Trees, as `treegen explain` takes them.", show_default=False)
    ],
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    dtype: DtypeOption = None,
    page_size: PageSizeOption = None,
    candidates: CandidatesOption = 8,
    repeats: RepeatsOption = 15,
    timeout: TimeoutOption = 60.0,
    again: AgainOption = False,
) -> None:
    """Measure the cost model's best candidates on this machine's GPU and keep the fastest for such trees.

    `auto` takes what is kept for all trees of the same bucket (`treegen cache why TREE`).
    """
    from treegen.backends.devices import current_target
    from treegen.strategies import auto
    from treegen.tuning.tune import Tuning, check_tuning, tuned

    shape = shape_from(heads, head_dim, dtype, page_size) or DEFAULT_SHAPE
    tuning = Tuning(candidates, repeats, timeout)
    listed = [tree_from_argument(tree) for tree in trees]
    target = current_target()
    check_tuning(auto(), target)
    for name, tree in zip(trees, listed, strict=True):
        with progress_bar(candidates + 1) as on_candidate:
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
