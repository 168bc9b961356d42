"""Batch room: sizes the tables of kernels for running batches, and says which plans fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from treegen.backends.batch_form import BatchForm
from treegen.backends.page_table import PageTable
from treegen.codegen.tile_context import tile_form
from treegen.ir.arrays import INT32_MAX
from treegen.ir.errors import InputError
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.plan import Plan
from treegen.ir.request_tables import RequestRoom, RequestTables
from treegen.ir.shape import FP8, Shape
from treegen.runtime.call_options import BatchOptions
from treegen.schedule.by_request import run_tokens_of
from treegen.strategies import Choice, Strategy
from treegen.strategies.baselines import query
from treegen.strategies.cohort import Cohort
from treegen.target.targets import Target
from treegen.target.tile_config import (
    SMALL_ROWS,
    is_latent,
    kernel_config,
    lanes_of,
    padded,
    reads_packed_fp8,
    resident_blocks,
    rows_per_tile,
    shared_bytes,
    wanted_config,
)

RESERVE = 2048
"""Tokens that a request may gain under one plan; a longer one is served alone until the next plan."""
_WAVES = 1.5
"""The most times that a plan's work items fill the GPU, besides one item for each request.

On an H200 no batch of the suite gains from more.
"""
_LAUNCHED_PER_HELD = 2
"""Thread blocks of a launch, which take items in turn, over those that the GPU holds at a time.

On an H200, which holds two blocks of most kernels per SM, the number makes no difference from 2 to 8. With 1, launches
of 300 items take a fifth longer.
"""
_LEAST_PER_SM = 2
"""Thread blocks that an SM is taken to hold at least.

One with a large latent tile takes a whole SM; room for two does no harm, and is what their times were measured with.
"""
_PARTS_PER_ROW = 3
"""The most partial results of a row on average, besides those of the items that fill the GPU."""
_TOKENS_OF_ONE_HEAD = 64
"""Tokens of a small tile of caches in 8 bits with one KV head."""
_LEAST_FREE = 0.01
"""The least share of the thread blocks that a plan leaves free for requests that are served alone."""
FEW_TOKENS = 512
"""The most tokens of a plan that leaves thread blocks free, for each item that those of a launch take at a time.

