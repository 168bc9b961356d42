"""Prefixes that requests share, found in page tables on the host, in C and in Python: against a search in all pages."""

from __future__ import annotations

import random
import timeit
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.compilers import needs_compiler
from support.forests import examples
from support.page_requests import Requests, blocks, csr, requests, slots
from treegen import LiveBatch, PageTable, Shape, Tree
from treegen.backends import oracle
from treegen.backends.find_sharing import SharingReader
from treegen.compiled import c_library
from treegen.ir.arrays import Ints
from treegen.ir.errors import TreeError
from treegen.ir.tree.shared_prefixes import shared_pages

WAYS = [pytest.param("C", marks=needs_compiler), "Python"]
GARBAGE = (-1, -(2**31), 2**31 - 1, 0, 1, 7)


def found(way: str, *arguments: Any) -> list[list[int]]:
    """What each request shares with whom, and how much, found in this way."""
    with pytest.MonkeyPatch.context() as patch:
        assert way == "Python" or c_library.library() is not None
        if way == "Python":
            patch.setattr(c_library, "library", lambda: None)
        made = treegen.shared_prefixes(*arguments)
    assert [(part.dtype, part.shape) for part in made] == [(np.int32, (len(arguments[1]),))] * 2
    return [part.tolist() for part in made]


def cached(made: Requests, source: random.Random) -> Requests:
    """The same requests with the pages of a prefix cache: each page stands for all tokens up to its end."""
    prefixes = list({tuple(pages[: end + 1]) for pages, _ in made for end in range(len(pages))})
    source.shuffle(prefixes)
    page = {prefix: number for number, prefix in enumerate(prefixes)}
    return [([page[tuple(pages[: end + 1])] for end in range(len(pages))], tokens) for pages, tokens in made]


def wide(made: Requests, source: random.Random) -> Ints:
    """A block table of int32 inside of a larger one, with garbage after each request's last page."""
    table, _ = blocks(made, padding=0)
    height, width = table.shape
    memory = np.array(source.choices(GARBAGE, k=(height + 2) * (width + 5)), np.int32).reshape(height + 2, width + 5)
    for row, (pages, _) in zip(memory, made, strict=False):
        row[2 : 2 + len(pages)] = pages
    return memory[: height + 1, 2 : width + 2]


