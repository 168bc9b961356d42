"""Host time of finding a batch's tree in its page table, on one core and without a GPU.

    python benchmarks/page_tables.py

Medians of 300 calls of Tree.from_page_table and Tree.from_block_table, in microseconds. Page ids are those of an empty
cache (in order) or any (shuffled); requests come in the tree's order or in any.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from treegen import Tree

TREES = ("1,256/256,32", "1,4,16,64,256,1024/256,8,256,64,32,256")
PAGE_SIZE = 16
CALLS = 300


def page_ids(text: str, *, shuffled_pages: bool, shuffled_requests: bool) -> np.ndarray:
    """The pages [requests, pages] of a tree's rows, with its lengths rounded up to whole pages."""
    source = np.random.default_rng(0)
    levels, tokens = ([int(number) for number in part.split(",")] for part in text.split("/"))
    pages = Tree.from_levels(levels, [-(-count // PAGE_SIZE) for count in tokens])  # a page as a token
    table = np.stack([pages.slots(row) for row in range(pages.num_rows)])
    if shuffled_pages:
        table = source.permutation(pages.kv.last_slot + 1).astype(np.int32)[table]
    return source.permutation(table) if shuffled_requests else table


def median_us(call: Callable[[], object]) -> float:
    """The median time of a call that has run before."""
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def main() -> None:
    """Prints one line per tree and order."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for text in TREES:
        for shuffled in ((False, False), (True, False), (False, True), (True, True)):
            table = page_ids(text, shuffled_pages=shuffled[0], shuffled_requests=shuffled[1])
            indptr = np.arange(len(table) + 1, dtype=np.int32) * table.shape[1]
            last = np.full(len(table), PAGE_SIZE, np.int32)
            lengths = np.full(len(table), PAGE_SIZE * table.shape[1], np.int32)
            indices = table.reshape(-1)
            found = (
                median_us(lambda a=indptr, b=indices, c=last: Tree.from_page_table(a, b, c, PAGE_SIZE)),
                median_us(lambda a=table, b=lengths: Tree.from_block_table(a, b, PAGE_SIZE)),
            )
            order = ", ".join(
                f"{name} {'shuffled' if any_order else 'in order'}"
                for name, any_order in zip(("pages", "requests"), shuffled, strict=True)
            )
            print(f"{text}, {order}: from a page table {found[0]:.0f} us, from a block table {found[1]:.0f} us")


if __name__ == "__main__":
    main()
