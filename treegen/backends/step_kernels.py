"""Step kernels: before the first layer of a decode step they expand a plan's entries into the runs of KV slots that
attention kernels read in all layers, and check what the plan takes for granted.

    read_requests     page table, lengths, entries, claims ──▶ tiles and blocks; states, rows, rows to merge
    settle_requests   states                               ──▶ lone items

A request whose claims hold is walked by the items of the plan. Any other one is alone: lone items walk the whole of its
own row of the page table, and the plan's items do not write its row. What items read are always tokens of running
requests, within their present lengths: values that no request has written are never multiplied, by 0 either.

With QUERIES requests have several query rows, those of their last tokens: a row of the batch has the rows
`qo_indptr[row]:qo_indptr[row + 1]` of q. Without, each has one, of the same number.

Sizes: N tokens of a full tile, P of a page, B of a block. Tables are as in treegen.ir.request_schedule.
"""

import triton
import triton.language as tl

from treegen.backends.claim_checks import INVALID, NEW, PLANNED, SEAT_WORDS, SURPLUS, settle_seat
from treegen.backends.page_expansion import entries_of, expand, fill_up, queries_of, row_of
from treegen.ir.request_schedule import LONE_PARTS

MOST_PARTS = tl.constexpr(LONE_PARTS)
LEAST_PART = tl.constexpr(512)
SIZES = [
    "num_seats", "num_items", "num_rows", "lone_items", "lone_tiles", "lone_blocks", "room_tiles", "room_blocks",
    "lone_slot0", "lone_list0", "batch_rows", "table_stride", "width", "num_pages", "max_tokens", "window_left",
]  # fmt: skip
"""Parameters that differ between batches: machine code is made for none of their values."""


