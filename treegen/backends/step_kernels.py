"""Step kernels: expand a plan's entries and check its claims, once before the first layer of a decode step.

    read_requests     page table, lengths, entries, claims ──▶ full tiles, packed runs; states, rows, rows to merge
    settle_requests   states                               ──▶ lone items

The items of the plan serve a request whose claims hold. Any other request is alone: lone items read its whole row of
the page table, and the plan's items do not write its rows. Items read only tokens of running requests, within their
present lengths, so a value that no request has written is never multiplied, not even by 0.

With QUERIES a request has several query rows, for its last tokens: the rows `qo_indptr[row]:qo_indptr[row + 1]` of q.
Without, it has one, which is its row of the batch.

Sizes: N tokens of a full tile, P of a page, B of a packed run. Tables are as in treegen.ir.request_tables.
"""

import triton
import triton.language as tl

from treegen.backends.claim_checks import INVALID, NEW, PLANNED, SEAT_WORDS, SURPLUS, settle_seat
from treegen.backends.page_expansion import (
    begin_of_windows,
    deal,
    entries_of,
    expand,
    fill_up,
    queries_of,
    reading_row,
    row_lengths,
    row_of,
    write_lone_item,
)
from treegen.ir.request_tables import LONE_PARTS

MOST_PARTS = tl.constexpr(LONE_PARTS)
LEAST_PART = tl.constexpr(256)
SIZES = [
    "num_seats", "num_items", "num_rows", "lone_items", "lone_rows", "lone_tiles", "lone_runs", "room_tiles",
    "room_runs", "lone_partial0", "lone_list0", "batch_rows", "table_stride", "width", "num_pages", "max_tokens",
    "window_left",
]  # fmt: skip
"""Parameters that differ between batches. Machine code is not specialised for their values."""


