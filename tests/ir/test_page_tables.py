"""Trees from engines' page tables: every row sees its request's tokens, and every shared prefix is stored once."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.call_counts import calls
from support.forests import examples, visible_slots
from support.page_requests import Requests, blocks, csr, requests, slots
from treegen import Shape, Tree, TreegenError
from treegen.backends import oracle
from treegen.ir.errors import TreeError
from treegen.ir.tree import page_order


def check(tree: Tree, made: Requests, page_size: int) -> None:
    """Rows see their requests' tokens in order, and there are as few pages and nodes as shared prefixes allow."""
    assert tree.num_rows == len(made)
    for row, (pages, tokens) in enumerate(made):
        assert visible_slots(tree, row) == slots(pages, tokens, page_size)
    prefixes = {tuple(pages[: end + 1]) for pages, _ in made for end in range(len(pages))}
    counts = -(-tree.tokens // page_size)
    assert int(counts.sum()) == len(prefixes)
    # A prefix is the end of a node where requests end or where more than one page follows, and nowhere else.
    following: dict[tuple[int, ...], set[int]] = {}
    for prefix in prefixes:
        following.setdefault(prefix[:-1], set()).add(prefix[-1])
    ends = {tuple(pages) for pages, _ in made if pages} | {
        prefix for prefix, pages in following.items() if len(pages) > 1
    }
    empty_root = not prefixes or any(not pages for pages, _ in made)
    assert len(tree.tokens) == len(ends - {()}) + empty_root
    assert (tree.row_sees <= tree.tokens[tree.row_node]).all()
    assert (tree.parent < np.arange(len(tree.parent))).all()


@examples(300)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from(range(40)),
    page_size=st.sampled_from((1, 2, 16, 64)),
    longest=st.sampled_from((1, 2, 4, 12, 90)),
    sharing=st.sampled_from((0.9, 0.0, 0.5, 1.0)),
    pool=st.sampled_from((2, 5, 1000)),
)
def test_any_requests(seed: int, count: int, page_size: int, longest: int, sharing: float, pool: int) -> None:
    made = requests(seed, count, page_size, longest, sharing, pool)
    tree = Tree.from_page_table(*csr(made, page_size), page_size)
    check(tree, made, page_size)
    other = Tree.from_block_table(*blocks(made, padding=-1), page_size)
    for name in ("parent", "tokens", "row_node", "row_sees"):
        assert np.array_equal(getattr(tree, name), getattr(other, name))
    assert np.array_equal(tree.kv.start, other.kv.start)


@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.sampled_from((1, 2, 7)),
    longest=st.sampled_from((3, 30)),
    pool=st.sampled_from((2, 5, 2**26)),
)
def test_windows_of_any_width_find_the_same(seed: int, width: int, longest: int, pool: int) -> None:
    made = requests(seed, 60, 16, longest, 0.9, pool)
    expected = Tree.from_page_table(*csr(made, 16), 16)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(page_order, "ENTRIES", 1)
        patched.setattr(page_order, "NARROWEST", width)
        found = Tree.from_page_table(*csr(made, 16), 16)
    assert np.array_equal(found.parent, expected.parent)
    assert np.array_equal(found.row_node, expected.row_node)
    check(found, made, 16)


