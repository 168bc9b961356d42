"""What the templates of partial kernels read of their tiles: entries of the tables, and how tokens find their slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from treegen.ir.keys import KernelKey
from treegen.ir.work_items import POSITIONED_RUN_FIELDS, RUN_FIELDS
from treegen.target.tile_config import MOST_UNROLLED

_MOST_HIDDEN_BY_RUN = 4
"""Runs packed into one tile up to which masks are made for each of them; what more take spills on Blackwell."""

Fields: TypeAlias = tuple[tuple[str, int], ...]
"""Fields of a table that a kernel reads, with their columns."""


@dataclass(frozen=True, slots=True)
class FullTileContext:
    """What full tiles are: entries of `width` integers, of which kernels read `fields`.

    pages: pages whose slots an entry lists, of page_tokens each; 1 where a tile is one run. gathered: whether tokens
    load their page's slot; selected: whether they select it from registers; by_page: whether a run's slots are found
    page by page; by_run: whether they lie one after another.
    """

    width: int
    fields: Fields
    pages: int
    page_tokens: int
    gathered: bool
    selected: bool
    by_page: bool
    by_run: bool

    @classmethod
    def of(cls, key: KernelKey) -> FullTileContext:
        """Spells out a key's full tiles."""
        names = run_fields(key)
        pages, width = tile_form(key.tile_tokens, key.request_page, positions="position" in names)
        gathered = pages > MOST_UNROLLED
        slots = ("slot",) if pages == 1 else tuple(f"slot_{page}" for page in range(pages))
        columns = (*slots, *names[1 if pages == 1 else 2 :])
        unread = {"length", *_unread(key), *(slots if gathered else ())}
        return cls(
            width=width,
            fields=tuple((name, column) for column, name in enumerate(columns) if name not in unread),
            pages=pages,
            page_tokens=key.tile_tokens // pages,
            gathered=gathered,
            selected=1 < pages <= MOST_UNROLLED,
            by_page=pages == 1 and key.page_size > 1,
            by_run=pages == 1 and key.page_size == 1,
        )


@dataclass(frozen=True, slots=True)
class PackedTileContext:
    """What packed tiles are: `runs` runs of up to run_tokens slots, with entries of `width` integers, of which kernels
    read `fields`.

    unrolled: whether a tile's entries are in registers, loaded one tile ahead; tokens then take fields_by_token from
    them. by_run: whether scores are hidden by run, else by token. positions: whether runs have a position.
    """

    runs: int
    run_tokens: int
    width: int
    fields: Fields
    unrolled: bool
    fields_by_token: tuple[str, ...]
    by_run: bool
    positions: bool

    @classmethod
    def of(cls, key: KernelKey) -> PackedTileContext:
        """Spells out a key's packed tiles."""
        names, runs = run_fields(key), key.tile_tokens // key.run_tokens
        by_run = runs <= _MOST_HIDDEN_BY_RUN
        read = tuple((name, column) for column, name in enumerate(names) if name not in _unread(key))
        return cls(
            runs=runs,
            run_tokens=key.run_tokens,
            width=len(names),
            fields=read,
            unrolled=runs <= MOST_UNROLLED,
            fields_by_token=tuple(name for name, _ in read if not by_run or name not in ("lo", "hi")),
            by_run=by_run,
            positions="position" in names,
        )


def tile_form(tokens: int, request_page: int, *, positions: bool) -> tuple[int, int]:
    """Returns the slots that are listed for a full tile, and the width of its entry.

    An entry is a run, or by request, where a tile has several pages, their slots and a run's fields from `lo` on.
    """
    fields = len(POSITIONED_RUN_FIELDS if positions else RUN_FIELDS)
    if not 0 < request_page < tokens:
        return 1, fields
    slots = tokens // request_page
    return slots, slots + fields - 2


def run_fields(key: KernelKey) -> tuple[str, ...]:
    """Returns the columns of a run."""
    return POSITIONED_RUN_FIELDS if key.scoring is not None and key.scoring.positions else RUN_FIELDS


def _unread(key: KernelKey) -> tuple[str, ...]:
    """Columns of runs that kernels without masks leave alone."""
    return ("lo", "hi") if key.mask == "none" else ()
