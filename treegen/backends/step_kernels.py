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

from treegen.ir.request_schedule import LONE_PARTS

FREE = tl.constexpr(0)
PLANNED = tl.constexpr(1)
NEW = tl.constexpr(2)
OUTGROWN = tl.constexpr(3)
REFUTED = tl.constexpr(4)
INVALID = tl.constexpr(5)
SURPLUS = tl.constexpr(-(2**31))
SEAT_WORDS = tl.constexpr(9)
QUERY_WORDS = tl.constexpr(3)
MOST_PARTS = tl.constexpr(LONE_PARTS)
LEAST_PART = tl.constexpr(512)
SIZES = [
    "num_seats", "num_items", "num_rows", "lone_items", "lone_tiles", "lone_blocks", "room_tiles", "room_blocks",
    "lone_slot0", "lone_list0", "batch_rows", "table_stride", "width", "num_pages", "max_tokens", "window_left",
]  # fmt: skip
"""Parameters that differ between batches: machine code is made for none of their values."""


@triton.jit
def row_of(seats, seat, known, batch_rows):
    """The rows of the batch that sit in these seats, -1 where there is none."""
    row = tl.load(seats + seat, mask=known, other=-1)
    return tl.where(row < batch_rows, row, -1)


@triton.jit
def entries_of(table_rows, indptr, row, there, table_stride, width, NAMED: tl.constexpr, RAGGED: tl.constexpr):
    """Where the page ids of these rows begin in the table, and how many there may be."""
    if RAGGED:
        begin = tl.load(indptr + row, mask=there, other=0).to(tl.int64)
        room = tl.load(indptr + row + 1, mask=there, other=0) - begin.to(tl.int32)
    else:
        if NAMED:
            named = tl.load(table_rows + row, mask=there, other=0)
        else:
            named = row
        begin = named.to(tl.int64) * table_stride
        room = width + 0 * row
    return begin, room


@triton.jit
def queries_of(qo_indptr, row, there):
    """The first row of q of these rows of the batch, and how many there are."""
    begin = tl.load(qo_indptr + row, mask=there, other=0)
    return begin, tl.load(qo_indptr + row + 1, mask=there, other=0) - begin