@examples(60)
@given(seed=st.integers(0, 2**32 - 1), bits=st.integers(2, 31), rows=st.sampled_from((1, 2, 50)))
def test_rows_are_ordered_as_tuples(seed: int, bits: int, rows: int) -> None:
    """Few different numbers decide late, in many columns; large ones do not fit into one key."""
    source = np.random.default_rng(seed)
    table = source.choice([-1, 0, 2**bits - 2], (rows, 30), p=[0.05, 0.9, 0.05]).astype(np.int32)
    table[source.integers(rows, size=rows // 3)] = table[0]
    order, agreeing = page_order.ordered_rows(table)
    lists = table.tolist()
    assert order.tolist() == sorted(range(rows), key=lambda row: lists[row])
    for common, one, other in zip(agreeing, order[:-1], order[1:], strict=True):
        assert lists[one][:common] == lists[other][:common]
        assert common == 30 or lists[one][common] != lists[other][common]


@examples(60)
@given(seed=st.integers(0, 2**32 - 1), sharing=st.sampled_from((0.9, 0.5, 1.0)))
def test_the_topology_is_that_of_any_tree_of_these_nodes(seed: int, sharing: float) -> None:
    made = requests(seed, 40, 16, 4, sharing, 5)
    tree = Tree.from_page_table(*csr(made, 16), 16)
    rows = list(zip(tree.row_node.tolist(), tree.row_sees.tolist(), strict=True))
    other = Tree.from_parents(tree.parent, tree.tokens, rows)
    for name in ("depth", "preorder", "subtree", "prefix", "row_of_rank", "rank_lo", "rank_own", "rank_hi"):
        assert np.array_equal(getattr(tree.topology, name), getattr(other.topology, name))
    for name in ("node", "start", "stop", "lo", "hi"):
        assert np.array_equal(getattr(tree.topology.spans, name), getattr(other.topology.spans, name))


def test_what_is_shared() -> None:
    prompt = [7, 3, 9]
    made: Requests = [
        ([*prompt, 1], 13),  # two requests behind one prompt, the last pages filled in part
        ([*prompt, 2], 15),
        (prompt, 10),  # a prefix of both, which has not written all of the prompt's last page
        ([3, 9, 7], 12),  # the prompt's pages at other places: nothing is shared
        ([*prompt, 1], 14),  # a request once more, with more of the last page
    ]
    tree = Tree.from_page_table(*csr(made, 4), 4)
    check(tree, made, 4)
    assert len(tree.tokens) == 4
    assert tree.tokens.tolist().count(12) == 2
    assert tree.row_node[0] == tree.row_node[4]
    assert (tree.row_sees[0], tree.row_sees[4]) == (1, 2)
    assert tree.row_sees[2] == 10


def test_rows_keep_the_callers_order_and_pages_may_come_in_any() -> None:
    made: Requests = [([5, 1], 20), ([2], 16), ([5, 0], 32)]
    tree = Tree.from_page_table(*csr(made, 16), 16)
    check(tree, made, 16)
    assert tree.unique_tokens == 16 + 16 + 4 + 16


@pytest.mark.parametrize("made", [[], [([], 0)], [([], 0), ([], 0)], [([], 0), ([4], 3), ([], 0)]])
def test_empty_requests(made: Requests) -> None:
    tree = Tree.from_page_table(*csr(made, 8), 8)
    check(tree, made, 8)
    q = torch.randn(len(made), 2, 16)
    caches = torch.randn(2, 40, 1, 16)
    out, lse = treegen.compile(tree, shape=Shape(2, 1, 16, dtype="fp32"))(q, *caches, return_lse=True)
    nothing = [not tokens for _, tokens in made]
    assert torch.equal(lse.isinf().all(1), torch.tensor(nothing, dtype=torch.bool))
    assert bool((out[nothing] == 0).all())


def test_tensors_are_taken_and_not_changed() -> None:
    made = requests(1, 20, 16, 5, 0.7, 100)
    arrays = [torch.tensor(values, dtype=torch.int32) for values in csr(made, 16)]
    copies = [array.clone() for array in arrays]
    check(Tree.from_page_table(*arrays, 16), made, 16)
    assert all(torch.equal(array, copy) for array, copy in zip(arrays, copies, strict=True))
    table, lengths = blocks(made, padding=2**40)
    check(Tree.from_block_table(torch.from_numpy(table), torch.tensor(lengths), 16), made, 16)


@examples(40)
@given(
    seed=st.integers(0, 2**32 - 1),
    page_size=st.sampled_from((1, 16, 32, 64)),
    strategy=st.sampled_from(("auto", "query", "deft-node")),
)
def test_attention_over_page_tables(seed: int, page_size: int, strategy: str) -> None:
    made = requests(seed, 12, page_size, 4, 0.7, 30)
    tree = Tree.from_page_table(*csr(made, page_size), page_size)
    shape = Shape(4, 2, 16, dtype="fp32", page_size=page_size)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(made), 4, 16, generator=generator)
    k, v = torch.randn(2, 30, page_size, 2, 16, generator=generator)
    k, v = (k[:, 0], v[:, 0]) if page_size == 1 else (k, v)
    out, lse = treegen.compile(tree, strategy=strategy, shape=shape)(q, k, v, return_lse=True)
    for row, (pages, tokens) in enumerate(made):
        alone = Tree.from_parents([-1], [tokens], kv=[slots(pages, tokens, page_size)])
        expected_out, expected_lse = oracle.reference(alone, q[row : row + 1], k, v)
        assert oracle.error(out[row : row + 1], expected_out) < 1e-5
        assert oracle.error(lse[row : row + 1], expected_lse) < 1e-5


GOOD = ([0, 2, 3], [4, 5, 6], [3, 16])


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"kv_indptr": [0, 2]}, "kv_indptr"),
        ({"kv_indptr": [1, 2, 3]}, "kv_indptr"),
        ({"kv_indptr": []}, "kv_indptr"),
        ({"kv_indptr": [0, 4, 3]}, "kv_indptr[2]"),
        ({"kv_indptr": [0, 2.5, 3]}, "kv_indptr[1]"),
        ({"kv_indices": [4, -1, 6]}, "kv_indices[1]"),
        ({"kv_indices": [4, 2**27, 6]}, "kv_indices[1]"),
        ({"kv_last_page_len": [3, 17]}, "kv_last_page_len[1]"),
        ({"kv_last_page_len": [3, 0]}, "kv_last_page_len[1]"),
        ({"kv_last_page_len": [3]}, "kv_last_page_len"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 16.0}, "page_size"),
    ],
)
def test_wrong_page_tables_are_refused(changed: dict[str, object], argument: str) -> None:
    names = ("kv_indptr", "kv_indices", "kv_last_page_len")
    given = {**dict(zip(names, GOOD, strict=True)), "page_size": 16, **changed}
    with pytest.raises(TreeError) as caught:
        Tree.from_page_table(**given)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("table", "lengths", "argument"),
    [
        ([[1, 2], [3, 4]], [5], "seq_lens"),
        ([[1, 2], [3, 4]], [5, 33], "seq_lens[1]"),
        ([[1, 2], [3, 4]], [5, -1], "seq_lens[1]"),
        ([[1, -1], [3, 4]], [17, 3], "block_table's pages[1]"),
        ([1, 2], [5, 5], "block_table"),
        ([[0.5, 1.0]], [5], "block_table[0]"),
    ],
)
def test_wrong_block_tables_are_refused(table: object, lengths: list[int], argument: str) -> None:
    with pytest.raises(TreeError) as caught:
        Tree.from_block_table(table, lengths, 16)
    assert caught.value.argument == argument


