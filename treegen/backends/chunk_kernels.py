"""The second step kernel in batch-invariant mode: deals chunks of requests to lone items.

A row's bits follow from its own tokens if these are always read in the same chunks and tiles, and if the partial
results of its chunks are always merged in the same order. So each chunk has a partial slot. It belongs to an item of
the plan where the plan shares the chunk and the request's claims hold, and to a lone item otherwise.

    lengths      request 0: 2 chunks      request 1: 3 chunks
    list         [ 0.0 | 0.1 | 1.0 | 1.1 | 1.2 ]      partial slots, merge_partials[merge_indptr[seat]:]
    lone items   entry t of the list is chunk t // lone_items of lone item t % lone_items

Tables and sizes are as in treegen.backends.step_kernels.
"""

import triton
import triton.language as tl

from treegen.backends.claim_checks import FREE, INVALID, PLANNED, SURPLUS
from treegen.backends.page_expansion import deal, entries_of, row_of, write_lone_item

SIZES = [
    "num_seats", "num_rows", "lone_items", "lone_tiles", "lone_runs", "room_tiles", "room_runs", "lone_partial0",
    "batch_rows", "table_stride", "width", "num_pages", "window_left", "chunk",
]  # fmt: skip
"""Parameters that differ between batches. Machine code is not specialised for their values."""


@triton.jit
def chunks_of(seats, seq_lens, states, seat, num_seats, batch_rows, window_left, chunk, WINDOWED: tl.constexpr):
    """Returns the row of the batch in each seat (-1 for none), the first chunk that it sees, and its chunks."""
    there = seat < num_seats
    row = row_of(seats, seat, there, batch_rows)
    state = tl.load(states + seat, mask=there, other=FREE)
    length = tl.load(seq_lens + row, mask=(row >= 0) & (state != INVALID), other=0)
    first = 0 * length
    if WINDOWED:
        first = tl.maximum(length - 1 - window_left, 0) // chunk
    return row, first, (length + chunk - 1) // chunk - first


@triton.jit
def list_merges(
    seats, seq_lens, states, merge_rows, merge_indptr, begin, num_seats, batch_rows, window_left, chunk,
    BLOCK: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Writes the rows to merge, and the end of each row's list of slots, for BLOCK seats from `begin` on."""
    before = 0
    for s0 in range(0, begin, BLOCK):
        seat = s0 + tl.arange(0, BLOCK)
        _, _, count = chunks_of(seats, seq_lens, states, seat, num_seats, batch_rows, window_left, chunk, WINDOWED)
        before += tl.sum(count, 0)
    seat = begin + tl.arange(0, BLOCK)
    row, _, count = chunks_of(seats, seq_lens, states, seat, num_seats, batch_rows, window_left, chunk, WINDOWED)
    tl.store(merge_rows + seat, tl.where(row >= 0, row, SURPLUS), mask=seat < num_seats)
    tl.store(merge_indptr + seat + 1, before + tl.cumsum(count, 0), mask=seat < num_seats)
    if begin == 0:
        tl.store(merge_indptr, 0)


@triton.jit(do_not_specialize=SIZES)
def settle_chunks(
    seats, seq_lens, table_rows, table, indptr,
    items, rows, merge_rows, merge_indptr, merge_partials, shared, shared_partials, tiles, packed_runs, states,
    counters, age, num_seats, num_rows, lone_items, lone_tiles, lone_runs, room_tiles, room_runs, lone_partial0,
    batch_rows, table_stride, width, num_pages, window_left, chunk,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TILE_WIDTH: tl.constexpr, RUN_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, WINDOWED: tl.constexpr, T: tl.constexpr,
    LONE_ROWS: tl.constexpr, BLOCK: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Deals chunks to lone items, one thread block for each, and lists merges, one thread block for BLOCK seats.

    shared [seats, 2], shared_partials: see treegen.ir.request_schedule.SharedChunks. Items of the plan read only pages
    that all of their planned requests have, so an impossible page id of one request does not reach the others.
    """
    program = tl.program_id(0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if program >= lone_items:
        if program == lone_items:
            tl.store(counters, tl.load(counters) + 1)
            tl.store(age, tl.load(age) + 1)
        list_merges(
            seats, seq_lens, states, merge_rows, merge_indptr, (program - lone_items) * BLOCK,
            num_seats, batch_rows, window_left, chunk, BLOCK, WINDOWED,
        )  # fmt: skip
        return
    r = tl.arange(0, LONE_ROWS)
    wanted = program + r * lone_items
    seat_r = tl.full([LONE_ROWS], -1, tl.int32)
    number_r = tl.full([LONE_ROWS], 0, tl.int32)
    before = 0
    for s0 in range(0, num_seats, BLOCK):
        seat = s0 + tl.arange(0, BLOCK)
        _, first, count = chunks_of(seats, seq_lens, states, seat, num_seats, batch_rows, window_left, chunk, WINDOWED)
        before, seat_r, number_r = deal(wanted, seat, first, count, before, seat_r, number_r)
    there = seat_r >= 0
    planned = there & (tl.load(states + seat_r, mask=there, other=FREE) == PLANNED)
    listed = planned & (number_r < tl.load(shared + 2 * seat_r + 1, mask=planned, other=0))
    first_slot = tl.load(shared + 2 * seat_r, mask=listed, other=0)
    slot = tl.load(shared_partials + first_slot + number_r, mask=listed, other=-1)
    partial0 = lone_partial0 + program * LONE_ROWS
    tl.store(merge_partials + wanted, tl.where(slot >= 0, slot, partial0 + r), mask=there)

    alone = there & (slot < 0)
    row_count = tl.max(tl.where(there, r + 1, 0), 0)  # with rows left out, so that no item before the last has none
    item = items + program * 8
    tl.store(item + 1, row_count)
    if row_count > 0:
        UNIT: tl.constexpr = max(N, P)
        row = row_of(seats, seat_r, alone, batch_rows)
        length = tl.load(seq_lens + row, mask=alone, other=0)
        begin, _ = entries_of(table_rows, indptr, row, alone, table_stride, width, NAMED, RAGGED)
        first = number_r * chunk
        end = tl.minimum(first + chunk, length)
        if WINDOWED:  # by whole tiles and pages, so that tokens stay in their tiles
            first = tl.maximum(first, tl.maximum(length - 1 - window_left, 0) // UNIT * UNIT)
        row0 = num_rows + program * LONE_ROWS
        write_lone_item(
            table, item, rows, tiles, packed_runs, program, row0, partial0, tl.where(alone, row, -1), r >= 0,
            begin, first, tl.maximum(end - first, 0), num_pages, room_tiles, lone_tiles, room_runs, lone_runs,
            N, P, B, S, TILE_WIDTH, RUN_WIDTH, POSITIONS, LONE_ROWS, T, True,
        )  # fmt: skip
