"""Device functions that check the claims of a plan, request by request."""

import triton
import triton.language as tl

from treegen.backends.page_expansion import entries_of, queries_of, reading_row, row_of

FREE = tl.constexpr(0)
PLANNED = tl.constexpr(1)
NEW = tl.constexpr(2)
OUTGROWN = tl.constexpr(3)
REFUTED = tl.constexpr(4)
INVALID = tl.constexpr(5)
SURPLUS = tl.constexpr(-(2**31))
SEAT_WORDS = tl.constexpr(10)
QUERY_WORDS = tl.constexpr(2)


@triton.jit
def state_of_request(
    seats, seq_lens, table_rows, table, indptr, known, claims, seat, row, planned_epoch, most_tokens,
    possible, as_planned,
    num_seats, batch_rows, table_stride, width, num_pages, max_tokens,
    P: tl.constexpr, BLOCK: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Returns the state of the request in a seat, whose row of the batch is `row`, and its length.

    Pages of an heir have to agree, too. known [seats, SEAT_WORDS]: the plan's columns of seats. possible, as_planned,
    with QUERIES: whether the offsets of its query rows are possible, and their number is the planned one.
    """
    least = tl.load(known + seat * SEAT_WORDS + 2)
    owner = tl.load(known + seat * SEAT_WORDS + 5)
    first = tl.load(known + seat * SEAT_WORDS + 6)
    end = tl.load(known + seat * SEAT_WORDS + 7)
    claim0 = tl.load(known + seat * SEAT_WORDS + 8)
    claim1 = tl.load(known + seat * SEAT_WORDS + 9)
    there = row >= 0
    length = tl.load(seq_lens + row, mask=there, other=0)
    begin, room = entries_of(table_rows, indptr, row, there, table_stride, width, NAMED, RAGGED)
    is_known = there & (planned_epoch == tl.load(seats + num_seats + seat))
    if QUERIES:
        is_known &= as_planned
    shares = is_known & (owner >= 0)
    owner_row = reading_row(seats, owner, end, shares, num_seats, batch_rows, True)
    owned = owner_row >= 0
    owner_length = tl.load(seq_lens + owner_row, mask=owned, other=-1)
    owner_begin, owner_room = entries_of(table_rows, indptr, owner_row, owned, table_stride, width, NAMED, RAGGED)
    fits = (length >= 0) & (length <= max_tokens) & ((length + P - 1) // P <= room)
    if QUERIES:
        fits &= possible
    holds = (owner < 0) | ((end * P <= tl.minimum(length, owner_length)) & (end <= owner_room))
    heir_row = row_of(seats + 2 * num_seats, seat, is_known, batch_rows)
    common = tl.load(seats + 3 * num_seats + seat, mask=is_known, other=0)
    heir_length = tl.load(seq_lens + heir_row, mask=heir_row >= 0, other=0)
    heir_begin, heir_room = entries_of(table_rows, indptr, heir_row, heir_row >= 0, table_stride, width, NAMED, RAGGED)
    holds &= (common == 0) | ((common * P <= tl.minimum(length, heir_length)) & (common <= heir_room))
    holds &= fits & (length >= least)
    pages = tl.where(fits, (length + P - 1) // P, 0)
    common = tl.where(holds, common, 0)
    end = tl.where(shares & holds, end, first)
    page, wrong = tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int32)
    differs = tl.zeros([BLOCK], tl.int32)
    for p in range(0, pages, BLOCK):
        live = p + page < pages
        claimed = (p + page >= first) & (p + page < end)
        own = tl.load(table + begin + p + page, mask=live, other=0)
        other = tl.load(table + owner_begin + p + page, mask=claimed, other=0)
        inherited = live & (p + page < common)
        of_heir = tl.load(table + heir_begin + p + page, mask=inherited, other=0)
        wrong |= ((own < 0) | (own >= num_pages)).to(tl.int32)
        differs |= ((claimed & (own != other)) | (inherited & (own != of_heir))).to(tl.int32)
    for c in range(claim0, tl.where(is_known & holds, claim1, claim0)):
        owner = tl.load(claims + 3 * c)
        first = tl.load(claims + 3 * c + 1)
        end = tl.load(claims + 3 * c + 2)
        owner_row = reading_row(seats, owner, end, True, num_seats, batch_rows, True)
        owned = owner_row >= 0
        owner_length = tl.load(seq_lens + owner_row, mask=owned, other=-1)
        owner_begin, owner_room = entries_of(table_rows, indptr, owner_row, owned, table_stride, width, NAMED, RAGGED)
        holds &= (length >= end * P) & (owner_length >= end * P) & (end <= owner_room)
        for p in range(first, tl.where(holds, end, first), BLOCK):
            live = p + page < end
            own = tl.load(table + begin + p + page, mask=live, other=0)
            differs |= (own != tl.load(table + owner_begin + p + page, mask=live, other=0)).to(tl.int32)
    holds &= tl.max(differs, 0) == 0
    state = tl.where(holds, tl.where(length > most_tokens, OUTGROWN, PLANNED), REFUTED)
    state = tl.where(is_known, state, NEW)
    state = tl.where(fits & (tl.max(wrong, 0) == 0), state, INVALID)
    return tl.where(there, state, FREE), length


@triton.jit
def settle_seat(
    seats, seq_lens, table_rows, table, indptr, qo_indptr, known, claims, queries, merge_number, rows,
    merge_rows, positions, states, counters, flags, seat,
    num_seats, num_rows, batch_rows, table_stride, width, num_pages, max_tokens,
    P: tl.constexpr, BLOCK: tl.constexpr, POSITIONS: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """Checks the request in a seat, writes its state, and lets the plan write its rows if the claims hold."""
    row = row_of(seats, seat, True, batch_rows)
    planned_epoch = tl.load(known + seat * SEAT_WORDS)
    most_tokens = tl.load(known + seat * SEAT_WORDS + 1)
    place = tl.load(known + seat * SEAT_WORDS + 3)
    merge_place = tl.load(known + seat * SEAT_WORDS + 4)
    present_step = tl.load(counters).to(tl.int32) + 1
    possible = True
    as_planned = True
    if QUERIES:
        planned_count = tl.load(queries + seat * QUERY_WORDS)
        seat_merges = tl.load(queries + seat * QUERY_WORDS + 1)
        query, count = queries_of(qo_indptr, row, row >= 0)
        possible = (query >= 0) & (count >= 0) & (query <= num_rows) & (count <= num_rows - query)
        count = tl.where(possible, count, 0)
        as_planned = count == planned_count
    state, length = state_of_request(
        seats, seq_lens, table_rows, table, indptr, known, claims, seat, row, planned_epoch, most_tokens,
        possible, as_planned,
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
        if POSITIONS:
            for j in range(0, count, BLOCK):
                tl.store(positions + query + j + r, length - count + j + r, mask=(j + r < count) & (row >= 0))
        any_alone = ((state > PLANNED) & (count > 0)) | (state == INVALID)
    else:
        tl.store(rows + place, tl.where(state == PLANNED, row, -1), mask=place >= 0)
        tl.store(merge_rows + merge_place, tl.where(state == PLANNED, row, SURPLUS), mask=merge_place >= 0)
        if POSITIONS:
            tl.store(positions + row, length - 1, mask=row >= 0)
        any_alone = state > PLANNED
    if state > FREE:
        tl.atomic_add(counters + state, 1, sem="relaxed")
    tl.store(flags, present_step, mask=any_alone)
    tl.store(flags + 1, present_step, mask=state == INVALID)
    tl.store(flags + 2, present_step, mask=seat == 0)
