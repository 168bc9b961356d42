"""Trees of 10,000 nodes, in a chain or beside one another, are made in seconds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.same_trees import assert_same, rows_of
from treegen import Tree
from treegen.ir.tree import tree_drawing


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fails when the body takes longer; bounds are about ten times what a slow core needs."""
    begin = time.process_time()
    yield
    assert time.process_time() - begin < seconds


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
