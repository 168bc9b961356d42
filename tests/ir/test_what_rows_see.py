"""What rows see, against plain loops: positions, slots, ranks, spans and depths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import ROW_STYLES, examples, forests, path, preorder, ranked_rows, visible, visible_slots
from support.same_trees import rows_of
from treegen import Tree
from treegen.ir.arrays import stable_order


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
