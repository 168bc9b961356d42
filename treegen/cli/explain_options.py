"""Options of the command explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treegen.report.strategy_diff import DEFAULT_GROUPS

ExplainedOption = Annotated[
    str | None,
    typer.Option(metavar="NAME|all", help="A strategy; see `treegen strategies`.", show_default="auto"),
]
DiffOption = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="A B", help="Compare the plans of two strategies.", show_default="explain --strategy"),
]
CostOption = Annotated[str, typer.Option(metavar="MODEL", help="The cost model for times: analytic or profiled.")]
TraceOption = Annotated[bool, typer.Option("--trace", help="List the best policies that auto weighs.")]
GroupsOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="The most groups of each plan to list; with --diff also the most lines on nodes.",
        show_default=f"0; {DEFAULT_GROUPS} with --diff",
    ),
]
FormulasOption = Annotated[
    bool, typer.Option("--formulas", help="Print the formulas of the cost model, and the values of their terms.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, with all groups.")]
MeasureOption = Annotated[
    bool,
    typer.Option("--measure", help="Run the plans on this machine's GPU, and measure when each thread block runs."),
]
ChromeTraceOption = Annotated[
    Path | None,
    typer.Option(
        "--chrome-trace",
        metavar="FILE",
        help="Write the timelines of thread blocks for trace viewers.",
        show_default="not written",
    ),
]