@triton.jit(do_not_specialize=SIZES)
def read_requests(
    seats, seq_lens, table_rows, table, indptr, qo_indptr,
    items, entries, entry_indptr, read_rows, known, claims, queries, row_number, merge_number, counts, rows,
    merge_rows, positions, tiles, blocks, states, counters, flags,
    num_seats, num_items, num_rows, batch_rows, table_stride, width, num_pages, max_tokens, window_left,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TILE_WIDTH: tl.constexpr, RUN_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, WINDOWED: tl.constexpr, E: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr,
    QUERIES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs: PARTS for each item of the plan, which expand it; then one for each seat, which settles it.

    seats [2, seats]: rows of the batch, and epochs. seq_lens [batch_rows]; table_rows [batch_rows] or the row itself;
    table by row, or ragged by indptr [batch_rows + 1]. queries [seats, QUERY_WORDS], row_number and merge_number: see
    treegen.ir.request_schedule. items: those of the plan. flags: the last step in which a request was alone, the last
    one with an impossible page id, length or number of query rows, and this step.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program >= num_items * PARTS:
        settle_seat(
            seats, seq_lens, table_rows, table, indptr, qo_indptr, known, claims, queries, merge_number, counts, rows,
            merge_rows, positions, states, counters, flags, program - num_items * PARTS,
            num_seats, num_rows, batch_rows, table_stride, width, num_pages, max_tokens,
            P, BLOCK, POSITIONS, NAMED, RAGGED, QUERIES,
        )  # fmt: skip
        return
    PACKED: tl.constexpr = N // B
    UNIT: tl.constexpr = max(N, P)
    item = items + program // PARTS * 8
    part = program % PARTS
    row0 = tl.load(item)
    row_count = tl.load(item + 1)
    tile0 = tl.load(item + 2)
    block0 = tl.load(item + 4)
    entry0 = tl.load(entry_indptr + program // PARTS)
    entry1 = tl.load(entry_indptr + program // PARTS + 1)
    if row_count == 0:
        return
    window_begin = 0
    if WINDOWED:
        r = tl.arange(0, R)
        seat_r = tl.load(read_rows + row0 + r, mask=r < row_count, other=0)
        row_r = row_of(seats, seat_r, r < row_count, batch_rows)
        length_r = tl.load(seq_lens + row_r, mask=row_r >= 0, other=2**31 - 1)
        if QUERIES:
            number_r = tl.load(row_number + row0 + r, mask=r < row_count, other=0)
            _, count_r = queries_of(qo_indptr, row_r, row_r >= 0)
            length_r -= tl.where(row_r >= 0, count_r - number_r - 1, 0)
        window_begin = tl.maximum(tl.min(length_r, 0) - 1 - window_left, 0)
    num_tiles = 0
    num_blocks = 0
    for e0 in range(entry0, entry1, E):
        e = e0 + tl.arange(0, E)
        there = e < entry1
        seat = tl.load(entries + e * 5, mask=there, other=0)
        first = tl.load(entries + e * 5 + 1, mask=there, other=0)
        end = tl.load(entries + e * 5 + 2, mask=there, other=0)
        lo = tl.load(entries + e * 5 + 3, mask=there, other=0)
        hi = tl.load(entries + e * 5 + 4, mask=there, other=0)
        row = row_of(seats, seat, there, batch_rows)
        most_tokens = tl.load(known + seat * SEAT_WORDS + 1, mask=there, other=0)
        length = tl.load(seq_lens + row, mask=row >= 0, other=0)
        begin, room = entries_of(table_rows, indptr, row, row >= 0, table_stride, width, NAMED, RAGGED)
        length = tl.where(length <= room * P, tl.minimum(length, most_tokens), 0)
        if QUERIES:
            end = tl.where(end <= 0, tl.maximum(length + end, 0), tl.minimum(end, length))
            first = tl.where(first >= 0, first, tl.maximum(length + first, 0))  # a row's own token, in its window
        else:
            end = tl.where(end == 0, length, tl.minimum(end, length))
        if WINDOWED:  # by whole tiles and pages, so that what is left has the room that it had
            first += tl.maximum(window_begin - first, 0) // UNIT * UNIT
        new_tiles, new_blocks = expand(
            table, tiles, blocks, tile0 + num_tiles, block0 + num_blocks,
            begin, first, tl.maximum(end - first, 0), lo, hi, part, num_pages,
            N, P, B, S, TILE_WIDTH, RUN_WIDTH, POSITIONS, E, T, PARTS, False,
        )  # fmt: skip
        num_tiles += new_tiles
        num_blocks += new_blocks
    if part == 0:
        tl.store(item + 3, num_tiles)
        tl.store(item + 5, fill_up(blocks, block0, num_blocks, PACKED, RUN_WIDTH))


@triton.jit
def rows_alone(states, seat, num_seats, least, QUERIES: tl.constexpr):
    """How many query rows of each of these seats are alone. least: the state from which on a request is."""
    alone = (tl.load(states + seat, mask=seat < num_seats, other=0) >= least).to(tl.int32)
    if QUERIES:
        alone *= tl.load(states + num_seats + seat, mask=seat < num_seats, other=0)
    return alone


@triton.jit(do_not_specialize=SIZES)
def settle_requests(
    seats, seq_lens, table_rows, table, indptr, qo_indptr,
    items, rows, merge_rows, merge_indptr, lone_slots, tiles, blocks, states, counters, flags,
    num_seats, num_rows, lone_items, lone_tiles, lone_blocks, room_tiles, room_blocks, lone_slot0, lone_list0,
    batch_rows, table_stride, width, num_pages, window_left,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TILE_WIDTH: tl.constexpr, RUN_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, WINDOWED: tl.constexpr, T: tl.constexpr,
    LONE_ROWS: tl.constexpr, BLOCK: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr,
    QUERIES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs: one for each lone item, to which it deals requests that are alone. Where these are at most half as many
    as lone items, each is divided among several. With an impossible page id anywhere all requests are alone: items of
    the plan may have read what it names.

    merge_rows, merge_indptr: of lone items. lone_slots: lists of their slots, which begin at entry lone_list0 of the
    plan's lists; the slots begin at lone_slot0. With QUERIES each query row of a request is dealt by itself, and states
    end with how many these are.
    """
    program = tl.program_id(0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    present_step = tl.load(flags + 2)
    any_alone = tl.load(flags) == present_step
    all_alone = tl.load(flags + 1) == present_step
    item = items + program * 8
    of_merge = program < lone_items // 2
    if program == 0:
        tl.store(counters, tl.load(counters) + 1)
    if not any_alone:
        tl.store(item + 1, 0)
        tl.store(merge_rows + program, SURPLUS, mask=of_merge)
        return
    least = tl.where(all_alone, PLANNED, NEW)  # from which state on a request is alone
    if all_alone:
        for s0 in range(program * BLOCK, num_rows, lone_items * BLOCK):
            place = s0 + tl.arange(0, BLOCK)
            tl.store(rows + place, -1, mask=place < num_rows)
            tl.store(merge_rows - 1 - num_rows + place, SURPLUS, mask=place < num_rows)
    alone = 0
    for s0 in range(0, num_seats, BLOCK):
        alone += tl.sum(rows_alone(states, s0 + tl.arange(0, BLOCK), num_seats, least, QUERIES), 0)
    alone = tl.maximum(alone, 1) if QUERIES else alone
    parts = tl.maximum(tl.minimum(lone_items // alone, MOST_PARTS), 1)
    divided = parts > 1
    part = tl.where(divided, program // alone, 0)
    r = tl.arange(0, LONE_ROWS)
    wanted = tl.where(divided, program % alone, program) + r * lone_items
    wanted = tl.where(part < parts, wanted, alone)
    seat_r = tl.full([LONE_ROWS], -1, tl.int32)
    number_r = tl.full([LONE_ROWS], 0, tl.int32)
    before = 0
    for s0 in range(0, num_seats, BLOCK):
        seat = s0 + tl.arange(0, BLOCK)
        is_alone = rows_alone(states, seat, num_seats, least, QUERIES)
        if QUERIES:
            number = wanted[None, :] - (before + tl.cumsum(is_alone, 0) - is_alone)[:, None]
            here = (number >= 0) & (number < is_alone[:, None])
            number_r = tl.maximum(number_r, tl.max(tl.where(here, number, 0), 0))
        else:
            place = before + tl.cumsum(is_alone, 0) - 1
            here = (is_alone > 0)[:, None] & (place[:, None] == wanted[None, :])
        seat_r = tl.maximum(seat_r, tl.max(tl.where(here, seat[:, None], -1), 0))
        before += tl.sum(is_alone, 0)
    row = row_of(seats, seat_r, seat_r >= 0, batch_rows)
    row_count = tl.sum((seat_r >= 0).to(tl.int32), 0)
    written = row
    merging = divided & (program < alone)
    if QUERIES:
        query, count = queries_of(qo_indptr, row, row >= 0)
        written = tl.where(row >= 0, query + number_r, -1)
        merging &= row_count > 0
    tl.store(item + 1, row_count)
    merged = tl.where(merging, tl.max(written, 0), SURPLUS)
    tl.store(merge_rows + program, merged, mask=of_merge)
    if divided & (row_count > 0):
        number = program % alone
        tl.store(lone_slots + number * parts + part, lone_slot0 + program)
        tl.store(merge_indptr + number, lone_list0 + number * parts)
        tl.store(merge_indptr + number + 1, lone_list0 + (number + 1) * parts)
    if row_count > 0:
        PACKED: tl.constexpr = N // B
        UNIT: tl.constexpr = max(N, P)
        row0 = num_rows + program * LONE_ROWS
        valid = tl.load(states + seat_r, mask=seat_r >= 0, other=0) < INVALID
        length = tl.load(seq_lens + row, mask=(row >= 0) & valid, other=0)
        if QUERIES:
            length = tl.where(valid & (row >= 0), tl.maximum(length - count + number_r + 1, 0), 0)
        begin, _ = entries_of(table_rows, indptr, row, row >= 0, table_stride, width, NAMED, RAGGED)
        first = tl.zeros([LONE_ROWS], tl.int32)
        if WINDOWED:
            first = tl.maximum(length - 1 - window_left, 0) // UNIT * UNIT
        share = tl.maximum(tl.cdiv(length - first, parts * UNIT) * UNIT, LEAST_PART)
        share = tl.where(divided, share, length - first)
        first = tl.minimum(first + part * share, length)
        tokens = tl.minimum(share, length - first)
        tile0 = room_tiles + program * lone_tiles
        block0 = room_blocks + program * lone_blocks
        num_tiles, num_blocks = expand(
            table, tiles, blocks, tile0, block0, begin, first, tokens, r, r + 1, 0, num_pages,
            N, P, B, S, TILE_WIDTH, RUN_WIDTH, POSITIONS, LONE_ROWS, T, 1, False,
        )  # fmt: skip
        tl.store(rows + row0 + r, written, mask=seat_r >= 0)
        tl.store(item, row0)
        tl.store(item + 2, tile0)
        tl.store(item + 3, num_tiles)
        tl.store(item + 4, block0)
        tl.store(item + 5, fill_up(blocks, block0, num_blocks, PACKED, RUN_WIDTH))
        tl.store(item + 6, tl.where(divided, lone_slot0 + program, -1))
        tl.store(item + 7, -1)
