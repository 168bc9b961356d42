"""Step launches: the grids and arguments of step kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from treegen.backends.batch_form import BatchForm
from treegen.backends.kernel_launch import KernelLaunch
from treegen.codegen.compile_counter import watch_compiles
from treegen.ir.request_tables import RequestTables
from treegen.schedule.by_request import run_tokens_of
from treegen.target.targets import starts_launches_early
from treegen.target.tile_config import rows_per_tile

CHECKED, SCANNED = 256, 256
"""Pages that a thread block checks, and seats that it searches, at a time.

On an H200 step kernels that check 512 pages at a time take 1.04 to 1.3 times as long, and with 128 as long as with 256.
"""
_ENTRIES, _TILES = 16, 32
"""Entries, and tiles of entries, that a thread block expands at a time.

On an H200, both step kernels, each of 20 in a graph: 256 requests that share 4,096 tokens take 5.8 us with 16 and 6.6
with 8 entries, 256 of 13,000 tokens 8.5 and 7.9. With 16 tiles the latter take 9.9.
"""
_EXPAND_PARTS, _MANY_ITEMS = 8, 1024
"""Thread blocks that expand an item, one its packed runs and the others its full tiles; and the most items for which it
is more than one block. In that run the requests that share tokens take 5.8 us in eight parts and 5.3 in four, those of
13,000 tokens 8.5 and 13.9.
"""
_WARPS = 1
"""Warps of a step kernel's thread block."""


