"""Prefixes that requests share, found in page tables on the host: in C where there is a compiler."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import treegen.compiled.c_library as c_library
from treegen.ir.arrays import Ints, IntsLike
from treegen.ir.tree.shared_prefixes import host_pages, shared_pages

_SLOTS, _WORDS = 4, 10
"""For each request at least: slots of the hash table of C's trie, and words of its nodes."""


def shared_prefixes(
    block_table: npt.ArrayLike, seq_lens: IntsLike, page_size: int, kv_indptr: IntsLike | None = None
) -> tuple[Ints, Ints]:
    """Finds prefixes that requests share, from a page table on the host.

    Only whole pages are shared: the first `seq_len // page_size` of each request.

    Where two requests have the same page id at the same place, all pages before it have to be the same, too. Radix
    caches guarantee that, and caches of blocks by their hashes nearly always give it. So only some page ids of each
    request are read, and the time hardly grows with the context. Where this does not hold, the result may name too many
    shared tokens. Kernels for running batches compare the page table before they rely on it, so their results stay
    right, and only speed is lost.

    Args:
        block_table: `[rows, blocks]` page ids on the host, a row for each request at least; entries after a request's
            last page may be anything. Or flat page ids `[pages]`, with kv_indptr. An int32 array with contiguous rows
            is read in place. Any other one is copied first, in time that grows with its size.
        seq_lens: `[requests]`; tokens of each request.
        page_size: Tokens of a page.
        kv_indptr: `[requests + 1]`; where the page ids of each request begin, in FlashInfer's form.

    Returns:
        shared_with and shared_tokens, int32 arrays `[requests]`, as `Tree.from_requests` and `LiveBatch.found` take
        them. shared_with: the first of the earlier requests with the longest common prefix, as an index into seq_lens,
        -1 for none. shared_tokens: the tokens of this prefix, 0 for none.

    Raises:
        TreeError: The arrays are no page table, or are not on the host. Page ids are not checked; of wider integers the
            lower 32 bits count.
    """
    given, page_size = host_pages(block_table, seq_lens, page_size, kv_indptr), int(page_size)
    library, requests = c_library.library(), len(given.length)
    found = np.empty((2, requests), np.int32)
    if library is None:
        found[:] = shared_pages(given.rows(), (given.length // page_size).tolist())
        found[1] *= page_size
    elif requests:
        slots = 1 << (_SLOTS * requests - 1).bit_length()
        memory = np.empty(slots + _WORDS * requests, np.int32)
        table, begin, length, words, to = (c_library.address_of(each) for each in (*given, memory, found))
        library.shared_prefixes(table, begin, length, requests, page_size, slots, words, to)
    return found[0], found[1]
