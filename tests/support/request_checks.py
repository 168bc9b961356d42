"""Trees by request against requests that are plain lists of tokens."""

from __future__ import annotations

import itertools

import numpy as np

from treegen import Shape, Tree
from treegen.ir.tree.request_kv import RequestKV
from treegen.ir.tree.topology import derive
from treegen.ir.verify import verify
from treegen.strategies import cohort
from treegen.target.problem import Problem
from treegen.target.targets import target_from

SHAPE, TARGET = Shape(8, 2, 128), target_from(None)

Tokens = dict[int, list[int]]
"""The tokens of every running request, by seat."""
Pairs = dict[tuple[int, int], int]
"""How many tokens every two requests share, by their seats."""


def by_request(tree: Tree) -> RequestKV:
    assert tree.requests is not None
    return tree.requests


def common(first: list[int], second: list[int]) -> int:
    """How many tokens two requests begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))


def nodes_of(tree: Tree, row: int) -> list[int]:
    """The nodes that a row sees, root first."""
    nodes = [int(tree.row_node[row])]
    while (node := int(tree.parent[nodes[0]])) >= 0:
        nodes.insert(0, node)
    return nodes


def pairs_of(tree: Tree) -> Pairs:
    """What every two requests share according to the tree."""
    seats = by_request(tree).seat.tolist()
    paths = [nodes_of(tree, row) for row in range(len(seats))]
    return {
        (seats[i], seats[j]): sum(int(tree.tokens[node]) for node in paths[i][: common(paths[i], paths[j])])
        for i, j in itertools.permutations(range(len(seats)), 2)
    }


def check_topology(tree: Tree) -> None:
    """Nodes are in depth-first order, and what follows from them is what follows from those of any order."""
    found, expected = tree.topology, derive(tree.parent, tree.tokens, tree.row_node, tree.row_sees)
    for name in ("preorder", "row_of_rank", "rank_lo", "rank_own", "rank_hi"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    np.testing.assert_array_equal(found.spans.table, expected.spans.table)
    np.testing.assert_array_equal(found.preorder, np.arange(len(tree.parent)))
    tree.kv.check_fits(tree.tokens)


def check(tree: Tree, tokens: Tokens) -> None:
    """The tree says of each of these requests what its tokens are, and shares only what is the same."""
    where = by_request(tree)
    seats = where.seat.tolist()
    assert sorted(seats) == sorted(tokens)
    assert where.length.tolist() == [len(tokens[seat]) for seat in seats]
    assert not (where.first % where.page_size).any()
    assert where.open.sum() == len(seats)
    for row, seat in enumerate(seats):
        assert tree.row_sees[row] == tree.tokens[tree.row_node[row]]
        nodes = nodes_of(tree, row)
        assert [bool(where.open[node]) for node in nodes] == [False] * (len(nodes) - 1) + [True]
        assert where.owner[nodes[-1]] == seat
        path: list[int] = []
        for node in nodes:
            own, first, count = tokens[int(where.owner[node])], int(where.first[node]), int(tree.tokens[node])
            assert first == len(path)
            if where.open[node]:
                assert count == max(1, len(own) - first)
                path += own[first:]
            else:
                assert 0 < count == len(own[first : first + count])
                path += own[first : first + count]
        assert path == tokens[seat]
        shared, other = int(where.shared_tokens[row]), int(where.shared_with[row])
        assert shared % where.page_size == 0
        assert (shared > 0) == (other >= 0)
        if shared:
            assert shared <= common(tokens[seat], tokens[other])
            assert where.shared_tokens[seats.index(other)] < shared
    check_claims(where, tokens)
    check_topology(tree)
    verify(cohort(64).plan(Problem(tree, SHAPE, TARGET)), tree)


def check_claims(where: RequestKV, tokens: Tokens) -> None:
    """Claims divide the shared pages of each row among owners whose own they are, with the same tokens."""
    indptr, owner, first, end = (array.tolist() for array in where.claims())
    begin = dict(zip(where.seat.tolist(), where.shared_tokens.tolist(), strict=True))
    assert len(indptr) == len(where.seat) + 1
    assert indptr[0] == 0
    assert indptr[-1] == len(owner) == len(first) == len(end)
    for row, seat in enumerate(where.seat.tolist()):
        page = 0
        for claim in range(indptr[row], indptr[row + 1]):
            assert first[claim] == page < end[claim]
            assert begin[owner[claim]] <= page * where.page_size
            part = slice(page * where.page_size, end[claim] * where.page_size)
            assert tokens[seat][part] == tokens[owner[claim]][part]
            page = end[claim]
        assert page * where.page_size == where.shared_tokens[row]
