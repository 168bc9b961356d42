"""Edits of trees: what every row sees afterwards, by the plain oracles of forests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.forests import examples, forests, path, token_slots, visible_slots
from treegen import Tree
from treegen.ir.errors import TreeError
from treegen.ir.tree.topology import derive


def seen(tree: Tree) -> list[list[int]]:
    return [visible_slots(tree, row) for row in range(tree.num_rows)]


def check(tree: Tree) -> None:
    """The tree's derived parts are those of its own parts."""
    tree.kv.check_fits(tree.tokens)
    expected = derive(tree.parent, tree.tokens, tree.row_node, tree.row_sees)
    for field in fields(expected):
        found, wanted = getattr(tree.topology, field.name), getattr(expected, field.name)
        if field.name != "spans":
            assert np.array_equal(found, wanted), field.name
    for name in ("node", "start", "stop", "lo", "hi"):
        assert np.array_equal(getattr(tree.topology.spans, name), getattr(expected.spans, name)), name
    for node in range(len(tree.tokens)):
        runs = slice(tree.kv.indptr[node], tree.kv.indptr[node + 1])
        start, length = tree.kv.start[runs], tree.kv.length[runs]
        assert (length > 0).all()
        assert (start[1:] != start[:-1] + length[:-1]).all()


@examples(200)
@given(tree=forests(12, 30, salt=71), seed=st.integers(0, 2**16), tokens=st.integers(1, 3), everyone=st.booleans())
def test_appended_rows_see_their_new_tokens_and_others_nothing_new(
    tree: Tree, seed: int, tokens: int, everyone: bool
) -> None:
    source = random.Random(seed)
    rows = source.sample(range(tree.num_rows), tree.num_rows if everyone else source.randint(0, tree.num_rows))
    first = tree.kv.last_slot + 1
    slots = np.array(source.sample(range(first, first + 200), len(rows) * tokens)).reshape(len(rows), tokens)
    before, runs = seen(tree), token_slots(tree)
    grown = tree.appended(rows, tokens, slots.astype(int))
    check(grown)
    assert seen(tree) == before
    for row, place in zip(rows, slots.tolist(), strict=True):
        before[row] += [int(slot) for slot in place]
    assert seen(grown) == before
    # No row's path has a part that another lost: nodes hold what they held, in as many nodes and those of new tokens.
    assert sorted(slot for own in token_slots(grown) for slot in own) == sorted(
        [slot for own in runs for slot in own] + slots.ravel().astype(int).tolist()
    )
    assert len(grown.tokens) <= len(tree.tokens) + 2 * len(rows)


@examples(60)
@given(tree=forests(12, 30, salt=72), seed=st.integers(0, 2**16))
def test_rows_that_grow_twice_make_their_own_node_longer(tree: Tree, seed: int) -> None:
    source = random.Random(seed)
    rows = source.sample(range(tree.num_rows), source.randint(0, tree.num_rows))
    first = tree.kv.last_slot + 1
    once = tree.appended(rows, slots=[first + 10 * index for index in range(len(rows))])
    twice = once.appended(rows, 3)
    check(twice)
    assert len(twice.tokens) == len(once.tokens)
    assert len(twice.kv.start) == len(once.kv.start)
    for index, row in enumerate(rows):
        assert visible_slots(twice, row)[-4:] == [first + 10 * index + step for step in range(4)]
        (node, sees), *_ = path(twice, row)
        assert sees == twice.tokens[node]


@examples(60)
@given(tree=forests(12, 30, salt=73), seed=st.integers(0, 2**16))
def test_appended_at_once_is_appended_token_by_token(tree: Tree, seed: int) -> None:
    assume(tree.num_rows)
    source = random.Random(seed)
    rows = source.sample(range(tree.num_rows), source.randint(1, tree.num_rows))
    slots = tree.kv.last_slot + 1 + np.array(source.sample(range(4 * tree.num_rows + 9), 4 * len(rows))).reshape(-1, 4)
    step_by_step = tree
    for step in range(4):
        step_by_step = step_by_step.appended(rows, slots=slots[:, step])
    at_once = tree.appended(rows, 4, slots)
    assert step_by_step.to_json() == at_once.to_json()


@examples(100)
@given(tree=forests(12, 30, salt=74), seed=st.integers(0, 2**16), copies=st.integers(1, 4))
def test_branched_rows_see_the_same(tree: Tree, seed: int, copies: int) -> None:
    assume(tree.num_rows)
    row = random.Random(seed).randrange(tree.num_rows)
    before = seen(tree)
    made = tree.branched(row, copies)
    check(made)
    assert seen(made) == before + [before[row]] * (copies - 1)
    assert np.array_equal(made.tokens, tree.tokens)