class _Common(NamedTuple):
    """The arguments that step kernels have in common.

    tables: the tables on the device, by name. pages: seats, lengths and the page table. bounds: numbers of rows and
    pages, and strides of the page table. sizes: tokens of tiles, pages and packed runs, and the widths of entries.
    kinds: the form of the page table, and whether requests have several query rows. dependent: whether the second
    launch may begin before the first one has ended.
    """

    form: BatchForm
    tables: Mapping[str, torch.Tensor]
    pages: tuple[torch.Tensor, ...]
    bounds: tuple[int, ...]
    sizes: tuple[int, ...]
    kinds: tuple[bool, bool, bool]
    dependent: bool

    @classmethod
    def of(
        cls, form: BatchForm, tables: Mapping[str, torch.Tensor], seats: torch.Tensor, *, dependent: bool
    ) -> _Common:
        """Collects the arguments for tables of this form."""
        config, room, pages, page_size = form.config, form.room, form.pages, form.shape.page_size
        named, indptr, queries = pages.table_rows, pages.indptr, pages.qo_indptr
        unread = pages.seq_lens
        given = (part if part is not None else unread for part in (named, pages.table, indptr, queries))
        stride, width = 0 if indptr is not None else pages.table.stride(0), pages.table.shape[-1]
        slots = max(1, config.tokens // page_size)
        sizes = (
            config.tokens, page_size, run_tokens_of(page_size), slots, room.tile_width, room.run_width,
            int(form.positions), form.window_left >= 0,
        )  # fmt: skip
        bounds = len(pages.seq_lens), stride, width, pages.num_pages
        kinds = named is not None, indptr is not None, queries is not None
        return cls(form, tables, (seats, pages.seq_lens, *given), bounds, sizes, kinds, dependent)

    def of_tables(self, *names: str) -> tuple[torch.Tensor, ...]:
        """Returns the tables of these names."""
        return tuple(self.tables[name] if name != "counters" else counters_of(self.tables) for name in names)

    @property
    def second_options(self) -> dict[str, Any]:
        """The launch options of the second kernel, which begins before the first one has ended where it can."""
        return {"num_warps": _WARPS, **({"launch_pdl": True} if self.dependent else {})}


def counters_of(tables: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the number of steps, and of requests by state over all steps, as int64 on the device."""
    return tables["counters"][:12].view(torch.int64)


def step_launches(
    form: BatchForm, tables: Mapping[str, torch.Tensor], seats: torch.Tensor, capability: int
) -> tuple[KernelLaunch, KernelLaunch]:
    """Makes the launches of both step kernels. seats: `[RUNNING_FIELDS, seats]`."""
    watch_compiles()
    common = _Common.of(form, tables, seats, dependent=starts_launches_early(capability))
    return _read(common), _deal(common) if form.room.chunk else _settle(common)


def _rows_of_item(form: BatchForm) -> int:
    """Returns a power of two at or above the rows of any item. It depends on the shape alone, like compiled kernels."""
    return 1 << (rows_per_tile(form.config.rows, form.shape.group) - 1).bit_length()


def _read(common: _Common) -> KernelLaunch:
    """Makes the launch of the first kernel, which expands the plan's items and checks each request."""
    from treegen.backends.step_kernels import read_requests

    form, room = common.form, common.form.room
    parts = _EXPAND_PARTS if room.items <= _MANY_ITEMS else 1
    page = form.shape.page_size
    unit = max(form.config.tokens, page) if room.chunk else page  # so that tokens of chunks stay in their tiles
    tables = common.of_tables(
        "planned", "entries", "entry_indptr", "read_rows", "seats", "claims", "queries", "row_number", "merge_number",
        "rows", "merge_rows", "positions", "tiles", "packed_runs", "states", "counters", "flags",
    )  # fmt: skip
    arguments = (
        *common.pages, *tables,
        room.seats, room.items, room.rows, *common.bounds, form.most_tokens, form.window_left,
        *common.sizes, unit, _ENTRIES, _TILES, max(16, _rows_of_item(form)), parts, CHECKED, *common.kinds,
        common.dependent,
    )  # fmt: skip
    return KernelLaunch(read_requests, (room.items * parts + room.seats,), arguments, {"num_warps": _WARPS})


def _settle(common: _Common) -> KernelLaunch:
    """Makes the launch of the second kernel, which deals requests that are alone to lone items."""
    from treegen.backends.step_kernels import settle_requests

    form, room, tables = common.form, common.form.room, common.tables
    places = RequestTables.of(room)
    arguments = (
        *common.pages, *common.of_tables("alone", "rows"),
        tables["merge_rows"][room.rows + 1 :], tables["merge_indptr"][room.rows + 1 :],
        *common.of_tables("lone_partials", "tiles", "packed_runs", "states", "counters", "age", "flags"),
        room.seats, room.rows, room.lone_items, room.lone_rows, room.lone_tiles, room.lone_runs, room.tiles,
        room.packed_runs, room.slots, places.lone_partials - places.merge_partials, *common.bounds, form.window_left,
        *common.sizes, _TILES, _rows_of_item(form), SCANNED, *common.kinds, common.dependent,
    )  # fmt: skip
    return KernelLaunch(settle_requests, (room.lone_items,), arguments, common.second_options)


def _deal(common: _Common) -> KernelLaunch:
    """Makes the launch of the second kernel in batch-invariant mode, which deals chunks and lists merges."""
    from treegen.backends.chunk_kernels import settle_chunks

    form, room = common.form, common.form.room
    tables = common.of_tables(
        "alone", "rows", "merge_rows", "merge_indptr", "lone_partials", "shared", "shared_partials",
        "tiles", "packed_runs", "states", "counters", "age",
    )  # fmt: skip
    arguments = (
        *common.pages[:-1], *tables,
        room.seats, room.rows, room.lone_items, room.lone_tiles, room.lone_runs, room.tiles, room.packed_runs,
        room.slots, *common.bounds, form.window_left, room.chunk,
        *common.sizes, _TILES, room.lone_rows, SCANNED, *common.kinds[:-1], common.dependent,
    )  # fmt: skip
    grid = (room.lone_items + -(-room.seats // SCANNED),)
    return KernelLaunch(settle_chunks, grid, arguments, common.second_options)
