"""Device functions of step kernels: look up the pages of requests, and write the tables that attention kernels read.

entry          tokens 64:150 of a request          N = 64 tokens of a full tile
pages          [ 64:80 ] [ 80:96 ] ... [ 144:150 ]      P = 16 tokens of a page
tiles          [ 64:128 ]                          one KV slot for each page
packed_runs    [ 128:144 ] [ 144:150 ]             packed runs of B = 16 tokens
"""

import triton
import triton.language as tl


@triton.jit
def row_of(seats, seat, known, batch_rows):
    """Returns the row of the batch in each seat, -1 for none."""
    row = tl.load(seats + seat, mask=known, other=-1)
    return tl.where(row < batch_rows, row, -1)


@triton.jit
def reading_row(seats, seat, end_page, known, num_seats, batch_rows, CLAIMED: tl.constexpr):
    """Returns the row in which a plan reads pages up to `end_page` of each seat, -1 for none: the row of the batch in
    the seat, or that of the heir with whom the planned request had these pages in common.

    CLAIMED: there is no row for more pages than the heir has, because the first of them would be read from the heir.
    """
    row = row_of(seats, seat, known, batch_rows)
    heir_row = row_of(seats + 2 * num_seats, seat, known, batch_rows)
    common = tl.load(seats + 3 * num_seats + seat, mask=known, other=0)
    if CLAIMED:
        row = tl.where(common > 0, -1, row)
    return tl.where(end_page <= common, heir_row, row)


@triton.jit
def entries_of(table_rows, indptr, row, there, table_stride, width, NAMED: tl.constexpr, RAGGED: tl.constexpr):
    """Returns the offset of each row's page ids in the table, and the most page ids that it can have.

    width: the entries of a row of the table, or of a ragged table. A row that lies beyond a ragged table has none.
    """
    if RAGGED:
        begin = tl.load(indptr + row, mask=there, other=0)
        end = tl.load(indptr + row + 1, mask=there, other=0)
        within = (begin >= 0) & (begin <= end) & (end <= width)
        room = tl.where(within, end - begin, 0)
        begin = tl.where(within, begin, 0).to(tl.int64)
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
    """Returns the first query row of each row of the batch, and the number of its query rows."""
    begin = tl.load(qo_indptr + row, mask=there, other=0)
    return begin, tl.load(qo_indptr + row + 1, mask=there, other=0) - begin


@triton.jit
def row_lengths(
    seats, seq_lens, qo_indptr, read_rows, row_number, row_count, batch_rows, R: tl.constexpr, QUERIES: tl.constexpr
):  # fmt: skip
    """Returns the tokens that each row of an item sees, 2^31 - 1 for no row. read_rows: the seats of its rows."""
    r = tl.arange(0, R)
    seat_r = tl.load(read_rows + r, mask=r < row_count, other=0)
    row_r = row_of(seats, seat_r, r < row_count, batch_rows)
    length_r = tl.load(seq_lens + row_r, mask=row_r >= 0, other=2**31 - 1)
    if QUERIES:
        number_r = tl.load(row_number + r, mask=r < row_count, other=0)
        _, count_r = queries_of(qo_indptr, row_r, row_r >= 0)
        length_r -= tl.where(row_r >= 0, count_r - number_r - 1, 0)
    return length_r


@triton.jit
def begin_of_windows(length_r, lo, hi, window_left, R: tl.constexpr):
    """Returns where the windows of the rows `lo:hi` [E] begin, the first of them. length_r: see row_lengths."""
    r = tl.arange(0, R)[None, :]
    of_rows = tl.where((r >= lo[:, None]) & (r < hi[:, None]), length_r[None, :], 2**31 - 1)
    return tl.maximum(tl.min(of_rows, 1) - 1 - window_left, 0)


@triton.jit
def entry_of(ends, number, E: tl.constexpr):
    """Returns the entry of each of `number` [T], the last one for numbers beyond all. ends [E]: where entries end."""
    return tl.minimum(tl.sum((ends[None, :] <= number[:, None]).to(tl.int32), 1), E - 1)


