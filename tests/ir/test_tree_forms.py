"""Trees as text, as drawings and as JSON: what they say, and that they come back the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given

from support.forests import examples, forest, forests, preorder
from support.same_trees import assert_same, rows_of
from treegen import Tree
from treegen.ir.tree import tree_drawing, tree_text


def numbered_in_preorder(tree: Tree) -> tuple[list[int], list[int]]:
    """Parents and tokens with nodes renumbered in depth-first order."""
    order = preorder(tree)
    number = {node: index for index, node in enumerate(order)} | {-1: -1}
    return [number[int(tree.parent[node])] for node in order], tree.tokens[order].tolist()


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
