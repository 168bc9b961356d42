"""What requests share, found from page tables: compared with a search of all pairs of rows, in the interpreter and on
the host.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples
from treegen.backends import sharing_kernels
from treegen.backends.find_sharing import Sharing, SharingReader
from treegen.backends.page_table import PageTable
from treegen.ir.tree import Tree

FORMS = ("ragged", "block", "named")
BACKENDS = ("triton", "torch")
POOL = 40
Rows = list[tuple[list[int], int]]
"""Page ids and tokens of every row of a batch."""


def random_rows(source: random.Random, count: int, page_size: int, longest: int, pool: int) -> Rows:
    """Rows that begin like others, of any level: prefixes, forks in mid-page, the same again, unshared and empty."""
    made: Rows = []
    for _ in range(count):
        pages: list[int] = []
        kind = source.choice(["new", "fork", "fork", "fork", "same", "empty"])
        if made and kind in ("fork", "same"):
            like, tokens = source.choice(made)
            if kind == "same":
                made.append((list(like), tokens))
                continue
            pages = like[: source.randint(0, len(like))]
        if kind == "empty":
            made.append(([], 0))
            continue
        pages = pages + [source.randrange(pool) for _ in range(source.randint(0, longest))]
        made.append((pages, (len(pages) - 1) * page_size + source.randint(1, page_size) if pages else 0))
    source.shuffle(made)
    return made


def table_of(rows: Rows, form: str, num_pages: int, source: random.Random, garbage: bool = True) -> PageTable:
    """A page table in one of three forms, with garbage where it may be."""
    width = max([len(pages) for pages, _ in rows], default=0) + 2
    anything = [-1, num_pages, 2**31 - 1, -(2**31), 0, 1] if garbage else [0]
    lengths = torch.tensor([tokens for _, tokens in rows], dtype=torch.int32)
    if form == "ragged":
        ends = np.cumsum([0, *(len(pages) for pages, _ in rows)])
        flat = [page for pages, _ in rows for page in pages] + [source.choice(anything) for _ in range(3)]
        indptr = torch.tensor(ends, dtype=torch.int32)
        return PageTable(torch.tensor(flat, dtype=torch.int32), lengths, num_pages, None, indptr)
    pool = len(rows) + 2
    place = source.sample(range(pool), len(rows)) if form == "named" else list(range(len(rows)))
    table = torch.tensor([source.choice(anything) for _ in range(pool * width)], dtype=torch.int32).view(pool, width)
    for at, (pages, _) in zip(place, rows, strict=True):
        table[at, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    named = torch.tensor(place, dtype=torch.int32) if form == "named" else None
    return PageTable(table, lengths, num_pages, named)


def countable(pages: list[int], tokens: int, page_size: int, num_pages: int, most_tokens: int) -> list[int]:
    """The whole pages of a row that may be shared."""
    if not 0 <= tokens <= min(most_tokens, len(pages) * page_size):
        return []
    whole = pages[: tokens // page_size]
    return whole[: next((at for at, page in enumerate(whole) if not 0 <= page < num_pages), len(whole))]


def common(one: list[int], other: list[int]) -> int:
    """The pages that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def check(found: Sharing, rows: Rows, page_size: int, num_pages: int, most_tokens: int = 2**31 - 1) -> None:
    """What every row shares is the most that it shares with any earlier one, and the row named shares so much."""
    own = [countable(pages, tokens, page_size, num_pages, most_tokens) for pages, tokens in rows]
    assert found.lengths.tolist() == [tokens for _, tokens in rows]
    for row, (other, tokens) in enumerate(zip(*(part.tolist() for part in found[:2]), strict=True)):
        most = max((common(own[row], own[earlier]) for earlier in range(row)), default=0)
        assert tokens == most * page_size, row
        assert -1 <= other < row
        assert (other >= 0) == (most > 0)
        assert other < 0 or common(own[row], own[other]) == most


def find(pages: PageTable, page_size: int, backend: str, rows: int | None = None, **options: int) -> Sharing:
    reader = SharingReader(pages, page_size, backend=backend, **options)
    reader.start(rows)
    assert reader.ready()
    return reader.result()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
@examples(12)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from((8, 1, 2, 3, 20)),
    page_size=st.sampled_from((16, 1, 4)),
    pool=st.sampled_from((POOL, 2)),
)
def test_random_forests(form: str, backend: str, seed: int, count: int, page_size: int, pool: int) -> None:
    source = random.Random(seed)
    rows = random_rows(source, count, page_size, 6, pool)
    if form == "ragged" and not rows:
        return
    for row in range(len(rows)):  # some lengths and ids are impossible
        pages, tokens = rows[row]
        if source.random() < 0.1:
            tokens = source.choice([-5, 2**31 - 1, (len(pages) + 9) * page_size + 1, -(2**31)])
        if pages and source.random() < 0.1:
            pages = [*pages]
            pages[source.randrange(len(pages))] = source.choice([-1, pool, 2**31 - 1])
        rows[row] = pages, tokens
    table = table_of(rows, form, pool, source)
    room = [(pages + [0] * 10_000 if form != "ragged" else pages, tokens) for pages, tokens in rows]
    if form != "ragged":  # what a row has room for is the width of its table
        width = table.table.shape[1]
        at = range(len(rows)) if table.table_rows is None else table.table_rows.tolist()
        room = [(table.table[place, :width].tolist(), tokens) for place, (_, tokens) in zip(at, rows, strict=True)]
    check(find(table, page_size, backend), room, page_size, pool)