@triton.jit
def read_entries(
    entry, there, read_rows, seats, seq_lens, table_rows, indptr, known, num_seats, batch_rows, table_stride, width,
    P: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Returns where the page ids of each entry's request begin, its tokens `first:end` for the present length, and the
    rows `lo:hi` of the item that see them.

    An entry that a single seat sees is empty if another request than planned is in it. Of a request that is longer than
    its row of the page table, only the tokens in the table are read: others may share them. read_rows: the seats of the
    item's rows.
    """
    seat = tl.load(entry, mask=there, other=0)
    first = tl.load(entry + 1, mask=there, other=0)
    end = tl.load(entry + 2, mask=there, other=0)
    lo = tl.load(entry + 3, mask=there, other=0)
    hi = tl.load(entry + 4, mask=there, other=0)
    end_page = tl.where(end > 0, (end + P - 1) // P, 2**31 - 1)
    row = reading_row(seats, seat, end_page, there, num_seats, batch_rows, False)
    most_tokens = tl.load(known + seat * SEAT_WORDS + 1, mask=there, other=0)
    length = tl.load(seq_lens + row, mask=row >= 0, other=0)
    begin, room = entries_of(table_rows, indptr, row, row >= 0, table_stride, width, NAMED, RAGGED)
    seer = tl.load(read_rows + lo, mask=there, other=0)
    planned_epoch = tl.load(known + seer * SEAT_WORDS, mask=there, other=0)
    used = planned_epoch == tl.load(seats + num_seats + seer, mask=there, other=0)
    used |= tl.load(read_rows + hi - 1, mask=there, other=0) != seer
    length = tl.where(used, tl.minimum(length, most_tokens), 0)
    length = tl.where((length + P - 1) // P <= room, length, room * P)
    if QUERIES:
        end = tl.where(end <= 0, tl.maximum(length + end, 0), tl.minimum(end, length))
        first = tl.where(first >= 0, first, tl.maximum(length + first, 0))  # a row's own token, in its window
    else:
        end = tl.where(end == 0, length, tl.minimum(end, length))
    return begin, first, end, lo, hi


@triton.jit(do_not_specialize=SIZES)
def read_requests(
    seats, seq_lens, table_rows, table, indptr, qo_indptr,
    items, entries, entry_indptr, read_rows, known, claims, queries, row_number, merge_number, rows,
    merge_rows, positions, tiles, packed_runs, states, counters, flags,
    num_seats, num_items, num_rows, batch_rows, table_stride, width, num_pages, max_tokens, window_left,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TILE_WIDTH: tl.constexpr, RUN_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, E: tl.constexpr, T: tl.constexpr,
    R: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr,
    QUERIES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Expands the plan's items, PARTS thread blocks for each, and checks the requests, one thread block for a seat.

    seats [RUNNING_FIELDS, seats]; queries [seats, QUERY_WORDS], row_number, merge_number: see
    treegen.ir.request_tables. seq_lens, table_rows [batch_rows] and indptr [batch_rows + 1]: see PageTable. items:
    those of the plan. UNIT: items leave out the tokens before their windows by whole units. flags [3]: the last step in
    which a request was alone, the last step with an impossible page id, length or number of query rows, and this step.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program >= num_items * PARTS:
        settle_seat(
            seats, seq_lens, table_rows, table, indptr, qo_indptr, known, claims, queries, merge_number, rows,
            merge_rows, positions, states, counters, flags, program - num_items * PARTS,
            num_seats, num_rows, batch_rows, table_stride, width, num_pages, max_tokens,
            P, BLOCK, POSITIONS, NAMED, RAGGED, QUERIES,
        )  # fmt: skip
        return
    PACKED: tl.constexpr = N // B
    item = items + program // PARTS * 8
    part = program % PARTS
    row0 = tl.load(item)
    row_count = tl.load(item + 1)
    tile0 = tl.load(item + 2)
    run0 = tl.load(item + 4)
    entry0 = tl.load(entry_indptr + program // PARTS)
    entry1 = tl.load(entry_indptr + program // PARTS + 1)
    if row_count == 0:
        return
    if WINDOWED:
        length_r = row_lengths(
            seats, seq_lens, qo_indptr, read_rows + row0, row_number + row0, row_count, batch_rows, R, QUERIES
        )  # fmt: skip
    num_tiles = 0
    num_runs = 0
    for e0 in range(entry0, entry1, E):
        e = e0 + tl.arange(0, E)
        there = e < entry1
        begin, first, end, lo, hi = read_entries(
            entries + e * 5, there, read_rows + row0, seats, seq_lens, table_rows, indptr, known, num_seats, batch_rows,
            table_stride, width, P, NAMED, RAGGED, QUERIES,
        )  # fmt: skip
        if WINDOWED:
            window_begin = begin_of_windows(length_r, lo, hi, window_left, R)
            first += tl.maximum(window_begin - first, 0) // UNIT * UNIT
        new_tiles, new_runs = expand(
            table, tiles, packed_runs, tile0 + num_tiles, run0 + num_runs,
            begin, first, tl.maximum(end - first, 0), lo, hi, part, num_pages,
            N, P, B, S, TILE_WIDTH, RUN_WIDTH, POSITIONS, E, T, PARTS, False,
        )  # fmt: skip
        num_tiles += new_tiles
        num_runs += new_runs
    if part == 0:
        tl.store(item + 3, num_tiles)
        tl.store(item + 5, fill_up(packed_runs, run0, num_runs, PACKED, RUN_WIDTH))


@triton.jit
def rows_alone(states, seat, num_seats, least, QUERIES: tl.constexpr):
    """Counts the query rows of each seat that are alone. least: the lowest state of a request that is alone."""
    alone = (tl.load(states + seat, mask=seat < num_seats, other=0) >= least).to(tl.int32)
    if QUERIES:
        alone *= tl.load(states + num_seats + seat, mask=seat < num_seats, other=0)
    return alone


@triton.jit
def longest_alone(states, seats, seq_lens, seat, num_seats, least, batch_rows):
    """Returns the most tokens of a request in these seats that is alone. least: as of `rows_alone`."""
    state = tl.load(states + seat, mask=seat < num_seats, other=0)
    alone = (state >= least) & (state < INVALID)
    row = row_of(seats, seat, alone, batch_rows)
    return tl.max(tl.load(seq_lens + row, mask=row >= 0, other=0), 0)


@triton.jit
def hide_plan(rows, merge_rows, program, num_rows, programs, BLOCK: tl.constexpr):
    """Keeps the plan's items and merges from writing any row."""
    for s0 in range(program * BLOCK, num_rows, programs * BLOCK):
        place = s0 + tl.arange(0, BLOCK)
        tl.store(rows + place, -1, mask=place < num_rows)
        tl.store(merge_rows + place, SURPLUS, mask=place < num_rows)


@triton.jit
def deal_alone(
    states, wanted, num_seats, least, LONE_ROWS: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr
):  # fmt: skip
    """Finds the wanted ones of all query rows that are alone.

    Returns the seat of each, -1 where there is none, and its number among the query rows of its request.
    """
    seat_r = tl.full([LONE_ROWS], -1, tl.int32)
    number_r = tl.full([LONE_ROWS], 0, tl.int32)
    before = 0
    for s0 in range(0, num_seats, BLOCK):
        seat = s0 + tl.arange(0, BLOCK)
        is_alone = rows_alone(states, seat, num_seats, least, QUERIES)
        if QUERIES:
            before, seat_r, number_r = deal(wanted, seat, 0 * is_alone, is_alone, before, seat_r, number_r)
        else:
            place = before + tl.cumsum(is_alone, 0) - 1
            here = (is_alone > 0)[:, None] & (place[:, None] == wanted[None, :])
            seat_r = tl.maximum(seat_r, tl.max(tl.where(here, seat[:, None], -1), 0))
            before += tl.sum(is_alone, 0)
    return seat_r, number_r


@triton.jit
def tokens_of_part(first, length, part, parts, UNIT: tl.constexpr):
    """Cuts tokens `first:length` of rows into parts of whole units; returns a part's first token and its tokens."""
    share = tl.maximum(tl.cdiv(length - first, parts * UNIT) * UNIT, LEAST_PART)
    share = tl.where(parts > 1, share, length - first)
    first = tl.minimum(first + part * share, length)
    return first, tl.minimum(share, length - first)


@triton.jit(do_not_specialize=SIZES)
def settle_requests(
    seats, seq_lens, table_rows, table, indptr, qo_indptr,
    items, rows, merge_rows, merge_indptr, lone_partials, tiles, packed_runs, states, counters, age, flags,
    num_seats, num_rows, lone_items, lone_rows, lone_tiles, lone_runs, room_tiles, room_runs, lone_partial0,
    lone_list0, batch_rows, table_stride, width, num_pages, window_left,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TILE_WIDTH: tl.constexpr, RUN_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, WINDOWED: tl.constexpr, T: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    NAMED: tl.constexpr, RAGGED: tl.constexpr,
    QUERIES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Deals requests that are alone to lone items, one thread block for each item.

    With half as many requests as lone items, or fewer, several items share a request. Each then has at least LEAST_PART
    tokens of the longest request, because empty parts are merged as well. With an impossible page id in any
    request all requests are alone, because items of the plan may have read that page.

    R: a power of two at or above `lone_rows`, the most rows of a lone item; the same for all batches of a shape.
    merge_rows, merge_indptr: the merges of lone items. lone_partials: their partial slots, which begin at entry
    lone_list0 of merge_partials; the first of these slots is lone_partial0. With QUERIES query rows are dealt instead
    of requests, and the number of each request's query rows follows the states.
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
        tl.store(age, tl.load(age) + 1)
    if not any_alone:
        tl.store(item + 1, 0)
        tl.store(merge_rows + program, SURPLUS, mask=of_merge)
        return
    least = tl.where(all_alone, PLANNED, NEW)  # the lowest state of a request that is alone
    if all_alone:
        hide_plan(rows, merge_rows - 1 - num_rows, program, num_rows, lone_items, BLOCK)
    alone = 0
    longest = 0
    for s0 in range(0, num_seats, BLOCK):
        seat = s0 + tl.arange(0, BLOCK)
        alone += tl.sum(rows_alone(states, seat, num_seats, least, QUERIES), 0)
        longest = tl.maximum(longest, longest_alone(states, seats, seq_lens, seat, num_seats, least, batch_rows))
    if WINDOWED:
        longest = tl.minimum(longest, window_left + 1 + max(N, P))
    alone = tl.maximum(alone, 1) if QUERIES else alone
    parts = tl.minimum(tl.minimum(lone_items // alone, MOST_PARTS), tl.cdiv(longest, LEAST_PART))
    parts = tl.maximum(parts, 1)
    divided = parts > 1
    part = tl.where(divided, program // alone, 0)
    r = tl.arange(0, R)
    wanted = tl.where(divided, program % alone, program) + r * lone_items
    wanted = tl.where(part < parts, wanted, alone)
    seat_r, number_r = deal_alone(states, wanted, num_seats, least, R, BLOCK, QUERIES)
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
        tl.store(lone_partials + number * parts + part, lone_partial0 + program)
        tl.store(merge_indptr + number, lone_list0 + number * parts)
        tl.store(merge_indptr + number + 1, lone_list0 + (number + 1) * parts)
    if row_count > 0:
        row0 = num_rows + program * lone_rows
        valid = tl.load(states + seat_r, mask=seat_r >= 0, other=0) < INVALID
        length = tl.load(seq_lens + row, mask=(row >= 0) & valid, other=0)
        if QUERIES:
            length = tl.where(valid & (row >= 0), tl.maximum(length - count + number_r + 1, 0), 0)
        begin, _ = entries_of(table_rows, indptr, row, row >= 0, table_stride, width, NAMED, RAGGED)
        first = 0 * length
        if WINDOWED:
            first = tl.maximum(length - 1 - window_left, 0) // P * P
        first, tokens = tokens_of_part(first, length, part, parts, max(N, P))
        write_lone_item(
            table, item, rows, tiles, packed_runs, program, row0, tl.where(divided, lone_partial0 + program, -1),
            written, seat_r >= 0, begin, first, tokens, num_pages, room_tiles, lone_tiles, room_runs, lone_runs,
            N, P, B, S, TILE_WIDTH, RUN_WIDTH, POSITIONS, R, T, False,
        )  # fmt: skip