@examples(100)
@given(tree=forests(12, 30, salt=75), seed=st.integers(0, 2**16))
def test_pruned_trees_have_the_other_rows_and_their_nodes(tree: Tree, seed: int) -> None:
    source = random.Random(seed)
    rows = source.sample(range(tree.num_rows), source.randint(0, tree.num_rows))
    left = tree.pruned(rows)
    check(left)
    kept = [row for row in range(tree.num_rows) if row not in rows]
    assert seen(left) == [visible_slots(tree, row) for row in kept]
    nodes = {node for row in kept for node, _ in path(tree, row)}
    if kept:
        held = token_slots(tree)
        assert token_slots(left) == [held[node] for node in sorted(nodes)]
    else:
        assert (left.tokens.tolist(), left.parent.tolist()) == ([0], [-1])


def test_a_row_inside_its_node_cuts_it() -> None:
    tree = Tree.from_parents([-1, 0], [10, 4], rows=[(0, 3), (0, 6), (1, 4), (0, 10)])
    grown = tree.appended([1, 0], slots=[100, 200])
    assert grown.tokens.tolist() == [3, 4, 3, 4, 1, 1]
    assert grown.parent.tolist() == [-1, 3, 0, 2, 2, 0]
    assert grown.row_node.tolist() == [5, 4, 1, 3]
    assert grown.row_sees.tolist() == [1, 1, 4, 4]


def test_a_row_that_sees_nothing_of_its_node_grows_beside_it() -> None:
    tree = Tree.from_parents([-1, 0], [5, 3], rows=[(1, 0), (0, 0)])
    grown = tree.appended(slots=[90, 91])
    assert grown.tokens.tolist() == [5, 3, 1, 1]
    assert grown.parent.tolist() == [-1, 0, 0, -1]


def test_the_slots_behind_a_row_are_taken_by_default() -> None:
    tree = Tree.from_parents([-1, 0, 0], [5, 3, 0], kv=[range(5), range(10, 13), []])
    grown = tree.appended([0], 2)
    assert grown.slots(0).tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert tree.appended([1], 5).slots(1).tolist() == list(range(10))  # the node is empty: behind its parent's last


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tree: tree.appended(), r"row 0 would go on in slots 13:14, where other tokens are"),
        (lambda tree: tree.appended([1], 2**31), r"tokens = 2147483648: exceeds 2147483647"),
        (
            lambda tree: Tree.from_parents([-1], [1], kv=[[2**31 - 3]]).appended(None, 2),
            r"row 0 would go on in slots 2147483646:2147483648",
        ),
        (lambda tree: tree.branched(1, 2).appended([1, 2]), r"rows 1 and 2 would both go on in slot 16"),
        (lambda tree: tree.appended([2]), r"rows\[0\] = 2: is outside 0..1"),
        (lambda tree: tree.appended([1, 1]), r"names row 1 twice"),
        (lambda tree: tree.appended([1], 0), r"tokens = 0"),
        (lambda tree: tree.appended([0, 1], 2, [5, 6]), r"slots = shape \(2,\): does not match 2 rows of 2"),
        (lambda tree: tree.appended([0, 1], slots=[5, -6]), r"slots\[1\] = -6"),
        (lambda tree: tree.appended([0, 1], slots=[5, 0.5]), r"is not an integer"),
        (lambda tree: tree.appended([0, 1], slots=[[5], [6, 7]]), r"slots = "),
        (lambda tree: tree.appended(slots=[20, 20]), r"slots = \[20, 20\]: names slot 20 twice; give every new token"),
        (lambda tree: tree.appended([1], 3, [[20, 21, 20]]), r"names slot 20 twice"),
        (lambda tree: tree.appended(slots=[20, 9]), r"slots = \[20, 9\]: slot 9 holds another token of the tree; give"),
        (lambda tree: tree.appended([0], slots=[15]), r"slot 15 holds another token"),
        (lambda tree: tree.appended([0], 2, [[16, 0]]), r"slot 0 holds another token"),
        (lambda tree: tree.branched(2, 2), r"row\[0\] = 2"),
        (lambda tree: tree.branched(0, 0), r"copies = 0"),
        (lambda tree: tree.pruned([0, 0]), r"names row 0 twice"),
        (lambda tree: tree.pruned([-1]), r"rows\[0\] = -1"),
        (lambda tree: Tree.from_parents([-1], [0]).appended(), r"row 0 sees no token"),
    ],
)
def test_impossible_edits_are_refused(edit: Callable[[Tree], Tree], words: str) -> None:
    with pytest.raises(TreeError, match=words):
        edit(Tree.parse("1,2/10,3"))


def test_rows_to_prune_are_named() -> None:
    with pytest.raises(TreeError, match="rows = None: names no rows; give the rows to end"):
        Tree.parse("4(2,2)").pruned(None)  # type: ignore[arg-type]
