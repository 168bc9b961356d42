"""Tree: constructors, text and JSON forms, what rows see, ranks, signature, and where tokens live."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import (
    ROW_STYLES,
    examples,
    forest,
    forests,
    path,
    preorder,
    ranked_rows,
    token_slots,
    visible,
    visible_slots,
)
from treegen import KVRuns, Tree
from treegen.ir.arrays import stable_order
from treegen.ir.errors import TreeError
from treegen.ir.tree import tree_drawing, tree_text


def rows_of(tree: Tree) -> list[tuple[int, int]]:
    return list(zip(tree.row_node.tolist(), tree.row_sees.tolist(), strict=True))


def assert_same(found: Tree, expected: Tree) -> None:
    """Equal in every array."""
    assert found.parent.tolist() == expected.parent.tolist()
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert rows_of(found) == rows_of(expected)
    assert token_slots(found) == token_slots(expected)


def numbered_in_preorder(tree: Tree) -> tuple[list[int], list[int]]:
    """Parents and tokens with nodes renumbered in depth-first order."""
    order = preorder(tree)
    number = {node: index for index, node in enumerate(order)} | {-1: -1}
    return [number[int(tree.parent[node])] for node in order], tree.tokens[order].tolist()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fails when the body takes longer; bounds are about ten times what a slow core needs."""
    begin = time.process_time()
    yield
    assert time.process_time() - begin < seconds


# Constructors


def test_default_rows_are_one_per_leaf_by_index() -> None:
    tree = Tree.from_parents([2, 2, -1, 0, -1], [3, 4, 5, 0, 7])
    assert rows_of(tree) == [(1, 4), (3, 0), (4, 7)]
    assert [tree.slots(row).tolist() for row in range(3)] == [
        [7, 8, 9, 10, 11, 3, 4, 5, 6],
        [7, 8, 9, 10, 11, 0, 1, 2],
        [*range(12, 19)],
    ]
    assert (tree.num_rows, tree.unique_tokens, tree.path_tokens) == (3, 19, 24)


def test_rows_keep_the_callers_order() -> None:
    rows = [(1, 2), (0, 3), (1, 0), (1, 2), (0, 1)]
    tree = Tree.from_parents([-1, 0], [3, 2], rows=rows)
    assert rows_of(tree) == rows
    assert tree.topology.row_of_rank.tolist() == [4, 1, 2, 0, 3]
    assert tree.positions().tolist() == [4, 2, 2, 4, 0]
    assert tree.nodes[1].rows == ((2, 0), (0, 2), (3, 2))


def test_rows_may_come_from_an_iterator_or_an_array() -> None:
    rows = [(0, 1), (1, 2)]
    for given_rows in (iter(rows), np.array(rows), [list(pair) for pair in rows]):
        assert rows_of(Tree.from_parents(np.array([-1, 0]), np.array([3, 2]), rows=given_rows)) == rows


def test_no_rows() -> None:
    tree = Tree.from_parents([-1, 0], [3, 2], rows=[])
    assert (tree.num_rows, tree.unique_tokens, tree.path_tokens) == (0, 0, 0)
    assert tree.positions().tolist() == []


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    tokens=st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
@examples(50)
def test_from_levels(counts: list[int], tokens: list[int]) -> None:
    tree = Tree.from_levels(counts, tokens[: len(counts)])
    first = [0, *itertools.accumulate(counts)]
    for level, count in enumerate(counts):
        for j in range(count):
            above = first[level - 1] + j * counts[level - 1] // count if level else -1
            assert tree.parent[first[level] + j] == above
            assert tree.tokens[first[level] + j] == tokens[level]
    leaves = sorted(set(range(first[-1])) - set(tree.parent.tolist()))
    assert rows_of(tree) == [(leaf, int(tree.tokens[leaf])) for leaf in leaves]


def test_from_levels_of_the_design() -> None:
    tree = Tree.from_levels([1, 4, 16, 512], [1024, 256, 128, 32])
    assert (len(tree.parent), tree.num_rows) == (533, 512)
    assert tree.unique_tokens == 1024 + 4 * 256 + 16 * 128 + 512 * 32
    assert tree.path_tokens == 512 * (1024 + 256 + 128 + 32)


