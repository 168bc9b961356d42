"""Kernels that find common prefixes of page ids among the rows of a batch.

    hash_pages    page table, lengths   ──▶ a hash of each prefix of whole pages of each row
    find_shared   hashes, page table    ──▶ for each row, the earlier row with the longest common prefix, and its length

Each row is compared with earlier rows only. Its longest common prefix is the place where it branches off a tree of the
earlier rows, so all rows together form a forest of any depth. Equal hashes only show where to look: pages are compared
before they count.

Sizes: P tokens of a page, BLOCK pages at a time, ROWS rows at a time.
"""

import triton
import triton.language as tl

from treegen.backends.page_expansion import entries_of


@triton.jit
def place_of(begin, row, width, RAGGED: tl.constexpr):
    """Returns the offset of each row's hashes: that of its page ids in a ragged table, else `row * width`."""
    if RAGGED:
        return begin
    else:
        return row.to(tl.int64) * width


@triton.jit
def mixed(value):
    """Mixes uint32 values, so that each bit of the result depends on all bits."""
    value = (value ^ (value >> 16)) * 0x85EBCA6B
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def hash_pages(
    seq_lens, table_rows, table, indptr, hashes, whole, result,
    batch_rows, table_stride, width, num_pages, max_tokens,
    P: tl.constexpr, BLOCK: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Hashes all prefixes of each row, one thread block for a row of the batch.

    hashes: by offset and page, the sum over the row's pages up to this one. whole [batch_rows]: whole pages of each row
    before the first impossible page id, 0 where its length is impossible. result [3, batch_rows]: its last row gets the
    lengths.
    """
    row = tl.program_id(0)
    length = tl.load(seq_lens + row)
    begin, room = entries_of(table_rows, indptr, row, row >= 0, table_stride, width, NAMED, RAGGED)
    fits = (length >= 0) & (length <= max_tokens)
    fits = fits & (length // P + (length % P > 0).to(tl.int32) <= room)
    pages = tl.where(fits, length // P, 0)
    place = place_of(begin, row, width, RAGGED)
    found = pages
    total = tl.zeros([1], tl.int64)
    page = tl.arange(0, BLOCK)
    for p in range(0, pages, BLOCK):
        live = p + page < pages
        page_id = tl.load(table + begin + p + page, mask=live, other=0)
        impossible = (page_id < 0) | (page_id >= num_pages)
        found = tl.minimum(found, tl.min(tl.where(impossible, p + page, pages), 0))
        value = mixed(mixed(page_id.to(tl.uint32)) + (p + page).to(tl.uint32))
        value = tl.where(live, value.to(tl.int64), 0)
        tl.store(hashes + place + p + page, (total + tl.cumsum(value, 0)).to(tl.int32), mask=live)
        total += tl.sum(value, 0)
    tl.store(whole + row, found)
    tl.store(result + 2 * batch_rows + row, length)


@triton.jit
def find_shared(
    table_rows, table, indptr, hashes, whole, result, batch_rows, table_stride, width,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NAMED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Finds the longest common prefix of each row with an earlier one, one thread block for a row of the batch.

    result [3, batch_rows]: its first row gets the earlier row, or -1, and its second the tokens in common.

    While some earlier rows have the same hash one page after the prefix so far, one of them is drawn, by a hash of its
    number, and compared. This keeps comparisons few where each earlier row shares one page more than the last.
    """
    row = tl.program_id(0)
    own_pages = tl.load(whole + row)
    own_begin, _ = entries_of(table_rows, indptr, row, row >= 0, table_stride, width, NAMED, RAGGED)
    own_place = place_of(own_begin, row, width, RAGGED)
    best = 0
    above = -1
    r = tl.arange(0, ROWS)
    page = tl.arange(0, BLOCK)
    draw = (mixed(r.to(tl.uint32)) >> 12).to(tl.int32) * ROWS + r  # the remainder by ROWS is r
    for r0 in range(0, tl.where(own_pages > 0, row, 0), ROWS):
        there = r0 + r < row
        pages = tl.load(whole + r0 + r, mask=there, other=0)
        begin, _room = entries_of(table_rows, indptr, r0 + r, there, table_stride, width, NAMED, RAGGED)
        place = place_of(begin, r0 + r, width, RAGGED)
        drawn = 0
        while drawn >= 0:
            live = (pages > best) & (best < own_pages)
            own = tl.load(hashes + own_place + best, mask=best < own_pages, other=0)
            same = live & (tl.load(hashes + place + best, mask=live, other=0) == own)
            drawn = tl.max(tl.where(same, draw, -1), 0)
            if drawn >= 0:
                other = r0 + drawn % ROWS
                pages = tl.where(r0 + r == other, 0, pages)  # each row is compared once
                other_begin, _other_room = entries_of(
                    table_rows, indptr, other, other >= 0, table_stride, width, NAMED, RAGGED
                )
                common = tl.minimum(own_pages, tl.load(whole + other))
                p = 0
                while p < common:
                    here = p + page < common
                    ours = tl.load(table + own_begin + p + page, mask=here, other=0)
                    theirs = tl.load(table + other_begin + p + page, mask=here, other=0)
                    common = tl.minimum(common, tl.min(tl.where(ours != theirs, p + page, common), 0))
                    p += BLOCK
                above = tl.where(common > best, other, above)
                best = tl.maximum(best, common)
    tl.store(result + row, above)
    tl.store(result + batch_rows + row, best * P)