@pytest.mark.parametrize("backend", BACKENDS)
def test_levels_groups_and_chains_of_forks(backend: str) -> None:
    system, document = list(range(100, 108)), list(range(200, 205))
    rows: Rows = [
        ([1, 2, 3], 40),  # alone
        ([*system, *document, 7], 14 * 16),
        ([*system, *document, 8, 9], 15 * 16),
        ([*system, 10], 8 * 16 + 1),
        ([*system, *document, 8, 11], 14 * 16 + 3),
        ([*system, *document[:2], 12], 11 * 16),
        ([1, 2, 4], 48),
        ([], 0),
    ]
    found = find(table_of(rows, "ragged", 300, random.Random(1)), 16, backend)
    assert found.shared_tokens.tolist() == [0, 0, 13 * 16, 8 * 16, 14 * 16, 10 * 16, 2 * 16, 0]
    check(found, rows, 16, 300)
    tree = Tree.from_requests(np.maximum(found.lengths, 0), *found[:2], page_size=16)
    assert tree.requests is not None
    assert tree.requests.shared_with.tolist() == [-1, -1, 1, 1, 2, 1, 0, -1]

    chain = [*range(40)]
    forks: Rows = [([*chain[: fork + 1], 50 + fork], (fork + 2) * 16) for fork in range(38)]
    for order in (forks, forks[::-1]):
        found = find(table_of(order, "block", 300, random.Random(1)), 16, backend)
        check(found, order, 16, 300)
    same: Rows = [(chain, 40 * 16)] * 40
    found = find(table_of(same, "ragged", 300, random.Random(1)), 16, backend)
    check(found, same, 16, 300)
    tree = Tree.from_requests(found.lengths, *found[:2], page_size=16)
    assert tree.requests is not None
    assert set(tree.requests.shared_with.tolist()) == {-1, 0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_pages_and_of_batches_and_long_requests(backend: str) -> None:
    rows: Rows = [([3, 4], 31), ([3, 4], 32), ([3, 4], 16), ([3, 4, 5], 33), ([3, 4, 5], 33)]
    table = table_of(rows, "ragged", 10, random.Random(2))
    assert find(table, 16, backend).shared_tokens.tolist() == [0, 16, 16, 32, 32]
    assert find(table, 16, backend, rows=2).shared_tokens.tolist() == [0, 16]
    assert find(table, 16, backend, rows=0).shared_tokens.tolist() == []
    found = find(table, 16, backend, most_tokens=32)
    assert found.shared_tokens.tolist() == [0, 16, 16, 0, 0]
    check(found, rows, 16, 10, 32)


def test_programs_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more rows, and more pages, than a program compares at a time."""
    source = random.Random(5)
    rows = random_rows(source, 70, 1, 90, 3)
    monkeypatch.setattr("treegen.backends.find_sharing.ROWS", 16)
    monkeypatch.setattr("treegen.backends.find_sharing.BLOCK", 8)
    check(find(table_of(rows, "ragged", 3, source), 1, "triton"), rows, 1, 3)


def test_equal_hashes_of_other_pages_are_no_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are compared before they count: here every hash is the same."""
    source = random.Random(6)
    rows = random_rows(source, 12, 4, 6, POOL)
    table = table_of(rows, "block", POOL, source)
    original = sharing_kernels.hash_pages

    class Alike:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def run(*arguments: torch.Tensor, **options: int) -> None:
                original[grid](*arguments, **options)
                arguments[4].fill_(7)

            return run

    monkeypatch.setattr(sharing_kernels, "hash_pages", Alike())
    check(find(table, 4, "triton"), rows, 4, POOL)


def test_a_reader_finds_what_the_table_holds_by_now() -> None:
    rows: Rows = [([3, 4], 32), ([3, 4], 32)]
    table = table_of(rows, "ragged", 10, random.Random(3))
    for backend in BACKENDS:
        reader = SharingReader(table, 16, backend=backend)
        assert reader.ready()
        reader.start()
        before = reader.result()
        table.table[3] = 5
        reader.start()
        assert reader.result().shared_tokens.tolist() == [0, 16]
        assert before.shared_tokens.tolist() == [0, 32]
        table.table[3] = 4
