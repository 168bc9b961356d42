"""A kernel that copies an engine's ragged page table to buffers and computes lengths, in one launch."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "pages"], do_not_specialize_on_alignment=["indptr", "indices", "last_page_len"])
def take_table(
    indptr, indices, last_page_len, own_indptr, own_indices, own_last_page_len, seq_lens, rows, pages,
    P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies indptr [rows + 1], indices [pages] and last_page_len [rows], and writes the lengths seq_lens [rows].

    Each thread block copies BLOCK entries. All pages of a row but the last have P tokens.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    page_id = tl.load(indices + entry, mask=entry < pages, other=0)
    tl.store(own_indices + entry, page_id.to(tl.int32), mask=entry < pages)
    if tl.program_id(0) * BLOCK <= rows:
        begin = tl.load(indptr + entry, mask=entry <= rows, other=0).to(tl.int32)
        end = tl.load(indptr + entry + 1, mask=entry < rows, other=0).to(tl.int32)
        last = tl.load(last_page_len + entry, mask=entry < rows, other=0).to(tl.int32)
        tl.store(own_indptr + entry, begin, mask=entry <= rows)
        tl.store(own_last_page_len + entry, last, mask=entry < rows)
        tl.store(seq_lens + entry, tl.maximum((end - begin - 1) * P + last, 0), mask=entry < rows)
