"""Options of commands about several ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from treegen.cost.known_links import DEFAULT_LINK, LINKS, link_named
from treegen.cost.ranks import Division
from treegen.ir.errors import InputError

RanksOption = Annotated[int, typer.Option(metavar="N", help="Ranks that divide attention; 1 leaves this out.")]
LinkOption = Annotated[
    str | None,
    typer.Option(metavar="|".join(LINKS), help="What connects the ranks.", show_default=DEFAULT_LINK),
]
TensorOption = Annotated[
    int | None,
    typer.Option(metavar="T", help="Ranks that divide the heads; N / T divide the tokens.", show_default="1"),
]
InterleaveOption = Annotated[
    int | None, typer.Option(metavar="I", help="Neighbouring tokens that one rank holds.", show_default="1")
]


def division_from(ranks: int, link: str | None, tensor: int | None, interleave: int | None) -> Division | None:
    """Makes the division of these options; None for one rank.

    Raises:
        InputError: A value is out of range, or an option is given for one rank.
        TreeError: interleave is out of range.
    """
    for name, value in (("link", link), ("tensor", tensor), ("interleave", interleave)):
        if ranks == 1 and value is not None:
            raise InputError(name, value, "is about several ranks", "give --ranks as well")
    named = link_named(DEFAULT_LINK if link is None else link)
    division = Division(ranks, named, 1 if tensor is None else tensor, 1 if interleave is None else interleave)
    return None if ranks == 1 else division
