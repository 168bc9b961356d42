"""What kernels for batches that live have room for, and which plans go into it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from treegen.codegen.tile_context import tile_form
from treegen.ir.plan import Plan
from treegen.ir.request_tables import RequestRoom
from treegen.ir.schedule import TileClass
from treegen.ir.shape import Shape
from treegen.schedule.by_request import block_of
from treegen.strategies import Strategy
from treegen.strategies.baselines import query
from treegen.strategies.cohort import Cohort
from treegen.target.targets import Target
from treegen.target.tile_config import SMALL_ROWS, lanes_of, rows_per_tile, tile_class

RESERVE = 2048
"""Tokens that every request may gain until it is walked alone, if there is no new plan."""
_WAVES = 1.5
"""Times that the work items of a plan fill the GPU, at most, besides one for every request. On an H200 no batch of the
suite gains from more, and thread blocks without work take 1.1 us a thousand.
"""
_PARTS_PER_ROW = 3
"""Partial results of every row, on average at most, besides those of the items that fill the GPU."""
CLAIMS_PER_ROW = 8
"""Requests that a request has pages of, on average at most; where there are more, each shares with so many."""


def tile_of(shape: Shape, target: Target) -> TileClass:
    """The one tile class of all plans: the large one, with masks."""
    return replace(tile_class(shape, target, SMALL_ROWS + 1), mask="interval", block=block_of(shape.page_size))


def reserve_of(most_tokens: int) -> int:
    """Tokens that a plan leaves each request to gain, where one has `most_tokens` at most."""
    return min(RESERVE, most_tokens)


def room_of(
    shape: Shape,
    tile: TileClass,
    requests: int,
    most_tokens: int,
    sms: int,
    max_rows: int | None = None,
    *,
    positions: bool = False,
) -> RequestRoom:
    """What any plan for so many requests of so many tokens may take, which follows from nothing else. max_rows: query
    rows of all requests together, where these may have several; None where each has one.
    """
    rows = requests if max_rows is None else max_rows
    lanes, per_tile = lanes_of(tile, shape), rows_per_tile(tile.rows, shape.group)
    filling = math.ceil(_WAVES * 2 * sms / lanes)
    items = rows + filling
    slots = _PARTS_PER_ROW * rows + 2 * filling * per_tile
    entries = 8 * items + 4 * rows
    page_size, packed = shape.page_size, tile.tokens // block_of(shape.page_size)
    tiles = -(-(most_tokens + reserve_of(most_tokens)) // tile.tokens)
    lone_items = max(-(-rows // per_tile), math.ceil(sms / lanes))
    lone_rows = 1 << (-(-rows // lone_items) - 1).bit_length()
    _, tile_width = tile_form(tile.tokens, page_size, positions=positions)
    return RequestRoom(
        seats=requests,
        items=items,
        rows=rows,
        entries=entries,
        claims=CLAIMS_PER_ROW * requests,
        slots=slots,
        merge_slots=slots,
        tiles=rows * tiles,
        blocks=entries * packed,
        lone_items=lone_items,
        lone_rows=lone_rows,
        lone_tiles=lone_rows * tiles,
        lone_blocks=lone_rows * packed,
        tile_width=tile_width,
        run_width=5 if positions else 4,
        queries=max_rows is not None,
    )


def chunk_room_of(
    shape: Shape, tile: TileClass, requests: int, most_tokens: int, chunk: int, sms: int, *, positions: bool = False
) -> RequestRoom:
    """`room_of` in batch-invariant mode, with chunks of `chunk` tokens: lone items have room for all of each request's
    chunks, as any of them may be walked alone.
    """
    lanes, per_tile = lanes_of(tile, shape), rows_per_tile(tile.rows, shape.group)
    filling = math.ceil(_WAVES * 2 * sms / lanes)
    chunks = requests * -(-most_tokens // chunk)
    lone_items = max(-(-chunks // per_tile), min(chunks, filling))
    lone_rows = 1 << (per_tile - 1).bit_length()  # the same for all sizes: step kernels are compiled for it
    items, packed = requests + filling, tile.tokens // block_of(shape.page_size)
    _, tile_width = tile_form(tile.tokens, shape.page_size, positions=positions)
    return RequestRoom(
        seats=requests,
        items=items,
        rows=requests,
        entries=items,
        claims=CLAIMS_PER_ROW * requests,
        slots=chunks // 2,
        merge_slots=0,
        tiles=items * (chunk // tile.tokens),
        blocks=items * packed,
        lone_items=lone_items,
        lone_rows=lone_rows,
        lone_tiles=lone_rows * (chunk // tile.tokens),
        lone_blocks=lone_rows * packed,
        tile_width=tile_width,
        run_width=5 if positions else 4,
        chunk=chunk,
    )


def is_served(plan: Plan) -> bool:
    """Whether a plan is of the form that the tables of kernels for batches have room for."""
    plain = plan.merge == "reduce" and plan.mask == "interval" and not plan.blocks and not plan.fixed_block
    return plain and not np.count_nonzero(plan.stage)


def in_fewer_parts(strategy: Strategy) -> Iterator[Strategy]:
    """The strategy, then with longer and longer parts, and at last one item for every request, which always fits."""
    yield strategy
    split = strategy.options.get("split")
    if isinstance(split, int):
        for longer in (2 * split, 4 * split, 8 * split):
            yield replace(strategy, split=longer) if isinstance(strategy, Cohort) else query(longer)
    yield query()
