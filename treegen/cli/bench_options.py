"""Options of the command bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treegen.cli.arguments import each_pair

SpecsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SPEC...",
        help="Trees, files or folders of trees, decodings as in `treegen io`, or .jsonl files of trees.",
        show_default="the table of FastTree's kernel benchmark",
    ),
]
ProvidersOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Strategies or other libraries, with commas: sdpa, flex, flashinfer-decode, flashinfer-cascade, "
        "flashinfer-cascade-fa2, flashinfer-prefill, fasttree-artifact, fasttree-artifact-planner-tiles. "
        "`--table batches` has providers of its own.",
        show_default="auto,query; all with --from or --table batches",
    ),
]
HeadPairsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="QUERY:KV",
        help="Query heads and KV heads; several with commas, or repeated.",
        callback=each_pair,
        show_default="16:1, 32:8 and 32:32; 32:8 and 8:1 with --table batches",
    ),
]
HeadDimsOption = Annotated[
    list[int] | None, typer.Option(help="Elements of a head; can be repeated.", show_default="128")
]
DtypesOption = Annotated[
    list[str] | None,
    typer.Option(help="fp16, bf16 or fp32; can be repeated.", show_default="fp16; bf16 with --table batches"),
]
PagesOption = Annotated[int, typer.Option(min=1, help="Tokens per page of the KV cache.")]
ShuffledOption = Annotated[
    int | None,
    typer.Option(min=1, help="Move KV to shuffled pages of this number of tokens.", show_default="KV in order"),
]
FasttreeOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="A checkout of FastTree-Artifact, for its providers.", show_default="none of them"
    ),
]
StrideOption = Annotated[int, typer.Option(min=1, help="Steps between the trees taken from a decoding.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timed calls per case; times are their medians.")]
RowsOption = Annotated[int, typer.Option(min=1, help="The most rows to compare with the oracle.")]
TableOption = Annotated[
    str | None,
    typer.Option(
        metavar="batches",
        help="Measure layers, plans and steps of a suite of running batches.",
        show_default="measure trees",
    ),
]
StepsOption = Annotated[int | None, typer.Option(min=1, help="Decoding steps of a batch.", show_default="200")]
LayersOption = Annotated[int | None, typer.Option(min=1, help="Attention layers of a batch's step.", show_default="32")]
JsonOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write all results to this file.", show_default="not written")
]
PlotOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the results to this .svg or .png file.", show_default="not drawn"),
]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="FILE", help="Show a file that --json wrote, and measure nothing.", show_default="measure"
    ),
]
