"""Buckets of trees: readable, blind to the order of siblings and to KV, defined for every tree, cheap."""

import math
import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.call_counts import calls
from support.forests import examples, forests, path, visible
from treegen import KVRuns, Tree
from treegen.search.bucket import policy_bucket


@pytest.mark.parametrize(
    ("tree", "bucket"),
    [
        (Tree.from_levels([1, 256], [256, 32]), "rows 2^8, levels 2, tokens 2^13, sharing 2^3, private 2^5"),
        (Tree.from_levels([1, 4, 16], [100, 10, 0]), "rows 2^4, levels 2, tokens 2^7, sharing 2^3.5, private 0"),
        (Tree.from_levels([1], [1]), "rows 2^0, levels 1, tokens 2^0, sharing 2^0, private 2^0"),
        (Tree.from_levels([1, 8], [8, 0]), "rows 2^3, levels 1, tokens 2^3, sharing 2^3, private 0"),
        (Tree.from_parents([-1], [9], []), "rows 0, levels 0, tokens 0, sharing 0, private 0"),
        (Tree.from_parents([-1], [9], [(0, 0)]), "rows 2^0, levels 0, tokens 0, sharing 0, private 0"),
        # One private token of three rows counts as a power of 0, not of less.
        (
            Tree.from_parents([-1], [9], [(0, 8), (0, 8), (0, 9)]),
            "rows 2^2, levels 1, tokens 2^3, sharing 2^1.5, private 2^0",
        ),
        (Tree.from_parents(range(-1, 7), [1] * 8), "rows 2^0, levels 8, tokens 2^3, sharing 2^0, private 2^3"),
        (Tree.from_parents(range(-1, 19), [1] * 20), "rows 2^0, levels 2^4, tokens 2^4, sharing 2^0, private 2^4"),
    ],
)
def test_text(tree: Tree, bucket: str) -> None:
    assert policy_bucket(tree) == bucket


@examples(150)
@given(tree=forests(), seed=st.integers(0, 2**20))
def test_sibling_order_row_order_and_kv_do_not_matter(tree: Tree, seed: int) -> None:
    source = random.Random(seed)
    number = list(range(len(tree.tokens)))
    source.shuffle(number)
    order = sorted(range(len(number)), key=number.__getitem__)
    parents = [number[p] if (p := int(tree.parent[old])) >= 0 else -1 for old in order]
    rows = [(number[n], s) for n, s in zip(tree.row_node.tolist(), tree.row_sees.tolist(), strict=True)]
    source.shuffle(rows)
    tokens = tree.tokens[order]
    first = source.randrange(1000)
    kv = KVRuns.from_slots(tokens, [[first + 10_000 * v + i for i in range(n)] for v, n in enumerate(tokens.tolist())])
    assert policy_bucket(Tree.from_parents(parents, tokens, rows, kv)) == policy_bucket(tree)


@examples(150)
@given(tree=forests(salt=1))
def test_every_number_is_that_of_the_visible_tokens(tree: Tree) -> None:
    seen = visible(tree).sum(axis=0) if tree.num_rows else np.zeros(1)
    depth = {-1: -1}
    for _ in range(len(tree.parent)):  # parents may come later than their children
        depth.update({v: depth[p] + 1 for v, p in enumerate(tree.parent.tolist()) if p in depth})
    seen_nodes = {node for row in range(tree.num_rows) for node, sees in path(tree, row) if sees}
    unique, private = np.count_nonzero(seen), np.count_nonzero(seen == 1)
    expected = {
        "rows": tree.num_rows,
        "levels": max((depth[node] + 1 for node in seen_nodes), default=0),
        "tokens": unique,
        "sharing": seen.sum() / unique if unique else 0,
        "private": max(private / tree.num_rows, 1) if private else 0,
    }
    parts = dict(part.split(" ") for part in policy_bucket(tree).split(", "))
    assert list(parts) == list(expected)
    for name, text in parts.items():
        base, _, power = text.partition("^")
        if not power:
            assert int(base) == expected[name]
        else:
            assert abs(math.log2(expected[name]) - float(power)) <= (0.25 if name == "sharing" else 0.5)


def test_coarse_but_not_blind() -> None:
    base = policy_bucket(Tree.from_levels([1, 256], [256, 32]))
    assert policy_bucket(Tree.from_levels([1, 256], [257, 33])) == base
    for other in ([1, 64], [256, 32]), ([1, 256], [2560, 32]), ([1, 256], [256, 128]), ([1, 2, 256], [256, 0, 32]):
        assert policy_bucket(Tree.from_levels(*other)) != base


def test_few_operations_for_any_tree() -> None:
    few, many = (calls(partial(policy_bucket, Tree.from_levels([1, rows], [256, 32]))) for rows in (8, 4096))
    assert few == many < 80
