"""Signatures of trees: equal for equal topologies, and for no others."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, forests
from support.same_trees import rows_of
from treegen import Tree

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