@triton.jit
def check(
    seats, seq_lens, table_rows, table, indptr, known, claims, seat, row, planned_epoch, most_tokens,
    possible, as_planned, least,
    num_seats, batch_rows, table_stride, width, num_pages, max_tokens,
    P: tl.constexpr, BLOCK: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """The state of the request of a seat, whose row is `row`, and its length. known [seats, SEAT_WORDS]. With QUERIES:
    whether its query rows are possible, and as many as planned; the tokens from which on its plan is right.
    """
    present_epoch = tl.load(seats + num_seats + seat)
    owner = tl.load(known + seat * SEAT_WORDS + 4)
    first = tl.load(known + seat * SEAT_WORDS + 5)
    end = tl.load(known + seat * SEAT_WORDS + 6)
    claim0 = tl.load(known + seat * SEAT_WORDS + 7)
    claim1 = tl.load(known + seat * SEAT_WORDS + 8)
    there = row >= 0
    length = tl.load(seq_lens + row, mask=there, other=0)
    begin, room = entries_of(table_rows, indptr, row, there, table_stride, width, NAMED, RAGGED)
    is_known = there & (planned_epoch == present_epoch)
    if QUERIES:
        is_known &= as_planned
    shares = is_known & (owner >= 0)
    owner_row = row_of(seats, owner, shares, batch_rows)
    owner_length = tl.load(seq_lens + owner_row, mask=owner_row >= 0, other=-1)
    owner_begin, owner_room = entries_of(
        table_rows, indptr, owner_row, owner_row >= 0, table_stride, width, NAMED, RAGGED
    )
    fits = (length >= 0) & (length <= max_tokens) & ((length + P - 1) // P <= room)
    if QUERIES:
        fits &= possible
    holds = fits & ((owner < 0) | ((length >= end * P) & (owner_length >= end * P) & (end <= owner_room)))
    if QUERIES:
        holds &= length >= least
    pages = tl.where(fits, (length + P - 1) // P, 0)
    end = tl.where(shares & holds, end, first)
    page = tl.arange(0, BLOCK)
    wrong = tl.zeros([BLOCK], tl.int32)
    differs = tl.zeros([BLOCK], tl.int32)
    for p in range(0, pages, BLOCK):
        live = p + page < pages
        claimed = (p + page >= first) & (p + page < end)
        own = tl.load(table + begin + p + page, mask=live, other=0)
        other = tl.load(table + owner_begin + p + page, mask=claimed, other=0)
        wrong |= ((own < 0) | (own >= num_pages)).to(tl.int32)
        differs |= (claimed & (own != other)).to(tl.int32)
    for c in range(claim0, tl.where(is_known & holds, claim1, claim0)):
        owner = tl.load(claims + 3 * c)
        first = tl.load(claims + 3 * c + 1)
        end = tl.load(claims + 3 * c + 2)
        owner_row = row_of(seats, owner, True, batch_rows)
        owned = owner_row >= 0
        owner_length = tl.load(seq_lens + owner_row, mask=owned, other=-1)
        owner_begin, owner_room = entries_of(table_rows, indptr, owner_row, owned, table_stride, width, NAMED, RAGGED)
        holds &= (length >= end * P) & (owner_length >= end * P) & (end <= owner_room)
        for p in range(first, tl.where(holds, end, first), BLOCK):
            live = p + page < end
            own = tl.load(table + begin + p + page, mask=live, other=0)
            differs |= (own != tl.load(table + owner_begin + p + page, mask=live, other=0)).to(tl.int32)
    state = tl.where(length > most_tokens, OUTGROWN, PLANNED)
    state = tl.where(holds & (tl.max(differs, 0) == 0), state, REFUTED)
    state = tl.where(is_known, state, NEW)
    state = tl.where(fits & (tl.max(wrong, 0) == 0), state, INVALID)
    return tl.where(there, state, FREE), length


@triton.jit
def settle_seat(
    seats, seq_lens, table_rows, table, indptr, qo_indptr, known, claims, queries, merge_number, counts, rows,
    merge_rows, positions, states, counters, flags, seat,
    num_seats, num_rows, batch_rows, table_stride, width, num_pages, max_tokens,
    P: tl.constexpr, BLOCK: tl.constexpr, POSITIONS: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """Checks the request of a seat; says where its rows are written, if by the plan, and what its state is."""
    row = row_of(seats, seat, True, batch_rows)
    planned_epoch = tl.load(known + seat * SEAT_WORDS)
    most_tokens = tl.load(known + seat * SEAT_WORDS + 1)
    place = tl.load(known + seat * SEAT_WORDS + 2)
    merge_place = tl.load(known + seat * SEAT_WORDS + 3)
    num_merges = tl.load(counts)
    present_step = tl.load(counters).to(tl.int32) + 1
    possible = True
    as_planned = True
    least = 0
    if QUERIES:
        planned_count = tl.load(queries + seat * QUERY_WORDS)
        least = tl.load(queries + seat * QUERY_WORDS + 1)
        seat_merges = tl.load(queries + seat * QUERY_WORDS + 2)
        query, count = queries_of(qo_indptr, row, row >= 0)
        possible = (query >= 0) & (count >= 0) & (query <= num_rows) & (count <= num_rows - query)
        count = tl.where(possible, count, 0)
        as_planned = count == planned_count
    state, length = check(
        seats, seq_lens, table_rows, table, indptr, known, claims, seat, row, planned_epoch, most_tokens,
        possible, as_planned, least,
        num_seats, batch_rows, table_stride, width, num_pages, max_tokens, P, BLOCK, NAMED, RAGGED, QUERIES,
    )  # fmt: skip
    tl.store(states + seat, state)
    if QUERIES:
        tl.store(states + num_seats + seat, count)
        r = tl.arange(0, BLOCK)
        for j in range(0, tl.where(place >= 0, planned_count, 0), BLOCK):
            written = tl.where(state == PLANNED, query + j + r, -1)
            tl.store(rows + place + j + r, written, mask=j + r < planned_count)
        for j in range(0, tl.where(merge_place >= 0, seat_merges, 0), BLOCK):
            live = j + r < seat_merges
            number = tl.load(merge_number + merge_place + j + r, mask=live, other=0)
            merged = tl.where(state == PLANNED, query + number, SURPLUS)
            tl.store(merge_rows + merge_place + j + r, merged, mask=live)
        for j in range(seat, num_rows, BLOCK * num_seats):
            merge = j + r * num_seats
            tl.store(merge_rows + merge, SURPLUS, mask=(merge >= num_merges) & (merge < num_rows))
        if POSITIONS:
            for j in range(0, count, BLOCK):
                tl.store(positions + query + j + r, length - count + j + r, mask=(j + r < count) & (row >= 0))
        any_alone = ((state > PLANNED) & (count > 0)) | (state == INVALID)
    else:
        tl.store(rows + place, tl.where(state == PLANNED, row, -1), mask=place >= 0)
        tl.store(merge_rows + merge_place, tl.where(state == PLANNED, row, SURPLUS), mask=merge_place >= 0)
        tl.store(merge_rows + seat, SURPLUS, mask=seat >= num_merges)
        if POSITIONS:
            tl.store(positions + row, length - 1, mask=row >= 0)
        any_alone = state > PLANNED
    if state > FREE:
        tl.atomic_add(counters + state, 1, sem="relaxed")
    tl.store(flags, present_step, mask=any_alone)
    tl.store(flags + 1, present_step, mask=state == INVALID)
    tl.store(flags + 2, present_step, mask=seat == 0)


@triton.jit
def picked(values, pick):
    """values [E] at the one place of each line of pick [T, E] that is true."""
    return tl.sum(tl.where(pick, values[None, :], 0), 1)


@triton.jit
def expand(
    table, tiles, blocks, tile0, block0, begin, first, tokens, lo, hi, part, num_pages,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TILE_WIDTH: tl.constexpr, RUN_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, E: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes the full tiles and blocks of E entries from tile0 and block0 on; returns how many these are. begin [E]:
    where the page ids of an entry's request begin; first, tokens [E]: which of its tokens. Part 0 of PARTS writes the
    blocks, and the others take turns with groups of T tiles. A single part does both.
    """
    e = tl.arange(0, E)
    t = tl.arange(0, T)
    full = tokens // N
    ends = tl.cumsum(full, 0)
    num_tiles = tl.sum(full, 0)
    rest = (tokens % N + B - 1) // B
    block_ends = tl.cumsum(rest, 0)
    num_blocks = tl.sum(rest, 0)
    if (PARTS == 1) | (part == 0):
        origin = first + full * N - (block_ends - rest) * B
        for t0 in range(0, num_blocks, T):
            block = t0 + t
            live = block < num_blocks
            pick = e[None, :] == tl.sum((block_ends[None, :] <= block[:, None]).to(tl.int32), 1)[:, None]
            position = picked(origin, pick) + block * B
            found = tl.load(table + picked(begin, pick) + position // P, mask=live, other=0)
            found = tl.minimum(tl.maximum(found, 0), num_pages - 1)
            entry = blocks + (block0 + block) * RUN_WIDTH
            tl.store(entry, found * P + position % P, mask=live)
            tl.store(entry + 1, tl.minimum(picked(first + tokens, pick) - position, B), mask=live)
            tl.store(entry + 2, picked(lo, pick), mask=live)
            tl.store(entry + 3, picked(hi, pick), mask=live)
            if POSITIONS:
                tl.store(entry + 4, position, mask=live)
    if (PARTS == 1) | (part > 0):
        origin = first - (ends - full) * N
        s = tl.arange(0, S)
        begin_tile = 0 if PARTS == 1 else (part - 1) * T
        step: tl.constexpr = T if PARTS == 1 else (PARTS - 1) * T
        for t0 in range(begin_tile, num_tiles, step):
            tile = t0 + t
            live = tile < num_tiles
            pick = e[None, :] == tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)[:, None]
            position = picked(origin, pick) + tile * N
            place = position[:, None] + s[None, :] * P
            found = tl.load(table + picked(begin, pick)[:, None] + place // P, mask=live[:, None], other=0)
            found = tl.minimum(tl.maximum(found, 0), num_pages - 1)
            entry = tiles + (tile0 + tile) * TILE_WIDTH
            tl.store(entry[:, None] + s[None, :], found * P + place % P, mask=live[:, None])
            seen_at: tl.constexpr = TILE_WIDTH - 2 - POSITIONS
            if S == 1:
                tl.store(entry + 1, tl.full([T], N, tl.int32), mask=live)
            tl.store(entry + seen_at, picked(lo, pick), mask=live)
            tl.store(entry + seen_at + 1, picked(hi, pick), mask=live)
            if POSITIONS:
                tl.store(entry + seen_at + 2, position, mask=live)
    return num_tiles, num_blocks


@triton.jit
def fill_up(blocks, block0, count, PACKED: tl.constexpr, RUN_WIDTH: tl.constexpr):
    """Empties the rest of the last tile that `count` blocks are packed into; returns the tiles."""
    packed = (count + PACKED - 1) // PACKED
    b = count + tl.arange(0, PACKED)
    for column in tl.static_range(RUN_WIDTH):
        tl.store(blocks + (block0 + b) * RUN_WIDTH + column, tl.zeros([PACKED], tl.int32), mask=b < packed * PACKED)
    return packed


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
            N, P, B, S, TILE_WIDTH, RUN_WIDTH, POSITIONS, E, T, PARTS,
        )  # fmt: skip
        num_tiles += new_tiles
        num_blocks += new_blocks
    if part == 0:
        tl.store(item + 3, num_tiles)
        tl.store(item + 5, fill_up(blocks, block0, num_blocks, PACKED, RUN_WIDTH))


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
        seat = s0 + tl.arange(0, BLOCK)
        state = tl.load(states + seat, mask=seat < num_seats, other=0)
        is_alone = (state >= least).to(tl.int32)
        if QUERIES:
            is_alone *= tl.load(states + num_seats + seat, mask=seat < num_seats, other=0)
        alone += tl.sum(is_alone, 0)
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
        state = tl.load(states + seat, mask=seat < num_seats, other=0)
        is_alone = (state >= least).to(tl.int32)
        if QUERIES:
            is_alone *= tl.load(states + num_seats + seat, mask=seat < num_seats, other=0)
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
            N, P, B, S, TILE_WIDTH, RUN_WIDTH, POSITIONS, LONE_ROWS, T, 1,
        )  # fmt: skip
        tl.store(rows + row0 + r, written, mask=seat_r >= 0)
        tl.store(item, row0)
        tl.store(item + 2, tile0)
        tl.store(item + 3, num_tiles)
        tl.store(item + 4, block0)
        tl.store(item + 5, fill_up(blocks, block0, num_blocks, PACKED, RUN_WIDTH))
        tl.store(item + 6, tl.where(divided, lone_slot0 + program, -1))
        tl.store(item + 7, -1)