@triton.jit
def expand(
    table, tiles, packed_runs, tile0, run0, begin, first, tokens, lo, hi, part, num_pages,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TILE_WIDTH: tl.constexpr, RUN_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, E: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Writes the full tiles and packed runs of E entries from tile0 and run0 on, and returns their numbers.

    begin [E]: the offset of the page ids of an entry's request. first, tokens [E]: its first token and its number of
    tokens. lo, hi [E]: the rows that see it. Part 0 of PARTS writes the packed runs, and the other parts take turns
    with groups of T tiles; a single part does both. APART: each entry's packed runs begin a tile, which nothing else
    fills.
    """
    t = tl.arange(0, T)
    full = tokens // N
    ends = tl.cumsum(full, 0)
    num_tiles = tl.sum(full, 0)
    rest = (tokens % N + N - 1) // N * (N // B) if APART else (tokens % N + B - 1) // B
    run_ends = tl.cumsum(rest, 0)
    num_runs = tl.sum(rest, 0)
    if (PARTS == 1) | (part == 0):
        origin = first + full * N - (run_ends - rest) * B
        for t0 in range(0, num_runs, T):
            run = t0 + t
            live = run < num_runs
            of_run = entry_of(run_ends, run, E)
            position = tl.gather(origin, of_run, 0) + run * B
            length = tl.minimum(tl.gather(first + tokens, of_run, 0) - position, B)
            filled = live
            if APART:
                length = tl.maximum(length, 0)
                filled = live & (length > 0)
            found = tl.load(table + tl.gather(begin, of_run, 0) + position // P, mask=filled, other=0)
            found = tl.minimum(tl.maximum(found, 0), num_pages - 1)
            entry = packed_runs + (run0 + run) * RUN_WIDTH
            tl.store(entry, found * P + position % P, mask=live)
            tl.store(entry + 1, length, mask=live)
            tl.store(entry + 2, tl.gather(lo, of_run, 0), mask=live)
            tl.store(entry + 3, tl.gather(hi, of_run, 0), mask=live)
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
            of_tile = entry_of(ends, tile, E)
            position = tl.gather(origin, of_tile, 0) + tile * N
            place = position[:, None] + s[None, :] * P
            found = tl.load(table + tl.gather(begin, of_tile, 0)[:, None] + place // P, mask=live[:, None], other=0)
            found = tl.minimum(tl.maximum(found, 0), num_pages - 1)
            entry = tiles + (tile0 + tile) * TILE_WIDTH
            tl.store(entry[:, None] + s[None, :], found * P + place % P, mask=live[:, None])
            seen_at: tl.constexpr = TILE_WIDTH - 2 - POSITIONS
            if S == 1:
                tl.store(entry + 1, tl.full([T], N, tl.int32), mask=live)
            tl.store(entry + seen_at, tl.gather(lo, of_tile, 0), mask=live)
            tl.store(entry + seen_at + 1, tl.gather(hi, of_tile, 0), mask=live)
            if POSITIONS:
                tl.store(entry + seen_at + 2, position, mask=live)
    return num_tiles, num_runs


@triton.jit
def deal(wanted, seat, first, count, before, seat_r, number_r):
    """Finds the seats of wanted entries in a list with `count` entries for each seat, after `before` earlier ones.

    Returns the number of entries before the next seats; seat_r, with the seat of each entry that lies here; and
    number_r, with its number within the seat, counted from `first`.
    """
    number = wanted[None, :] - (before + tl.cumsum(count, 0) - count)[:, None]
    here = (number >= 0) & (number < count[:, None])
    number_r = tl.maximum(number_r, tl.max(tl.where(here, first[:, None] + number, 0), 0))
    seat_r = tl.maximum(seat_r, tl.max(tl.where(here, seat[:, None], -1), 0))
    return before + tl.sum(count, 0), seat_r, number_r


@triton.jit
def write_lone_item(
    table, item, rows, tiles, packed_runs, program, row0, partial0, row, live, begin, first, tokens, num_pages,
    room_tiles, lone_tiles, room_runs, lone_runs,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TILE_WIDTH: tl.constexpr, RUN_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, LONE_ROWS: tl.constexpr, T: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Writes a lone item, but for the number of its rows. Row r reads `tokens[r]` tokens from `first[r]` on."""
    r = tl.arange(0, LONE_ROWS)
    tile0 = room_tiles + program * lone_tiles
    run0 = room_runs + program * lone_runs
    num_tiles, num_runs = expand(
        table, tiles, packed_runs, tile0, run0, begin, first, tokens, r, r + 1, 0, num_pages,
        N, P, B, S, TILE_WIDTH, RUN_WIDTH, POSITIONS, LONE_ROWS, T, 1, APART,
    )  # fmt: skip
    tl.store(rows + row0 + r, row, mask=live)
    tl.store(item, row0)
    tl.store(item + 2, tile0)
    tl.store(item + 3, num_tiles)
    tl.store(item + 4, run0)
    tl.store(item + 5, fill_up(packed_runs, run0, num_runs, N // B, RUN_WIDTH))
    tl.store(item + 6, partial0)


@triton.jit
def fill_up(packed_runs, run0, count, PACKED: tl.constexpr, RUN_WIDTH: tl.constexpr):
    """Fills up the last tile of `count` packed runs with empty ones, and returns the number of tiles."""
    packed = (count + PACKED - 1) // PACKED
    b = count + tl.arange(0, PACKED)
    for column in tl.static_range(RUN_WIDTH):
        tl.store(packed_runs + (run0 + b) * RUN_WIDTH + column, tl.zeros([PACKED], tl.int32), mask=b < packed * PACKED)
    return packed