FORMS: dict[str, Callable[[Requests, list[int], int, random.Random], tuple[Any, ...]]] = {
    "in place": lambda made, lengths, size, source: (wide(made, source), lengths, size),
    "upside down": lambda made, lengths, size, source: (wide(made[::-1], source)[-2::-1], lengths, size),
    "int64": lambda made, lengths, size, source: (blocks(made, padding=2**40)[0], np.array(lengths), size),
    "tensors": lambda made, lengths, size, source: (torch.tensor(wide(made, source)), torch.tensor(lengths), size),
    "lists": lambda made, lengths, size, source: (blocks(made, padding=-1)[0].tolist(), lengths, np.int64(size)),
    "unsigned": lambda made, lengths, size, source: (
        blocks(made, padding=9)[0].astype(np.uint32), lengths, np.uint64(size),
    ),
    "flat": lambda made, lengths, size, source: (
        np.array([3, 5, *csr(made, size)[1], 9], np.int32), lengths, size, np.array(csr(made, size)[0]) + 2,
    ),
    "a flat list": lambda made, lengths, size, source: (csr(made, size)[1], lengths, size, csr(made, size)[0]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from((0, 1, 2, 3, 8, 30)),
    page_size=st.sampled_from((1, 4, 16)),
    longest=st.sampled_from((1, 3, 12, 90)),
    sharing=st.sampled_from((0.9, 0.5, 1.0)),
    pool=st.sampled_from((2, 5, 1000)),
)
def test_pages_of_a_prefix_cache(
    way: str, form: str, seed: int, count: int, page_size: int, longest: int, sharing: float, pool: int
) -> None:
    source = random.Random(seed)
    made = cached(requests(seed, count, page_size, longest, sharing, pool), source)
    lengths = [tokens for _, tokens in made]
    shared = found(way, *FORMS[form](made, lengths, page_size, source))
    if not made:
        assert shared == [[], []]
        return
    table = torch.from_numpy(blocks(made, padding=0)[0]).int()
    pages = PageTable(table, torch.tensor(lengths, dtype=torch.int32), int(table.max()) + 1)
    reader = SharingReader(pages, page_size, backend="torch")
    reader.start()
    assert shared == [part.tolist() for part in reader.result()[:2]]


@needs_compiler
@examples(300)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from((1, 2, 3, 8, 40)),
    width=st.sampled_from((1, 2, 7, 60)),
    pool=st.sampled_from((GARBAGE[:1], GARBAGE[:2], GARBAGE, range(1000))),
    page_size=st.sampled_from((1, 16)),
)
def test_any_table_is_taken(seed: int, count: int, width: int, pool: Any, page_size: int) -> None:
    """Also one in which requests part and meet again: both ways then find the same, which trees and batches take."""
    source = random.Random(seed)
    table = np.array(source.choices(pool, k=count * width), np.int32).reshape(count, width)
    for _ in range(source.randrange(2 * count)):
        begin = source.randrange(width)
        end = source.randint(begin, width)
        table[source.randrange(count), begin:end] = table[source.randrange(count), begin:end]
    lengths = [source.choice([0, width * page_size, source.randint(0, width * page_size)]) for _ in range(count)]
    shared_with, shared_tokens = found("C", table, lengths, page_size)
    assert [shared_with, shared_tokens] == found("Python", table, lengths, page_size)
    for request, (owner, tokens) in enumerate(zip(shared_with, shared_tokens, strict=True)):
        assert -1 <= owner < request
        assert (owner >= 0) == (tokens > 0)
        assert tokens % page_size == 0
        assert owner < 0 or tokens <= min(lengths[request], lengths[owner])
        assert owner < 0 or table[request, tokens // page_size - 1] == table[owner, tokens // page_size - 1]
    Tree.from_requests(lengths, shared_with, shared_tokens, page_size=page_size)
    batch = LiveBatch(page_size)
    seats = [batch.add(0) for _ in range(count)]
    batch.found(seats, batch.epoch[seats], lengths, shared_with, shared_tokens)
    batch.tree()


@pytest.mark.parametrize("way", WAYS)
def test_where_requests_end(way: str) -> None:
    """Within the pages of others, with them, and without a whole page; the first of several is named."""
    made = [[1, 2, 3, 4], [1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 6, 7], [1, 2, 6], [1, 2, 6, 8], [1, 2, 3, 4, 5]]
    tokens = [16, 9, 19, 20, 16, 12, 16, 20]
    shared = found(way, [[*pages, *[9] * (5 - len(pages))] for pages in made], tokens, 4)
    assert shared == [[-1, 0, 0, 0, 0, 4, 4, 3], [0, 8, 16, 16, 8, 12, 12, 20]]
    assert found(way, [[1], [1], [1]], [3, 0, 3], 4) == [[-1, -1, -1], [0, 0, 0]]
    assert found(way, [[1], [1], [1]], [4, 3, 4], 4) == [[-1, -1, 0], [0, 0, 4]]
    assert found(way, [], [], 4) == [[], []]
    assert found(way, [], [0, 0], 4) == found(way, np.empty((2, 0)), [0, 0], 4) == [[-1, -1], [0, 0]]


class Noted:
    """A row of a table that notes which places are read."""

    def __init__(self, row: Ints) -> None:
        self.row, self.places = row, set[int]()

    def item(self, place: int) -> int:
        self.places.add(place)
        return self.row.item(place)


def test_few_page_ids_are_read() -> None:
    """A binary search in the rows of two requests finds where they part. Whatever the other entries are, both ways find
    the same.
    """
    width, source = 5000, np.random.default_rng(0)
    table = source.integers(2**31 - 1, size=(64, width), dtype=np.int32)
    for request in range(64):
        table[request, : 40 * request] = table[request // 8 * 8, : 40 * request]
    rows = [Noted(row) for row in table]
    owners, pages = shared_pages(rows, [width] * 64)  # type: ignore[arg-type]  # rows of a kind
    assert pages == [40 * request if request % 8 else 0 for request in range(64)]
    reads = [len(row.places) for row in rows]
    assert max(reads) <= 8 * width.bit_length()
    assert sum(reads) <= 64 * (2 * width.bit_length() + 4)
    for row, noted in zip(table, rows, strict=True):
        others = np.ones(width, bool)
        others[[*noted.places]] = False
        row[others] = source.choice(GARBAGE, others.sum())
    tokens = [16 * each for each in pages]
    assert found("Python", table, [16 * width] * 64, 16) == [owners, tokens]
    if c_library.library():
        assert found("C", table, [16 * width] * 64, 16) == [owners, tokens]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("flat", [False, True])
def test_tables_are_read_in_place(way: str, flat: bool) -> None:
    """Also where rows are parts of longer ones, or the same memory."""
    table = np.broadcast_to(np.arange(2**20, dtype=np.int32), (64, 2**20))[:, 5:]
    offsets = (np.array([0, 2**19, 2**19 + 5]),) if flat else ()
    lengths = np.full(len(offsets[0]) - 1 if flat else 64, 5 if flat else 2**19, np.int32)
    tracemalloc.start()
    try:
        shared = found(way, table[0] if flat else table, lengths, 1, *offsets)
        assert tracemalloc.get_traced_memory()[1] < 2**18
    finally:
        tracemalloc.stop()
    assert shared == ([[-1] * 2, [0] * 2] if flat else [[-1, *[0] * 63], [0, *[2**19] * 63]])


@needs_compiler
def test_pages_at_equal_distances_take_no_longer() -> None:
    """As where each request got the same number of pages: they must not crowd in the hash table."""

    def least_us(distance: int) -> float:
        table = np.arange(4096, dtype=np.int32)[:, None] * distance + np.arange(4, dtype=np.int32)
        call = partial(treegen.shared_prefixes, table, np.full(4096, 4, np.int32), 1)
        return min(timeit.repeat(call, number=1, repeat=7)) * 1e6

    usual = least_us(6000)
    assert max(map(least_us, (7037, 227, 1053))) < 20 * usual  # 7037 took 110 times as long


def test_a_claim_that_is_wrong_costs_only_speed() -> None:
    """Requests 3 and 5 have a page of their own before those that they share, which only the device sees."""
    shape = Shape(4, 2, 16, dtype="fp32", page_size=4)
    made: Requests = [([0, 1, 2, 3, 4, 10 + request], 22) for request in range(8)]
    for request in (3, 5):
        made[request][0][1] = 20 + request
    table, lengths = (torch.tensor(part, dtype=torch.int32) for part in blocks(made, padding=-1))
    kernel = treegen.compile_batch(
        shape, PageTable(table, lengths, 30), max_tokens=24, backend="torch", strategy=treegen.strategies.cohort(64)
    )
    shared = treegen.shared_prefixes(table, lengths, 4)
    assert [part.tolist() for part in shared] == [[-1, *[0] * 7], [0, *[20] * 7]]
    batch = LiveBatch(page_size=4)
    seats = [batch.add(tokens) for _, tokens in made]
    batch.found(seats, batch.epoch[seats], lengths, *shared)
    kernel.update(batch)
    kernel.step()
    q, k, v = torch.randn(8, 4, 16), *torch.randn(2, 30, 4, 2, 16)
    out, lse = kernel(q, k, v, return_lse=True)
    for row, (pages, tokens) in enumerate(made):
        alone = Tree.from_parents([-1], [tokens], kv=[slots(pages, tokens, 4)])
        expected, expected_lse = oracle.reference(alone, q[row : row + 1], k, v)
        assert oracle.error(out[row : row + 1], expected) < 1e-5
        assert oracle.error(lse[row : row + 1], expected_lse) < 1e-5
    counts = kernel.counters()
    assert (counts["refuted"], counts["planned"]) == (2, 6)


class OnGpu:
    """A tensor on a GPU."""

    is_cuda, device = True, "cuda:0"


GOOD = {"block_table": [[1, 2], [3, 4]], "seq_lens": [5, 32], "page_size": 16}
FLAT = {"block_table": [1, 2, 3, 4], "seq_lens": [5, 32], "page_size": 16, "kv_indptr": [0, 1, 3]}


@pytest.mark.parametrize(
    ("given", "argument", "reason"),
    [
        ({**GOOD, "block_table": [1, 2]}, "block_table", "is not a table"),
        ({**GOOD, "block_table": np.zeros((2, 1, 2), np.int32)}, "block_table", "is not flat"),
        ({**GOOD, "block_table": [[1, 2]]}, "block_table", "does not match 2 lengths"),
        ({**GOOD, "block_table": [[1, 2.5], [3, 4]]}, "block_table[1]", "is not an integer"),
        ({**GOOD, "block_table": np.zeros((2, 2), bool)}, "block_table[0]", "is not an integer"),
        ({**GOOD, "block_table": [[1, 2], [3]]}, "block_table", "is not an array of integers"),
        ({**GOOD, "block_table": OnGpu()}, "block_table", "is not on the host"),
        ({**GOOD, "seq_lens": OnGpu()}, "seq_lens", "is not on the host"),
        ({**GOOD, "seq_lens": [5, 33]}, "seq_lens[1]", "needs 3 pages, its row has room for 2"),
        ({**GOOD, "seq_lens": [5, 2**31 - 1], "page_size": 1}, "seq_lens[1]", "its row has room for 2"),
        ({**GOOD, "seq_lens": [-5, 3]}, "seq_lens[0]", "is outside"),
        ({**GOOD, "seq_lens": [[5, 3]]}, "seq_lens", "has to be one-dimensional"),
        ({**GOOD, "page_size": 0}, "page_size", "is not a positive integer"),
        ({**FLAT, "block_table": [[1, 2], [3, 4]]}, "block_table", "is not flat"),
        ({**FLAT, "kv_indptr": [0, 1]}, "kv_indptr", "does not match 2 lengths"),
        ({**FLAT, "kv_indptr": [0, 3, 2]}, "kv_indptr[2]", "falls"),
        ({**FLAT, "kv_indptr": [0, 1, 5]}, "kv_indptr[2]", "is beyond the table of 4 pages"),
        ({**FLAT, "kv_indptr": [-1, 1, 3]}, "kv_indptr[0]", "is outside"),
        ({**FLAT, "kv_indptr": OnGpu()}, "kv_indptr", "is not on the host"),
        ({**FLAT, "seq_lens": [17, 32]}, "seq_lens[0]", "needs 2 pages, its row has room for 1"),
    ],
)
def test_wrong_tables_are_refused(given: dict[str, Any], argument: str, reason: str) -> None:
    with pytest.raises(TreeError, match=reason) as caught:
        treegen.shared_prefixes(**given)
    assert caught.value.argument == argument
