"""Device functions of step kernels: where the pages of a request are listed, and how its tokens become the tiles and
runs that attention kernels read.

Sizes: N tokens of a full tile, P of a page, B of a run in a packed tile.
"""

import triton
import triton.language as tl


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
def picked(values, pick):
    """values [E] at the one place of each line of pick [T, E] that is true."""
    return tl.sum(tl.where(pick, values[None, :], 0), 1)


@triton.jit
def expand(
    table, tiles, blocks, tile0, block0, begin, first, tokens, lo, hi, part, num_pages,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
    TILE_WIDTH: tl.constexpr, RUN_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, E: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Writes the full tiles and blocks of E entries from tile0 and block0 on; returns how many these are. begin [E]:
    where the page ids of an entry's request begin; first, tokens [E]: which of its tokens. Part 0 of PARTS writes the
    blocks, and the others take turns with groups of T tiles. A single part does both. APART: each entry's blocks begin
    a packed tile, and the others of that tile are empty.
    """
    e = tl.arange(0, E)
    t = tl.arange(0, T)
    full = tokens // N
    ends = tl.cumsum(full, 0)
    num_tiles = tl.sum(full, 0)
    rest = (tokens % N + N - 1) // N * (N // B) if APART else (tokens % N + B - 1) // B
    block_ends = tl.cumsum(rest, 0)
    num_blocks = tl.sum(rest, 0)
    if (PARTS == 1) | (part == 0):
        origin = first + full * N - (block_ends - rest) * B
        for t0 in range(0, num_blocks, T):
            block = t0 + t
            live = block < num_blocks
            pick = e[None, :] == tl.sum((block_ends[None, :] <= block[:, None]).to(tl.int32), 1)[:, None]
            position = picked(origin, pick) + block * B
            length = tl.minimum(picked(first + tokens, pick) - position, B)
            filled = live
            if APART:
                length = tl.maximum(length, 0)
                filled = live & (length > 0)
            found = tl.load(table + picked(begin, pick) + position // P, mask=filled, other=0)
            found = tl.minimum(tl.maximum(found, 0), num_pages - 1)
            entry = blocks + (block0 + block) * RUN_WIDTH
            tl.store(entry, found * P + position % P, mask=live)
            tl.store(entry + 1, length, mask=live)
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
