"""Page tables for FlashInfer's wrappers: every row's slots are rebuilt from them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.call_counts import calls
from support.forests import examples, forests, visible_slots
from treegen import Tree
from treegen.bench.flashinfer_tables import Level, PagesOnHost, level_tables, row_table
from treegen.ir.errors import InputError
from treegen.ir.tree.kv import KVRuns

TREES = ["1,4,16/100,10,3", "7", "5(3*2,4(2*3))", "1,256/256,32"]


def request_slots(table: PagesOnHost, request: int, page_size: int) -> list[int]:
    """The slots of a request as FlashInfer reads them: its pages, the last up to `last_page_len`."""
    pages = table.indices[table.indptr[request] : table.indptr[request + 1]].tolist()
    if not pages:
        assert table.last_page_len[request] == 0
        return []
    assert 1 <= table.last_page_len[request] <= page_size
    slots = [page * page_size + offset for page in pages for offset in range(page_size)]
    return slots[: (len(pages) - 1) * page_size + int(table.last_page_len[request])]


def rows_of_levels(levels: tuple[Level, ...], tree: Tree, page_size: int) -> list[list[int]]:
    """Every row's slots, root first, put together from all levels."""
    slots: list[list[int]] = [[] for _ in range(tree.num_rows)]
    for level in levels:
        bounds = level.qo_indptr.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == tree.num_rows
        assert len(level.table) == len(bounds) - 1
        assert len(level.table.indptr) == len(bounds)
        assert level.table.indptr[-1] == len(level.table.indices) > 0
        for request, (lo, hi) in enumerate(pairwise(bounds)):
            assert lo < hi
            for rank in range(lo, hi):
                slots[tree.topology.row_of_rank[rank]] += request_slots(level.table, request, page_size)
    return slots


def check(tree: Tree, page_size: int = 1) -> None:
    expected = [visible_slots(tree, row) for row in range(tree.num_rows)]
    table = row_table(tree, page_size)
    assert len(table) == tree.num_rows
    assert [request_slots(table, row, page_size) for row in range(tree.num_rows)] == expected
    assert table.tokens(page_size).tolist() == [len(slots) for slots in expected]
    assert rows_of_levels(level_tables(tree, page_size), tree, page_size) == expected
    for array in (table.indptr, table.indices, table.last_page_len):
        assert array.dtype == np.int32


@pytest.mark.parametrize("text", TREES)
def test_trees_from_text(text: str) -> None:
    check(Tree.parse(text))


@given(tree=forests(max_nodes=40, max_tokens=40))
@examples(300)
def test_random_forests(tree: Tree) -> None:
    check(tree)


@given(tree=forests(max_nodes=30, max_tokens=30, kv=("pages",), salt=1), page_size=st.sampled_from((2, 3, 8)))
@examples(300)
def test_random_pages_are_right_or_refused(tree: Tree, page_size: int) -> None:
    """A table is made exactly when every request's pages are whole up to the last."""

    def pages_are_whole(slots: list[int]) -> bool:
        return all(slot == slots[at - at % page_size] + at % page_size for at, slot in enumerate(slots)) and all(
            slot % page_size == 0 for slot in slots[::page_size]
        )

    expected = [visible_slots(tree, row) for row in range(tree.num_rows)]
    if all(pages_are_whole(slots) for slots in expected):
        table = row_table(tree, page_size)
        assert [request_slots(table, row, page_size) for row in range(tree.num_rows)] == expected
    else:
        with pytest.raises(InputError, match="partly filled"):
            row_table(tree, page_size)
    try:
        levels = level_tables(tree, page_size)
    except InputError:
        return
    assert rows_of_levels(levels, tree, page_size) == expected


def paged(parents: list[int], tokens: list[int], page_size: int) -> Tree:
    """A tree whose nodes begin on pages of their own, in falling order."""
    counts = [-(-count // page_size) for count in tokens]
    free = iter(range(sum(counts))[::-1])
    pages = [[next(free) for _ in range(count)] for count in counts]
    return Tree.from_parents(parents, tokens, kv=KVRuns.from_pages(np.array(tokens), pages, page_size))


def test_partial_last_pages() -> None:
    tree = paged([-1, 0, 0], [16, 5, 9], 8)
    check(tree, 8)
    table = row_table(tree, 8)
    assert table.indptr.tolist() == [0, 3, 7]
    assert table.last_page_len.tolist() == [5, 1]


def test_partial_page_inside_a_path_is_for_levels_only() -> None:
    tree = paged([-1, 0, 0], [15, 5, 9], 8)
    with pytest.raises(InputError, match="token 15 of request 0 is in KV slot 16: its pages are partly filled"):
        row_table(tree, 8)
    top, leaves = level_tables(tree, 8)
    assert top.table.last_page_len.tolist() == [7]
    assert leaves.table.last_page_len.tolist() == [5, 1]


def test_parts_of_levels() -> None:
    """Single children join their parent; rows in a node cut it; rows that are done have empty requests."""
    tree = Tree.from_parents([-1, 0, 1, 1], [4, 2, 3, 5], rows=[(2, 3), (3, 5), (3, 1), (1, 2)])
    tables = level_tables(tree)
    assert [level.qo_indptr.tolist() for level in tables] == [[0, 4], [0, 1, 2, 4], [0, 3, 4]]
    assert [level.table.last_page_len.tolist() for level in tables] == [[1], [0, 1, 1], [0, 1]]
    assert [np.diff(level.table.indptr).tolist() for level in tables] == [[6], [0, 3, 1], [0, 4]]
    check(tree)


def test_trees_without_rows_or_tokens() -> None:
    assert level_tables(Tree.from_parents([-1], [3], rows=[])) == ()
    assert len(row_table(Tree.from_parents([-1], [3], rows=[]))) == 0
    empty = Tree.from_parents([-1], [3], rows=[(0, 0), (0, 0)])
    assert level_tables(empty) == ()
    assert row_table(empty, 4).tokens(4).tolist() == [0, 0]


def test_large_trees_take_few_operations() -> None:
    tree = Tree.parse("1,16,64,256,1024/2048,512,256,128,32")
    table, levels = row_table(tree, 16), level_tables(tree, 16)
    assert calls(lambda: (row_table(tree, 16), level_tables(tree, 16))) < 1500
    assert table.tokens(16).tolist() == [2976] * 1024
    assert len(levels) == 5