The GPU holds half of these blocks at a time, and items of requests that are alone have 256 tokens. On an H200, with 8:1
heads, layers of 96 requests on templates (121 tokens) took 0.94 of the time, and of 64 agents 0.98. Where items are
long beside those of requests that are alone, nothing is gained: the former with 32:8 heads (971 tokens) took 1.01.
"""
_SHORT_WINDOW, _TOKENS_OF_SHORT_WINDOWS = 1024, 64
"""The most tokens of a short window, and the most tokens of a tile there."""
CLAIMS_PER_ROW = 8
"""The most requests that a request shares pages with, on average; where there are more, each keeps this number."""


def batch_config(shape: Shape, target: Target, window_left: int = -1) -> KernelConfig:
    """Returns the one kernel config of all plans, with masks: the large one.

    It is a small one where the query heads of a KV head fit into it, and values have more than 256 dims (MLA), or
    caches in 8 bits are read in words. On an H200, 64 requests of 1,024 to 8,192 tokens that share nothing, 16:1 heads
    and dims 576 and 512, take 126 us with the small tile and 286 us with the large one. Six batches of the suite with
    e4m3 caches take 0.35 to 0.92 of the time with 32:8 heads, and 0.55 to 1.12 with 8:1. With one KV head, where
    launches are short, tiles of 64 tokens take 0.72 to 1.13 of the time of those of 32.

    In short windows rows share few tokens, and launches take little time. There, values of 129 to 256 dims have a small
    tile, and no tile has more than 64 tokens. On an H200 the small tile takes 0.85 to 0.95 of the time of the large one
    (windows of 1,024 tokens, heads 16:8 and 8:4), and without a window 0.91 to 1.22. Tiles of 64 tokens take 0.82 to
    0.93 of the time of those of 128 (windows of 128 tokens, heads 64:8 of dim 64; longer ones were not measured).
    """
    in_words, short = reads_packed_fp8(SMALL_ROWS, shape), 0 <= window_left <= _SHORT_WINDOW
    wide = _small_and_wide(shape, target) if short else None
    if shape.group > SMALL_ROWS or not (is_latent(shape) or in_words or wide is not None):
        config = kernel_config(shape, target, SMALL_ROWS + 1)
        if short:
            config = replace(config, tokens=min(config.tokens, _TOKENS_OF_SHORT_WINDOWS))
    elif in_words and shape.num_kv_heads == 1:
        config = wanted_config(SMALL_ROWS, _TOKENS_OF_ONE_HEAD, shape, target)
    else:
        config = wide or kernel_config(shape, target, 1)
    return replace(config, mask="interval", run_tokens=run_tokens_of(shape.page_size))


def _small_and_wide(shape: Shape, target: Target) -> KernelConfig | None:
    """Returns a small tile of many tokens for values of 129 to 256 dims in 16 bits, if one fits into an SM.

    One thread block with three stages of 64 tokens takes an SM; of large tiles two, with two stages of 32, share one.
    """
    in_16_bits = shape.dtype != "fp32" and shape.kv_dtype not in FP8
    if is_latent(shape) or shape.shared_kv or not in_16_bits or padded(shape.head_dim_v) <= 128:
        return None
    tokens, stages = _TOKENS_OF_SHORT_WINDOWS, 3
    if shared_bytes(SMALL_ROWS, tokens, stages, shape, target) > target.shared_bytes:
        return None
    return replace(wanted_config(SMALL_ROWS, tokens, shape, target), num_stages=stages)


def reserve_of(most_tokens: int) -> int:
    """Returns the tokens that requests of up to `most_tokens` may gain before the next plan."""
    return min(RESERVE, most_tokens)


def held_at_once(config: KernelConfig, shape: Shape, target: Target) -> int:
    """Returns the thread blocks that the device holds at a time."""
    return max(resident_blocks(config, shape, target), _LEAST_PER_SM) * target.sms


def items_at_once(held: int, lanes: int) -> int:
    """Returns the items that the thread blocks of a launch take at a time.

    Rounded down: thread blocks beyond a multiple of `held` would begin when all others end, and then work alone.

    Args:
        held: See `held_at_once`.
        lanes: Thread blocks of an item.
    """
    return max(1, _LAUNCHED_PER_HELD * held // lanes)


def room_of(
    shape: Shape,
    config: KernelConfig,
    requests: int,
    most_tokens: int,
    held: int,
    max_rows: int | None = None,
    *,
    positions: bool = False,
) -> RequestRoom:
    """Sizes tables for every plan of `requests` requests of up to `most_tokens` tokens.

    Args:
        shape: The attention shape.
        config: The kernel config of all plans.
        requests: The most requests at a time.
        most_tokens: The most tokens of a request.
        held: See `held_at_once`.
        max_rows: The most query rows of all requests; None where each request has one.
        positions: Whether kernels need positions of rows and tokens.
    """
    rows = requests if max_rows is None else max_rows
    lanes, per_tile = lanes_of(config, shape), rows_per_tile(config.rows, shape.group)
    filling = math.ceil(_WAVES * held / lanes)
    items = rows + filling
    slots = _PARTS_PER_ROW * rows + 2 * filling * per_tile
    entries = 8 * items + 4 * rows
    page_size, packed = shape.page_size, config.tokens // run_tokens_of(shape.page_size)
    tiles = -(-(most_tokens + reserve_of(most_tokens)) // config.tokens)
    lone_items = max(-(-rows // per_tile), math.ceil(held / lanes))
    lone_rows = -(-rows // lone_items)
    _, tile_width = tile_form(config.tokens, page_size, positions=positions)
    return RequestRoom(
        seats=requests,
        items=items,
        at_once=items_at_once(held, lanes),
        rows=rows,
        entries=entries,
        claims=CLAIMS_PER_ROW * requests,
        slots=slots,
        merge_partials=slots,
        tiles=rows * tiles,
        packed_runs=entries * packed,
        lone_items=lone_items,
        lone_rows=lone_rows,
        lone_tiles=lone_rows * tiles,
        lone_runs=lone_rows * packed,
        tile_width=tile_width,
        run_width=5 if positions else 4,
        queries=max_rows is not None,
    )


def chunk_room_of(
    shape: Shape,
    config: KernelConfig,
    requests: int,
    most_tokens: int,
    chunk: int,
    held: int,
    *,
    positions: bool = False,
) -> RequestRoom:
    """Sizes tables as room_of does, for batch-invariant mode with chunks of `chunk` tokens.

    Lone items have room for all chunks of each request, because any of them may be served alone.
    """
    lanes, per_tile = lanes_of(config, shape), rows_per_tile(config.rows, shape.group)
    filling = math.ceil(_WAVES * held / lanes)
    chunks = requests * -(-most_tokens // chunk)
    lone_items = max(-(-chunks // per_tile), min(chunks, filling))
    lone_rows = 1 << (per_tile - 1).bit_length()  # the same for all sizes, as step kernels are compiled for it
    items, packed = requests + filling, config.tokens // run_tokens_of(shape.page_size)
    _, tile_width = tile_form(config.tokens, shape.page_size, positions=positions)
    return RequestRoom(
        seats=requests,
        items=items,
        at_once=items_at_once(held, lanes),
        rows=requests,
        entries=items,
        claims=CLAIMS_PER_ROW * requests,
        slots=chunks,
        merge_partials=0,
        tiles=items * (chunk // config.tokens),
        packed_runs=items * packed,
        lone_items=lone_items,
        lone_rows=lone_rows,
        lone_tiles=lone_rows * (chunk // config.tokens),
        lone_runs=lone_rows * packed,
        tile_width=tile_width,
        run_width=5 if positions else 4,
        chunk=chunk,
    )


def form_for(
    shape: Shape, pages: PageTable, target: Target, options: BatchOptions, most_tokens: int, most_rows: int | None
) -> BatchForm:
    """Collects the sizes and options of a kernel for running batches. Raises InputError for tables of 8 GiB or more.

    Args:
        shape: The attention shape.
        pages: The engine's page table.
        target: The device to plan for.
        options: The options of plans and calls.
        most_tokens: The most tokens of a request.
        most_rows: The most query rows of all requests, where the page table has a qo_indptr; by default one for each.
    """
    config = batch_config(shape, target, -1 if options.scoring is None else options.scoring.options.window_left)
    held = held_at_once(config, shape, target)
    positions = options.scoring is not None and options.scoring.positions
    requests = len(pages.seq_lens)
    if most_rows is None and pages.qo_indptr is not None:
        most_rows = requests
    if options.chunk:
        room = chunk_room_of(shape, config, requests, most_tokens, options.chunk, held, positions=positions)
    else:
        room = room_of(shape, config, requests, most_tokens, held, most_rows, positions=positions)
    if RequestTables.of(room).words > INT32_MAX:
        found = f"{most_tokens} for {room.rows} rows"
        raise InputError("max_tokens", found, "needs tables of 8 GiB or more", "give fewer tokens, or fewer rows")
    return BatchForm(config, room, shape, pages, most_tokens, options.scales, options.scoring)


def is_served(plan: Plan) -> bool:
    """Says whether the tables of kernels for running batches can hold a plan of this form."""
    plain = plan.merge == "reduce" and plan.mask == "interval" and not plan.blocks and not plan.invariant_block
    return plain and not np.count_nonzero(plan.round)


def leaving_free(choice: Choice, share: float) -> Choice:
    """Returns the choice for fewer thread blocks, where its tokens are divided evenly. share: of those left out."""
    strategy = choice.strategy
    if share < _LEAST_FREE or not isinstance(strategy, Cohort) or strategy.shares is None:
        return choice
    reason = f"{choice.reason}; {share:.0%} of its thread blocks are left to requests that are served alone"
    return Choice(replace(strategy, shares=round(strategy.shares * (1 - share), 2)), reason)


def in_fewer_parts(strategy: Strategy) -> Iterator[Strategy]:
    """Yields the strategy, the same with longer parts, and last one item for each request, which always fits."""
    yield strategy
    split, shares = strategy.options.get("split"), strategy.options.get("shares")
    if isinstance(strategy, Cohort) and isinstance(shares, int | float):
        for fewer in (2, 4, 8):
            yield replace(strategy, shares=shares / fewer)
    if isinstance(split, int):
        for longer in (2 * split, 4 * split, 8 * split):
            yield replace(strategy, split=longer) if isinstance(strategy, Cohort) else query(longer)
    yield query()
