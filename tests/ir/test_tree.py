"""Tree: its constructors, and that it cannot be changed."""

from __future__ import annotations

import dataclasses
import itertools
import random

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, forests, visible, visible_slots
from support.same_trees import rows_of
from treegen import Tree


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
