"""Options that several commands have, and the parsing of their texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from treegen.ir.errors import ShapeError
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.target.targets import Target, target_from

TreeArgument = Annotated[
    str,
    typer.Argument(
        metavar="TREE",
        help="Levels 1,16/1000,50 (nodes per level/tokens per node); nodes 1000(50*16); a .json or .txt file, with "
        "FILE#INDEX@STEP for a step of a template; or - for standard input.",
        show_default=False,
    ),
]
StrategyOption = Annotated[str, typer.Option(metavar="NAME|all", help="A strategy; see `treegen strategies`.")]
HeadsOption = Annotated[
    str | None,
    typer.Option(metavar="QUERY:KV", help="Query heads and KV heads, as 32:8 or 32/8.", show_default="32:8"),
]
HeadDimOption = Annotated[int | None, typer.Option(help="Elements of a head of q, K and V.", show_default="128")]
DtypeOption = Annotated[
    str | None, typer.Option(help="Element type of q, K and V: fp16, bf16 or fp32.", show_default="bf16")
]
PageSizeOption = Annotated[int | None, typer.Option(help="Tokens per page of the KV cache.", show_default="1")]
TargetOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE|current",
        help="The GPU to plan for: a name of `treegen targets`, a file of `treegen profile`, or this machine's GPU.",
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a page that draws this, one file that needs no network."),
]
SvgOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a drawing of the tree and the timeline.")]
KvDtypeOption = Annotated[
    str | None,
    typer.Option(help="Type of the KV cache of batches: e4m3 or e5m2.", show_default="that of --dtype"),
]
WindowLeftOption = Annotated[
    int | None,
    typer.Option(min=0, help="Tokens of a batch before its own that a row sees.", show_default="all"),
]
FamilyOption = Annotated[
    str | None,
    typer.Option(metavar="NAME,...", help="Families or names of batches, with commas.", show_default="all batches"),
]
SeedOption = Annotated[
    int, typer.Option(min=0, help="Seed of the batches; 0 is the suite, others are batches of the same kinds.")
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        envvar="TREEGEN_DATA",
        help="Folder of recorded traces for the family `traces`.",
        show_envvar=True,
        show_default="leave this family out",
    ),
]


def shape_from(heads: str | None, head_dim: int | None, dtype: str | None, page_size: int | None) -> Shape | None:
    """Makes the shape of these options, with DEFAULT_SHAPE's parts for None. Returns None where all are None."""
    if heads is None and head_dim is None and dtype is None and page_size is None:
        return None
    default = DEFAULT_SHAPE
    query, kv = (default.num_qo_heads, default.num_kv_heads) if heads is None else _heads(heads)
    return Shape(
        query,
        kv,
        default.head_dim if head_dim is None else head_dim,
        dtype=default.dtype if dtype is None else dtype,
        page_size=default.page_size if page_size is None else page_size,
    )


def shapes_from(
    heads: Sequence[str], head_dims: Sequence[int], dtypes: Sequence[str], page_sizes: Sequence[int]
) -> list[Shape]:
    """Makes the shapes of all combinations, with DEFAULT_SHAPE's part for an empty list."""
    every = product(heads or (None,), head_dims or (None,), dtypes or (None,), page_sizes or (None,))
    return list(dict.fromkeys(shape_from(*parts) or DEFAULT_SHAPE for parts in every))


def pairs_in(text: str) -> list[str]:
    """Returns the pairs of heads in a text that has commas between them, each as "query heads:KV heads"."""
    return [pair.strip().replace("/", ":") for pair in text.split(",")]


def each_pair(texts: list[str] | None) -> list[str] | None:
    """Returns each pair of heads of an option that can be repeated, and whose texts may hold several, with commas."""
    return texts and [pair for text in texts for pair in pairs_in(text)]


def check_shapes_of_batches(
    heads: Sequence[str], head_dim: int | None, dtype: str | None, kv_dtype: str | None
) -> None:
    """Raises ShapeError for options that make no shape; None stands for defaults."""
    for text in heads:
        shape = shape_from(text, head_dim, dtype, None) or DEFAULT_SHAPE
        replace(shape, kv_dtype=kv_dtype or shape.dtype)


def _heads(text: str) -> tuple[int, int]:
    """Returns query heads and KV heads. Raises ShapeError."""
    pair = re.fullmatch("([0-9]{1,6})[:/]([0-9]{1,6})", text)
    if pair is None:
        raise ShapeError("heads", text, "is not a pair of head counts", "give query and KV heads as 32:8")
    return int(pair[1]), int(pair[2])


def target_of(text: str) -> Target:
    """Returns the target of a name or in a file; `current` means this machine's GPU. Raises BackendError."""
    if text != "current":
        return target_from(text)
    from treegen.backends.devices import current_target

    return current_target()


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of cells in aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
