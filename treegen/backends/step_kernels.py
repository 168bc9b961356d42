"""Step kernels: before the first layer of a decode step they expand a plan's entries into the runs of KV slots that
attention kernels read in all layers, and check what the plan takes for granted.

    read_requests     page table, lengths, entries, claims ──▶ tiles, blocks, states of all requests
    settle_requests   states                               ──▶ rows to write, rows to merge, items of lone requests

A request whose claims hold is walked by the items of the plan. Any other one is alone: an item of its own walks the
whole of its own row of the page table, and the plan's items do not write its row. What items read are always tokens of
running requests, within their present lengths: values that no request has written are never multiplied, by 0 either.

Sizes: N tokens of a full tile, P of a page, B of a block. Tables are as in treegen.ir.request_schedule.
"""

import triton
import triton.language as tl

FREE = tl.constexpr(0)
PLANNED = tl.constexpr(1)
NEW = tl.constexpr(2)
OUTGROWN = tl.constexpr(3)
REFUTED = tl.constexpr(4)
INVALID = tl.constexpr(5)
SURPLUS = tl.constexpr(-(2**31))
SIZES = [
    "num_seats", "num_items", "num_rows", "lone_items", "lone_tiles", "lone_blocks", "room_tiles", "room_blocks",
    "batch_rows", "table_stride", "width", "num_pages", "max_tokens", "window_left",
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
def check(
    seats, seq_lens, table_rows, table, indptr, epoch, most, claim_indptr, claims, seat, part,
    num_seats, batch_rows, table_stride, width, num_pages, max_tokens,
    P: tl.constexpr, BLOCK: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The state of a request, as far as its own page ids (part 0), or its claims (part 1), show it."""
    row = row_of(seats, seat, True, batch_rows)
    planned_epoch = tl.load(epoch + seat)
    present_epoch = tl.load(seats + num_seats + seat)
    most_tokens = tl.load(most + seat)
    claim0 = tl.load(claim_indptr + seat)
    claim1 = tl.load(claim_indptr + seat + 1)
    there = row >= 0
    length = tl.load(seq_lens + row, mask=there, other=0)
    begin, room = entries_of(table_rows, indptr, row, there, table_stride, width, NAMED, RAGGED)
    fits = (length >= 0) & (length <= max_tokens) & ((length + P - 1) // P <= room)
    pages = tl.where(fits & (part == 0), (length + P - 1) // P, 0)
    page = tl.arange(0, BLOCK)
    wrong = tl.zeros([BLOCK], tl.int32)
    for p in range(0, pages, BLOCK):
        found = tl.load(table + begin + p + page, mask=p + page < pages, other=0)
        wrong |= ((found < 0) | (found >= num_pages)).to(tl.int32)

    known = there & fits & (planned_epoch == present_epoch)
    holds = known
    differs = tl.zeros([BLOCK], tl.int32)
    for c in range(claim0, tl.where(known & (part == 1), claim1, claim0)):
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
    state = tl.where(planned_epoch == present_epoch, state, NEW)
    state = tl.where(fits & (tl.max(wrong, 0) == 0), state, INVALID)
    return tl.where(there, state, FREE)


@triton.jit
def state_of(states, seat, known):
    """The states of these seats, FREE where not known."""
    of_pages = tl.load(states + seat * 2, mask=known, other=0)
    return tl.maximum(of_pages, tl.load(states + seat * 2 + 1, mask=known, other=0))


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
    seats, seq_lens, table_rows, table, indptr,
    items, entries, entry_indptr, read_rows, tiles, blocks, epoch, most, claim_indptr, claims, states,
    num_seats, num_items, batch_rows, table_stride, width, num_pages, max_tokens, window_left,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TILE_WIDTH: tl.constexpr, RUN_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, WINDOWED: tl.constexpr, E: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs: PARTS for each item of the plan, which expand it; then two for each seat, which check it.

    seats [2, seats]: rows of the batch, and epochs. seq_lens [batch_rows]; table_rows [batch_rows] or the row itself;
    table by row, or ragged by indptr [batch_rows + 1]. states [seats, 2]: the higher one of a seat counts.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program >= num_items * PARTS:
        number = program - num_items * PARTS
        state = check(
            seats, seq_lens, table_rows, table, indptr, epoch, most, claim_indptr, claims,
            number // 2, number % 2,
            num_seats, batch_rows, table_stride, width, num_pages, max_tokens, P, BLOCK, NAMED, RAGGED,
        )  # fmt: skip
        tl.store(states + number, state)
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
        most_tokens = tl.load(most + seat, mask=there, other=0)
        length = tl.load(seq_lens + row, mask=row >= 0, other=0)
        begin, room = entries_of(table_rows, indptr, row, row >= 0, table_stride, width, NAMED, RAGGED)
        length = tl.where(length <= room * P, tl.minimum(length, most_tokens), 0)
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
    seats, seq_lens, table_rows, table, indptr,
    items, read_rows, rows, read_merges, merge_rows, positions, tiles, blocks, states, counters,
    num_seats, num_items, num_rows, lone_items, lone_tiles, lone_blocks, room_tiles, room_blocks,
    batch_rows, table_stride, width, num_pages, window_left,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TILE_WIDTH: tl.constexpr, RUN_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, WINDOWED: tl.constexpr, T: tl.constexpr,
    LONE_ROWS: tl.constexpr, SCANNED: tl.constexpr, BLOCK: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs: one for each lone item, which deals requests that are alone to it; then those that list rows, BLOCK
    seats or entries of the row table each. With an impossible page id anywhere all requests are alone: items of the
    plan may have read what it names.
    """
    program = tl.program_id(0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    invalid = 0
    for s0 in range(0, 2 * num_seats, SCANNED):
        place = s0 + tl.arange(0, SCANNED)
        state = tl.load(states + place, mask=place < 2 * num_seats, other=0)
        invalid = tl.maximum(invalid, tl.max((state == INVALID).to(tl.int32), 0))
    # From which state on a request is alone.
    least = tl.where(invalid > 0, PLANNED, NEW)
    if program >= lone_items:
        lister = program - lone_items
        b = lister * BLOCK + tl.arange(0, BLOCK)
        seat = tl.load(read_rows + b, mask=b < num_rows, other=-1)
        state = state_of(states, seat, seat >= 0)
        served = (state == PLANNED) & (state < least)
        tl.store(rows + b, row_of(seats, seat, served, batch_rows), mask=b < num_rows)
        seat = tl.load(read_merges + b, mask=b < num_seats, other=-1)
        state = state_of(states, seat, seat >= 0)
        row = row_of(seats, seat, (state == PLANNED) & (state < least), batch_rows)
        tl.store(merge_rows + b, tl.where(row >= 0, row, SURPLUS), mask=b < num_seats)
        if POSITIONS:
            row = row_of(seats, b, b < num_seats, batch_rows)
            length = tl.load(seq_lens + row, mask=row >= 0, other=0)
            tl.store(positions + row, length - 1, mask=row >= 0)
        state = state_of(states, b, b < num_seats)
        for kind in tl.static_range(1, 6):
            count = tl.sum((state == kind).to(tl.int32), 0)
            if count > 0:
                tl.atomic_add(counters + kind, count)
        if lister == 0:
            tl.atomic_add(counters, 1)
        return
    PACKED: tl.constexpr = N // B
    UNIT: tl.constexpr = max(N, P)
    item = items + (num_items + program) * 8
    r = tl.arange(0, LONE_ROWS)
    seat_r = tl.full([LONE_ROWS], -1, tl.int32)
    alone = 0
    for s0 in range(0, num_seats, BLOCK):
        seat = s0 + tl.arange(0, BLOCK)
        is_alone = (state_of(states, seat, seat < num_seats) >= least).to(tl.int32)
        here = tl.sum(is_alone, 0)
        if here > 0:
            place = alone + tl.cumsum(is_alone, 0) - 1
            wanted = (is_alone > 0)[:, None] & (place[:, None] == (program + r * lone_items)[None, :])
            seat_r = tl.maximum(seat_r, tl.max(tl.where(wanted, seat[:, None], -1), 0))
        alone += here
    row_count = tl.sum((seat_r >= 0).to(tl.int32), 0)
    tl.store(item + 1, row_count)
    if row_count > 0:
        row0 = num_rows + program * LONE_ROWS
        row = row_of(seats, seat_r, seat_r >= 0, batch_rows)
        valid = state_of(states, seat_r, seat_r >= 0) < INVALID
        length = tl.load(seq_lens + row, mask=(row >= 0) & valid, other=0)
        begin, _ = entries_of(table_rows, indptr, row, row >= 0, table_stride, width, NAMED, RAGGED)
        first = tl.zeros([LONE_ROWS], tl.int32)
        if WINDOWED:
            first = tl.maximum(length - 1 - window_left, 0) // UNIT * UNIT
        tile0 = room_tiles + program * lone_tiles
        block0 = room_blocks + program * lone_blocks
        num_tiles, num_blocks = expand(
            table, tiles, blocks, tile0, block0, begin, first, length - first, r, r + 1, 0, num_pages,
            N, P, B, S, TILE_WIDTH, RUN_WIDTH, POSITIONS, LONE_ROWS, T, 1,
        )  # fmt: skip
        tl.store(rows + row0 + r, row, mask=seat_r >= 0)
        tl.store(item, row0)
        tl.store(item + 2, tile0)
        tl.store(item + 3, num_tiles)
        tl.store(item + 4, block0)
        tl.store(item + 5, fill_up(blocks, block0, num_blocks, PACKED, RUN_WIDTH))
        tl.store(item + 6, -1)
        tl.store(item + 7, -1)