def test_tables_on_a_gpu_are_refused() -> None:
    class OnGpu:
        is_cuda, device = True, "cuda:0"

    with pytest.raises(TreegenError, match="not on the host"):
        Tree.from_page_table(OnGpu(), [], [], 16)
    with pytest.raises(TreegenError, match="not on the host"):
        Tree.from_block_table(OnGpu(), [1], 16)


def test_work_grows_with_the_pages_and_not_with_their_square() -> None:
    def work(count: int) -> tuple[int, int]:
        """Calls, and bytes at the peak."""
        made = [([0, 1, 2, 3 + row // 16, 1000 + row], 80) for row in range(count)]
        table = [np.array(values, np.int32) for values in csr(made, 16)]
        called = calls(lambda: Tree.from_page_table(*table, 16))
        tracemalloc.start()
        try:
            Tree.from_page_table(*table, 16)
            return called, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = work(1_000), work(16_000)
    assert many[0] < 2 * few[0]
    assert many[1] < 20 * few[1]


def test_the_callers_arrays_stay_the_callers() -> None:
    """An engine writes the next step's table into the same buffers."""
    made = requests(4, 9, 16, 5, 0.6, 30)
    indptr, indices, last = (np.array(part, np.int32) for part in csr(made, 16))
    table, lengths = (np.array(part, np.int32) for part in blocks(made, padding=0))
    trees = Tree.from_page_table(indptr, indices, last, 16), Tree.from_block_table(table, lengths, 16)
    for part in (indptr, indices, last, table, lengths):
        part[:] = 3
    for tree in trees:
        check(tree, made, 16)
