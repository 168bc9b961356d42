"""Drawings as data: boxes of nodes and groups, and how they are folded where they are too small to see."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import forests
from treegen import Tree
from treegen.ir.shape import DEFAULT_SHAPE
from treegen.report.page.drawn_marks import Boxes, fold
from treegen.report.page.tree_marks import MOST_MARKS, TreeMarks


def boxes_of(columns: list[list[int]]) -> Boxes:
    return Boxes(*np.array(columns, np.int64))


def test_few_boxes_keep_their_marks() -> None:
    boxes = boxes_of([[0, 4, 4], [4, 6, 9], [0, 0, 1], [2, 1, 2]])
    folding = fold(boxes, 3)
    assert folding.mark.tolist() == [0, 1, 2]
    assert folding.boxes.tolist() == [1, 1, 1]
    assert [column.tolist() for column in folding.bounds] == [column.tolist() for column in boxes]


@given(st.data(), st.integers(1, 40))
def test_folding_keeps_every_box_inside_of_its_mark(data: st.DataObject, most: int) -> None:
    numbers = st.lists(st.tuples(*[st.integers(0, 5000)] * 2, *[st.integers(1, 3000)] * 2), min_size=1, max_size=60)
    start, lo, width, height = np.array(data.draw(numbers), np.int64).T
    boxes = Boxes(start, start + width, lo, lo + height)
    mark, first, bounds, number = fold(boxes, most)
    assert len(first) <= most
    assert (np.diff(first) > 0).all()
    assert mark[first].tolist() == list(range(len(first)))
    assert number.sum() == len(start)
    for name in ("start", "lo"):
        inside = getattr(boxes, name)
        assert (getattr(bounds, name)[mark] <= inside).all()
        assert getattr(bounds, name).tolist() == [inside[mark == each].min() for each in range(len(first))]
    for name in ("stop", "hi"):
        inside = getattr(boxes, name)
        assert getattr(bounds, name).tolist() == [inside[mark == each].max() for each in range(len(first))]


def test_drawing_of_a_small_tree() -> None:
    tree = Tree.from_parents([-1, 0, 0, 1], [10, 0, 5, 7], rows=[(2, 5), (3, 7), (2, 3)])
    drawing = TreeMarks.of(tree).to_object(DEFAULT_SHAPE)
    marks = drawing.pop("marks")
    assert drawing == {"tokens": 17, "rows": 3, "kv_token_bytes": DEFAULT_SHAPE.kv_token_bytes, "hidden_tokens": 0}
    # Node 1 has no tokens, so node 3 extends node 0. Rows end inside of node 2, which is two marks.
    assert marks == {
        "node": [0, 3, 2, 2],
        "nodes": [1, 1, 1, 1],
        "parent": [-1, 0, 0, 2],
        "start": [0, 10, 10, 13],
        "stop": [10, 17, 13, 15],
        "lo": [0, 0, 1, 2],
        "hi": [3, 1, 3, 3],
        "tokens": [10, 7, 3, 2],
    }


@pytest.mark.parametrize(
    "tree",
    [
        Tree.from_levels([1, 200_000], [10, 5]),
        Tree.from_parents(np.arange(-1, 199_999), np.ones(200_000, int)),
        Tree.from_levels([1, 500, 200_000], [1000, 50, 5]),
    ],
    ids=["flat", "chain", "levels"],
)
def test_drawing_of_a_large_tree_is_small(tree: Tree) -> None:
    drawing = TreeMarks.of(tree).to_object(DEFAULT_SHAPE)
    marks = drawing["marks"]
    assert len(marks["node"]) <= MOST_MARKS
    assert len(json.dumps(drawing)) < 600_000
    assert sum(marks["nodes"]) == len(tree.parent)
    assert sum(marks["tokens"]) == tree.unique_tokens
    assert max(marks["nodes"]) > 1
    assert all(parent < index for index, parent in enumerate(marks["parent"]))


@pytest.mark.parametrize("parents", [[-1], [-1, -1, 0]])
def test_trees_without_tokens_have_no_marks(parents: list[int]) -> None:
    drawing = TreeMarks.of(Tree.from_parents(parents, [0] * len(parents))).to_object(DEFAULT_SHAPE)
    assert drawing["tokens"] == 0
    assert drawing["marks"]["node"] == []


@given(forests())
def test_areas_of_marks_are_the_tokens_on_paths(tree: Tree) -> None:
    marks = TreeMarks.of(tree).to_object(DEFAULT_SHAPE)["marks"]
    columns = (np.array(marks[name], np.int64) for name in ("start", "stop", "lo", "hi"))
    start, stop, lo, hi = columns
    assert ((stop - start) * (hi - lo)).sum() == tree.path_tokens
    for index, parent in enumerate(marks["parent"]):
        assert start[index] == (stop[parent] if parent >= 0 else 0)
        assert parent < 0 or (lo[parent] <= lo[index] and hi[index] <= hi[parent])