@given(
    paths=st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=9),
    block_size=st.sampled_from((1, 3)),
    names=st.sampled_from(("ints", "strings", "tuples")),
)
@examples(200)
def test_from_paths_merges_exactly_common_prefixes(paths: list[list[int]], block_size: int, names: str) -> None:
    """Row i is path i, also when it is empty, or a prefix of or equal to another; prefixes are stored once."""
    made = {"ints": int, "strings": str, "tuples": lambda element: ("hash", element)}[names]
    tree = Tree.from_paths([[made(element) for element in path] for path in paths], block_size=block_size)
    assert tree.num_rows == len(paths)
    places: dict[tuple[int, ...], int] = {}
    for row, given_path in enumerate(paths):
        slots = visible_slots(tree, row)
        assert len(slots) == len(given_path) * block_size
        for index, slot in enumerate(slots):
            prefix = (*given_path[: index // block_size + 1], -index)
            assert places.setdefault(prefix, slot) == slot
    assert len(set(places.values())) == len(places) == tree.unique_tokens == tree.tokens.sum()
    # No needless nodes: a node with a single child has rows of its own only if they end inside it, never at its end.
    degrees = np.bincount(tree.parent[tree.parent >= 0], minlength=len(tree.parent))
    for node in tree.nodes:
        assert degrees[node.index] != 1 or node.tokens == 0, str(tree)


def test_from_paths_worked_example() -> None:
    """A path that ends inside another's run is a row inside that node; equal paths are rows that see the same."""
    tree = Tree.from_paths(["abcd", "ab", "abxy", "", "q", "abcd", "abc"])
    assert tree.parent.tolist() == [-1, -1, 1, 1, -1]
    assert tree.tokens.tolist() == [0, 2, 2, 2, 1]
    assert rows_of(tree) == [(2, 2), (1, 2), (3, 2), (0, 0), (4, 1), (2, 2), (2, 1)]


def test_from_paths_of_nested_prefixes_is_one_node() -> None:
    tree = Tree.from_paths([range(length) for length in (3, 5, 1, 0)], block_size=16)
    assert rows_of(tree)[:3] == [(int(tree.row_node[0]), sees) for sees in (48, 80, 16)]
    assert visible(tree).sum(1).tolist() == [48, 80, 16, 0]


@given(seed=st.integers(0, 10**6), prefix=st.integers(0, 5))
@examples(50)
def test_from_token_tree(seed: int, prefix: int) -> None:
    """1 + len(paths) rows; tokens lie behind the prefix in the given order, which may put children before parents."""
    source = random.Random(seed)
    paths: list[tuple[int, ...]] = [()]
    for _ in range(source.randrange(12)):
        above = source.choice(paths)
        paths.append((*above, sum(other[:-1] == above for other in paths if other)))
    listed = paths[1:]
    source.shuffle(listed)
    tree = Tree.from_token_tree(listed, prefix)
    assert tree.num_rows == 1 + len(listed)
    assert tree.positions().tolist() == [prefix + len(ranks) for ranks in [(), *listed]]
    slot = {(): prefix} | {ranks: prefix + 1 + index for index, ranks in enumerate(listed)}
    for row, ranks in enumerate([(), *listed]):
        own = [slot[ranks[:length]] for length in range(len(ranks) + 1)]
        assert tree.slots(row).tolist() == [*range(prefix), *own]


def test_from_networkx() -> None:
    graph = networkx.DiGraph([("trunk", "left"), ("trunk", "right")])
    graph.add_node("other")
    networkx.set_node_attributes(graph, {"trunk": 5, "left": 0, "right": 2, "other": 1}, "tokens")
    tree = Tree.from_networkx(graph)
    assert tree.parent.tolist() == [-1, 0, 0, -1]
    assert tree.tokens.tolist() == [5, 0, 2, 1]
    assert rows_of(tree) == [(1, 0), (2, 2), (3, 1)]
    graph.nodes["right"]["rows"] = [2, 1, 1]
    assert rows_of(Tree.from_networkx(graph)) == [(2, 2), (2, 1), (2, 1)]


@given(tree=forests(30, 20, kv=("default",)))
@examples(60)
def test_networkx_round_trip(tree: Tree) -> None:
    graph = tree.to_networkx()
    back = Tree.from_networkx(graph)
    assert networkx.is_forest(graph)
    assert back.parent.tolist() == tree.parent.tolist()
    assert back.tokens.tolist() == tree.tokens.tolist()
    assert sorted(rows_of(back)) == sorted(rows_of(tree))
    assert back.signature() == tree.signature()


# Text


@pytest.mark.parametrize(
    ("text", "parents", "tokens"),
    [
        ("7", [-1], [7]),
        ("0", [-1], [0]),
        ("5*3", [-1, -1, -1], [5, 5, 5]),
        ("1,2/100,10", [-1, 0, 0], [100, 10, 10]),
        ("1,2_100,10", [-1, 0, 0], [100, 10, 10]),
        ("1,2 100,10", [-1, 0, 0], [100, 10, 10]),
        ("2,3/4,5", [-1, -1, 0, 0, 1], [4, 4, 5, 5, 5]),
        ("3/4", [-1, -1, -1], [4, 4, 4]),
        ("4(3,2,1)", [-1, 0, 0, 0], [4, 3, 2, 1]),
        ("4(3(2(1)))", [-1, 0, 1, 2], [4, 3, 2, 1]),
        ("4(3(2,1),0)+9(8)", [-1, 0, 1, 1, 0, -1, 5], [4, 3, 2, 1, 0, 9, 8]),
        ("4(3(2*2)*2)", [-1, 0, 1, 1, 0, 4, 4], [4, 3, 2, 2, 3, 2, 2]),
        ("4(3*2,1)*2+5", [-1, 0, 0, 0, -1, 4, 4, 4, -1], [4, 3, 3, 1, 4, 3, 3, 1, 5]),
        (" 4 \n", [-1], [4]),
    ],
)
def test_parse(text: str, parents: list[int], tokens: list[int]) -> None:
    tree = Tree.parse(text)
    assert (tree.parent.tolist(), tree.tokens.tolist()) == (parents, tokens)
    leaves = [node for node in range(len(parents)) if node not in parents]
    assert rows_of(tree) == [(leaf, tokens[leaf]) for leaf in leaves]


def test_parse_of_the_design() -> None:
    tree = Tree.parse("4000(400(10*2)*10)")
    assert (len(tree.parent), tree.num_rows, tree.unique_tokens) == (31, 20, 4000 + 10 * 400 + 20 * 10)
    assert tree.text == "4000(400(10*2)*10)"


@given(tree=forests(40, 20, rows=("leaves",), kv=("default",)))
@examples(150)
def test_text_round_trip(tree: Tree) -> None:
    assert tree.text is not None
    back = Tree.parse(tree.text)
    assert back.signature() == tree.signature()
    if "/" not in tree.text:
        assert (back.parent.tolist(), back.tokens.tolist()) == numbered_in_preorder(tree)
    else:
        assert_same(back, tree)
    assert_same(Tree.parse(back.text or ""), back)


def test_text_is_the_level_form_where_it_is_exact() -> None:
    assert Tree.from_levels([1, 4, 16], [10, 5, 0]).text == "1,4,16/10,5,0"
    assert Tree.parse("10(5,5,6)").text == "10(5*2,6)"
    assert Tree.parse("10(5(1*2),5(1*2))").text == "10(5(1*2)*2)"


def test_text_is_none_unless_rows_are_the_default() -> None:
    assert Tree.from_parents([-1, 0], [3, 2], rows=[(1, 2)]).text == "1,1/3,2"
    for rows in ([(1, 1)], [(1, 2), (1, 2)], [(0, 3), (1, 2)], []):
        assert Tree.from_parents([-1, 0], [3, 2], rows=rows).text is None


def test_str_says_what_counts() -> None:
    assert str(Tree.parse("100(10,20)")) == "tree 100(10,20) | nodes 3, rows 2, unique tokens 130, path tokens 230"
    assert "custom rows" in str(Tree.from_parents([-1], [3], rows=[(0, 1)]))
    assert len(str(Tree.parse("+".join(map(str, range(500)))))) < 200


def test_node_list() -> None:
    """FastTree's text: the count, then 'parent id seqlen children'; nodes in any order."""
    parts = tree_text.parse_node_list("4\n-1 2 100 2\n2 0 7 0\n\n2 1 8 1\n1 3 9 0\n")
    tree = Tree.from_parents(*parts)
    assert (tree.parent.tolist(), tree.tokens.tolist()) == ([2, 2, -1, 1], [7, 8, 100, 9])
    assert rows_of(tree) == [(0, 7), (3, 9)]


def test_drawing() -> None:
    tree = Tree.parse("100(10(1*3),20*2)+7")
    assert tree_drawing.draw(tree) == "\n".join(
        [
            "100 tokens",
            "├─ 10 tokens",
            "│  └─ 1 token x3, 1 row",
            "└─ 20 tokens x2, 1 row",
            "7 tokens, 1 row",
        ]
    )
    assert (
        tree_drawing.draw(Tree.parse("+".join(map(str, range(50)))), most_lines=3).splitlines()[-1]
        == "... 47 more branches"
    )
    assert "2 rows see 1, 3" in tree_drawing.draw(Tree.from_parents([-1], [5], rows=[(0, 3), (0, 1)]))


# JSON


@given(tree=forests(40, 40))
@examples(150)
def test_json_round_trip(tree: Tree) -> None:
    back = Tree.from_json(tree.to_json())
    assert_same(back, tree)
    assert back.to_json() == tree.to_json()
    assert back.signature() == tree.signature()


def test_json_form() -> None:
    tree = Tree.from_parents([-1, 0], [3, 2], kv=[[5, 6, 9], [1, 2]])
    assert json.loads(tree.to_json()) == {
        "format": 1,
        "kind": "tree",
        "parents": [-1, 0],
        "tokens": [3, 2],
        "rows": [[1, 2]],
        "kv": [[[5, 2], [9, 1]], [[1, 2]]],
    }
    assert "kv" not in json.loads(Tree.parse("3(2)").to_json())
    short = Tree.from_json('{"format": 1, "parents": [-1, 0, 0], "tokens": [3, 2, 0]}')
    assert_same(short, Tree.parse("3(2,0)"))
    assert_same(
        Tree.from_json('{"format":1,"kind":"tree","parents":[-1],"tokens":[4],"rows":null,"kv":null}'), Tree.parse("4")
    )


def test_save_and_load(tmp_path: Path) -> None:
    tree = forest(nodes=30, most_tokens=20, seed=3, kv="slots", shuffled=True)
    tree.save(tmp_path / "tree.json")
    assert_same(Tree.load(tmp_path / "tree.json"), tree)
    assert_same(Tree.load(str(tmp_path / "tree.json")), tree)


# What rows see, against plain loops


@pytest.mark.parametrize("rows", ROW_STYLES)
@given(data=st.data())
@examples(40)
def test_positions_and_slots(rows: str, data: st.DataObject) -> None:
    tree = data.draw(forests(rows=(rows,), salt=ROW_STYLES.index(rows)))
    expected = [visible_slots(tree, row) for row in range(tree.num_rows)]
    assert [tree.slots(row).tolist() for row in range(tree.num_rows)] == expected
    assert tree.positions().tolist() == [len(slots) - 1 for slots in expected]
    assert tree.path_tokens == sum(map(len, expected))
    assert tree.unique_tokens == visible(tree).any(0).sum()


@pytest.mark.parametrize("rows", ROW_STYLES)
@given(data=st.data())
@examples(40)
def test_ranks_and_spans(rows: str, data: st.DataObject) -> None:
    """Rows that see a token are one interval of ranks; spans are the maximal runs of equally seen tokens."""
    tree = data.draw(forests(rows=(rows,), salt=100 + ROW_STYLES.index(rows)))
    topology = tree.topology
    order = preorder(tree)
    ranked = ranked_rows(tree)
    assert topology.row_of_rank.tolist() == ranked
    assert topology.nodes_in_preorder.tolist() == order
    assert topology.preorder[order].tolist() == list(range(len(order)))

    first = [0, *itertools.accumulate(tree.tokens.tolist())]
    sees = visible(tree)[ranked]
    spans = []
    for node in order:
        previous = None
        for token in range(tree.tokens[node]):
            ranks = np.flatnonzero(sees[:, first[node] + token])
            if len(ranks):
                interval = (int(ranks[0]), int(ranks[-1]) + 1)
                assert interval[1] - interval[0] == len(ranks)
                if interval == previous:
                    spans[-1][2] = token + 1
                else:
                    spans.append([node, token, token + 1, *interval])
                previous = interval
    found = [getattr(topology.spans, name).tolist() for name in ("node", "start", "stop", "lo", "hi")]
    assert list(map(list, zip(*found, strict=True))) == spans
    assert topology.spans.lengths.sum() == tree.unique_tokens


@given(tree=forests())
@examples(60)
def test_depth_prefix_and_subtrees(tree: Tree) -> None:
    topology = tree.topology
    row_nodes = [int(tree.row_node[row]) for row in ranked_rows(tree)]
    below: list[set[int]] = [set() for _ in tree.tokens]
    for node in range(len(tree.tokens)):
        above, depth, tokens = node, -1, -int(tree.tokens[node])
        while above >= 0:
            below[above].add(node)
            depth, tokens, above = depth + 1, tokens + int(tree.tokens[above]), int(tree.parent[above])
        assert (topology.depth[node], topology.prefix[node]) == (depth, tokens)
    for node, nodes in enumerate(below):
        assert topology.subtree[node] == len(nodes)
        lo, own, hi = (int(ranks[node]) for ranks in (topology.rank_lo, topology.rank_own, topology.rank_hi))
        assert all(row_node == node for row_node in row_nodes[lo:own])
        assert all(row_node in nodes - {node} for row_node in row_nodes[own:hi])
        assert hi - lo == sum(row_node in nodes for row_node in row_nodes)


@given(tree=forests(20))
@examples(30)
def test_node_objects(tree: Tree) -> None:
    assert [node.index for node in tree.nodes] == list(range(len(tree.parent)))
    assert [(node.parent, node.tokens) for node in tree.nodes] == list(
        zip(tree.parent.tolist(), tree.tokens.tolist(), strict=True)
    )
    attached = [(row, node.index, sees) for node in tree.nodes for row, sees in node.rows]
    assert sorted(attached) == [(row, node, sees) for row, (node, sees) in enumerate(rows_of(tree))]


def test_a_tree_cannot_be_changed() -> None:
    tokens = np.array([3, 2])
    tree = Tree.from_parents([-1, 0], tokens)
    tokens[0] = 99
    assert tree.tokens.tolist() == [3, 2]
    for array in (
        tree.parent,
        tree.tokens,
        tree.row_node,
        tree.row_sees,
        tree.kv.start,
        tree.topology.spans.lo,
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        assert array.dtype == np.int32
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.tokens = tokens


# Signature

Canonical = tuple[object, ...]


def canonical(tree: Tree) -> Canonical:
    """Tokens, sees of the own rows, and children, each sorted; by plain recursion."""

    def of(node: int) -> Canonical:
        sees = sorted(int(tree.row_sees[row]) for row in range(tree.num_rows) if tree.row_node[row] == node)
        children = [of(child) for child in range(len(tree.parent)) if tree.parent[child] == node]
        return (int(tree.tokens[node]), tuple(sees), tuple(sorted(children)))

    return tuple(sorted(of(node) for node in range(len(tree.parent)) if tree.parent[node] < 0))


@given(tree=forests(30), seed=st.integers(0, 10**6))
@examples(80)
def test_signature_ignores_sibling_order_row_order_and_kv(tree: Tree, seed: int) -> None:
    source = random.Random(seed)
    number = source.sample(range(len(tree.parent)), len(tree.parent))
    order = np.argsort(number)
    parents = [-1 if tree.parent[old] < 0 else number[tree.parent[old]] for old in order]
    rows = [(number[node], sees) for node, sees in rows_of(tree)]
    source.shuffle(rows)
    other = Tree.from_parents(parents, tree.tokens[order], rows)
    assert other.signature() == tree.signature()
    assert len(tree.signature()) == 32


@given(first=forests(4, 2, salt=1), second=forests(4, 2, salt=2))
@examples(300)
def test_signatures_are_equal_for_equal_topologies_only(first: Tree, second: Tree) -> None:
    """Trees of a few nodes with up to two tokens, so that equal ones do occur."""
    assert (first.signature() == second.signature()) == (canonical(first) == canonical(second))


@given(tree=forests(30), seed=st.integers(0, 10**6))
@examples(80)
def test_signature_sees_every_change(tree: Tree, seed: int) -> None:
    source = random.Random(seed)
    node = source.randrange(len(tree.tokens))
    tokens = tree.tokens.copy()
    tokens[node] += 1
    rows = rows_of(tree)
    changed = [
        Tree.from_parents(tree.parent, tokens, rows),
        Tree.from_parents(tree.parent, tree.tokens, [*rows, (node, int(tree.tokens[node]))]),
        Tree.from_parents([*tree.parent, node], [*tree.tokens, 0], rows),
    ]
    if rows:
        changed.append(Tree.from_parents(tree.parent, tree.tokens, rows[:-1]))
    signatures = {other.signature() for other in changed}
    assert tree.signature() not in signatures


def test_signature_is_stable() -> None:
    """A changed digest makes every cached decision a miss: change it knowingly."""
    tree = Tree.from_parents([-1, 0, 0, -1], [100, 10, 0, 7], rows=[(1, 10), (1, 4), (2, 0), (0, 50)])
    assert tree.signature() == "97224affe65978db12cdd4e4450626ef"


# Size


CHAIN = 10_000


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_chain_of_10000_nodes(shuffled: bool) -> None:
    order = random.Random(1).sample(range(CHAIN), CHAIN) if shuffled else list(range(CHAIN))
    parents = [0] * CHAIN
    for index, node in enumerate(order):
        parents[node] = order[index - 1] if index else -1
    with at_most(2.0):
        tree = Tree.from_parents(parents, [1] * CHAIN)
        tree.signature()
        back = Tree.from_json(tree.to_json())
    assert rows_of(tree) == [(order[-1], 1)]
    assert tree.positions().tolist() == [CHAIN - 1]
    assert tree.slots(0).tolist() == order
    assert len(tree.topology.spans) == CHAIN
    assert_same(back, tree)
    with at_most(10.0):
        assert tree.text is not None
        assert Tree.parse(tree.text).signature() == tree.signature()
        assert len(tree_drawing.draw(tree).splitlines()) == 41


def test_a_root_of_10000_leaves() -> None:
    lengths = [7, *(leaf % 3 for leaf in range(CHAIN))]
    with at_most(2.0):
        tree = Tree.from_parents([-1] + [0] * CHAIN, lengths)
        tree.signature()
        back = Tree.from_json(tree.to_json())
    assert tree.positions().tolist() == [6 + length for length in lengths[1:]]
    assert tree.topology.rank_hi[0] == CHAIN
    assert_same(back, tree)
    with at_most(2.0):
        assert tree.text is not None
        assert_same(Tree.parse(tree.text), tree)


def test_10000_roots() -> None:
    with at_most(2.0):
        tree = Tree.parse(f"3*{CHAIN}")
        assert (tree.num_rows, tree.unique_tokens, tree.text) == (CHAIN, 3 * CHAIN, f"{CHAIN}/3")


# KV locations


def test_contiguous_runs() -> None:
    runs = KVRuns.contiguous(np.array([3, 0, 2]))
    assert (runs.indptr.tolist(), runs.start.tolist(), runs.length.tolist()) == ([0, 1, 1, 2], [0, 3], [3, 2])
    assert runs.last_slot == 4
    assert [runs.slots(node).tolist() for node in range(3)] == [[0, 1, 2], [], [3, 4]]
    assert KVRuns.contiguous(np.array([0, 0])).last_slot == -1


def test_runs_from_slots() -> None:
    runs = KVRuns.from_slots(np.array([5, 0, 2]), [[4, 5, 6, 3, 2], [], [3, 4]])
    assert (runs.start.tolist(), runs.length.tolist()) == ([4, 3, 2, 3], [3, 1, 1, 2])
    assert runs.indptr.tolist() == [0, 3, 3, 4]
    assert runs.last_slot == 6


def test_runs_from_pages() -> None:
    """Token t is in page t // 16 of its node; the last page may be partly filled, neighbouring pages are one run."""
    runs = KVRuns.from_pages(np.array([40, 16, 0, 5]), [[2, 3, 0], [1], [], [4]], 16)
    assert (runs.start.tolist(), runs.length.tolist()) == ([32, 0, 16, 64], [32, 8, 16, 5])
    assert runs.indptr.tolist() == [0, 2, 3, 3, 4]
    assert runs.last_slot == 68


def test_runs_from_runs() -> None:
    runs = KVRuns.from_runs(np.array([6, 0, 4]), [[(0, 2), (2, 3), (9, 1)], [], [(10, 4)]])
    assert (runs.indptr.tolist(), runs.start.tolist(), runs.length.tolist()) == ([0, 2, 2, 3], [0, 9, 10], [5, 1, 4])


@given(
    tokens=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    page_size=st.integers(1, 16),
    seed=st.integers(0, 10**6),
)
@examples(100)
def test_pages_slots_and_runs_agree(tokens: list[int], page_size: int, seed: int) -> None:
    counts = [-(-count // page_size) for count in tokens]
    free = iter(random.Random(seed).sample(range(sum(counts) + 2), sum(counts)))
    pages = [[next(free) for _ in range(count)] for count in counts]
    slots = [
        [node_pages[t // page_size] * page_size + t % page_size for t in range(count)]
        for node_pages, count in zip(pages, tokens, strict=True)
    ]
    array = np.array(tokens)
    single = [[(slot, 1) for slot in node_slots] for node_slots in slots]
    made = [
        KVRuns.from_pages(array, pages, page_size),
        KVRuns.from_slots(array, slots),
        KVRuns.from_runs(array, single),
    ]
    for runs in made:
        assert [runs.slots(node).tolist() for node in range(len(tokens))] == slots
        assert runs.last_slot == max((slot for node_slots in slots for slot in node_slots), default=-1)
        for node in range(len(tokens)):  # runs are never empty, and never continue the one before
            own = range(runs.indptr[node], runs.indptr[node + 1])
            assert all(runs.length[run] > 0 for run in own)
            assert all(runs.start[run] != runs.start[run - 1] + runs.length[run - 1] for run in own[1:])


def test_kv_moves_without_the_topology() -> None:
    tree = Tree.parse("3(2,1)")
    moved = tree.with_kv([[9, 8, 7], [0, 1], [5]])
    assert moved.slots(0).tolist() == [9, 8, 7, 0, 1]
    assert moved.slots(1).tolist() == [9, 8, 7, 5]
    assert tree.slots(0).tolist() == [0, 1, 2, 3, 4]
    assert moved.signature() == tree.signature()
    assert moved.kv.last_slot == 9
    same = Tree.from_parents([-1, 0, 0], [3, 2, 1], kv=KVRuns.from_slots(tree.tokens, [[9, 8, 7], [0, 1], [5]]))
    assert_same(same, moved)


@pytest.mark.parametrize("give", ["from_parents", "with_kv"])
def test_kv_of_another_tree_is_rejected(give: str) -> None:
    runs = KVRuns.contiguous(np.array([2, 3]))
    give_kv = partial(Tree.from_parents, [-1, 0], [3, 3]) if give == "from_parents" else Tree.parse("3(3)").with_kv
    with pytest.raises(TreeError, match="kv"):
        give_kv(kv=runs)


def test_paths_are_walked_up() -> None:
    """The oracle of these tests, on a tree small enough to see."""
    tree = Tree.from_parents([1, -1, 0], [4, 5, 6], rows=[(2, 3), (0, 0)])
    assert list(path(tree, 0)) == [(2, 3), (0, 4), (1, 5)]
    assert visible(tree).astype(int).tolist() == [
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert ranked_rows(tree) == [1, 0]


@pytest.mark.parametrize("end", [1, 300, 1 << 16, (1 << 16) + 1, 1 << 31])
def test_small_numbers_are_sorted_by_radix_as_others_are(end: int) -> None:
    numbers = np.random.default_rng(0).integers(max(0, end - 50), end, 500)
    assert np.array_equal(stable_order(numbers, end), numbers.argsort(kind="stable"))
