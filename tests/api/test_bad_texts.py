"""Bad texts: trees as text, node lists, JSON of trees, plans and schedules, and files of these."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.forests import examples
from support.rejections import Make, rejected
from treegen import Shape, Tree, strategies
from treegen.ir.errors import FormatError, TreeError, TreegenError
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.tree import tree_text
from treegen.schedule.lower import lower
from treegen.target.problem import Problem
from treegen.target.targets import target_from

TREE = Tree.parse("3(2)")


def complaint(make: Make) -> str:
    """The message of the TreegenError that `make` raises, empty when it raises nothing; any other error passes."""
    try:
        make()
    except TreegenError as error:
        return str(error)
    return ""


TEXTS = {
    "": ("number of tokens", "the end"),
    "   ": ("number of tokens", "the end"),
    "a": ("number of tokens", "'a' at position 0"),
    "-5": ("number of tokens", "'-' at position 0"),
    "1.5": ("'.' at position 1",),
    "100(10*4": ("',' or ')'", "the end"),
    "100(": ("number of tokens", "the end"),
    "100(10,": ("number of tokens", "the end"),
    "100()": ("number of tokens", "')' at position 4"),
    "100)": ("'+' or the end", "')' at position 3"),
    "100(10))": ("'+' or the end", "')' at position 7"),
    "100(10)(10)": ("'+' or the end", "'(' at position 7"),
    "100(10 20)": ("',' or ')'", "'2' at position 7"),
    "100(10+20)": ("',' or ')'", "'+' at position 6"),
    "100,10": ("'+' or the end", "',' at position 3"),
    "100+": ("number of tokens", "the end"),
    "+100": ("number of tokens", "'+' at position 0"),
    "100*": ("positive number of copies", "the end"),
    "100*0": ("positive number of copies", "'0' at position 4"),
    "100**2": ("positive number of copies", "'*' at position 4"),
    "100*2*3": ("'+' or the end", "'*' at position 5"),
    "*2": ("number of tokens", "'*' at position 0"),
    "1,4/100,": ("number of tokens", "the end"),
    "/100": ("'/' at position 0",),
    "1,4//100,10": ("number of tokens", "'/' at position 4"),
    "12345678901": ("too large", "2^31"),
    "1*12345678901": ("too large", "2^31"),
    "1*10000001": ("10000001 nodes", "at or below"),
    "1(1*9999)*9999": ("nodes", "at or below"),
    "9999999999/1": ("nodes", "at or below"),
    "[1, 2]": ("number of tokens", "'[' at position 0"),
    "((": ("number of tokens", "'(' at position 0"),
}

NODE_LISTS = {
    "": ("node count",),
    "hello": ("node count",),
    "2 3\n-1 0 5 0\n-1 1 5 0": ("node count",),
    "2\n-1 0 5 1": ("1 node lines", "promises 2", "complete"),
    "1\n-1 0 5 1\n0 1 5 0": ("2 node lines", "promises 1"),
    "2\n-1 0 5 1\n0 1 5": ("0 1 5", "line 3 is not four integers", "parent id seqlen children"),
    "1\n-1 0 5.5 0": ("line 2 is not four integers",),
    "1\n-1 0 five 0": ("line 2 is not four integers",),
    "1\n-1 0 -5 0": ("line 2", "length is out of range"),
    "2\n-1 0 5 0\n-1 0 5 0": ("line 3 repeats a node", "0..1 once"),
    "2\n-1 0 5 0\n-1 2 5 0": ("line 3", "id", "out of range"),
    "2\n-1 0 5 2\n0 1 5 0": ("node 0 has 1 children, its line says 2",),
    "2\n-1 0 5 0\n0 1 5 0": ("node 0 has 1 children, its line says 0",),
}

GOOD = {"format": 1, "kind": "tree", "parents": [-1, 0], "tokens": [3, 2]}
JSONS: dict[str, tuple[object, type[TreegenError], tuple[str, ...]]] = {
    "unknown field": ({**GOOD, "token": [1]}, FormatError, ("tree.token = [1]", "unknown field", "'tokens'")),
    "unknown field of two lines": ({**GOOD, "a\nb": 1}, FormatError, ("unknown field",)),
    "unknown field of great length": ({**GOOD, "a" * 5000: 1}, FormatError, ("unknown field",)),
    "future version": ({**GOOD, "format": 2}, FormatError, ("tree.format = 2", "newer than 1", "upgrade treegen")),
    "version 0": ({**GOOD, "format": 0}, FormatError, ("tree.format = 0", "not a format version", "give 1")),
    "version that is a word": ({**GOOD, "format": "1"}, FormatError, ("tree.format = 1", "not a format version")),
    "version that is a float": ({**GOOD, "format": 1.0}, FormatError, ("tree.format = 1.0", "not a format version")),
    "version that is a flag": ({**GOOD, "format": True}, FormatError, ("tree.format = True", "not a format version")),
    "no version": ({"parents": [-1], "tokens": [3]}, FormatError, ("tree.format = None", "not a format version")),
    "another kind": ({**GOOD, "kind": "plan"}, FormatError, ("tree.kind", "another kind than 'tree'")),
    "kind that is a list": ({**GOOD, "kind": ["tree"]}, FormatError, ("tree.kind", "another kind than 'tree'")),
    "no tokens": ({"format": 1, "parents": [-1]}, FormatError, ("tree.tokens", "missing")),
    "no parents": ({"format": 1, "tokens": [3]}, FormatError, ("tree.parents", "missing")),
    "tokens that are a number": ({**GOOD, "tokens": 5}, FormatError, ("tree.tokens = 5", "not a list")),
    "tokens that are a word": ({**GOOD, "tokens": "32"}, FormatError, ("tree.tokens = 32", "not a list")),
    "tokens that are an object": ({**GOOD, "tokens": {"0": 3}}, FormatError, ("tree.tokens", "not a list")),
    "tokens that are null": ({**GOOD, "tokens": None}, FormatError, ("tree.tokens = None", "not a list")),
    "fractional tokens": ({**GOOD, "tokens": [3, 2.5]}, TreeError, ("tokens[1] = 2.5", "not an integer")),
    "negative tokens": ({**GOOD, "tokens": [3, -2]}, TreeError, ("tokens[1] = -2",)),
    "nested tokens": ({**GOOD, "tokens": [[3], [2]]}, TreeError, ("tokens", "one-dimensional")),
    "infinite tokens": ({**GOOD, "tokens": [3, float("inf")]}, TreeError, ("tokens[1] = inf", "not an integer")),
    "huge tokens": ({**GOOD, "tokens": [3, 2**200]}, TreeError, ("tokens[1]", "outside")),
    "cycle": ({**GOOD, "parents": [1, 0]}, TreeError, ("parents[0] = 1", "cycle")),
    "no nodes": ({**GOOD, "parents": [], "tokens": []}, TreeError, ("tokens", "at least one node")),
    "rows that are numbers": ({**GOOD, "rows": [1, 2]}, FormatError, ("tree.rows = [1, 2]", "list of pairs")),
    "rows that are a number": ({**GOOD, "rows": 1}, FormatError, ("tree.rows = 1", "list of pairs")),
    "rows of three": ({**GOOD, "rows": [[0, 1, 2]]}, FormatError, ("tree.rows = [[0, 1, 2]]", "list of pairs")),
    "rows of words": ({**GOOD, "rows": [["0", 1]]}, TreeError, ("rows", "0", "not an integer")),
    "rows beyond": ({**GOOD, "rows": [[1, 3]]}, TreeError, ("rows[0] = (1, 3)", "2 tokens")),
    "kv that is a number": ({**GOOD, "kv": 1}, FormatError, ("tree.kv = 1", "not a list")),
    "kv of numbers": ({**GOOD, "kv": [0, 3]}, FormatError, ("tree.kv[0] = 0", "list of pairs")),
    "kv of one node": ({**GOOD, "kv": [[[0, 3]]]}, TreeError, ("kv = 1 entries", "2 nodes")),
    "kv of too few tokens": ({**GOOD, "kv": [[[0, 3]], [[3, 1]]]}, TreeError, ("kv[1] = 1 entries", "node 1 needs 2")),
    "kv at a negative slot": ({**GOOD, "kv": [[[-1, 3]], [[3, 2]]]}, TreeError, ("kv", "-1", "outside 0..")),
    "kv of an empty run": ({**GOOD, "kv": [[[0, 3], [9, 0]], [[3, 2]]]}, TreeError, ("kv", "0", "outside 1..")),
    "kv of a fractional run": ({**GOOD, "kv": [[[0, 3.0]], [[3, 2]]]}, TreeError, ("kv", "3.0", "not an integer")),
    "kv past the last slot": ({**GOOD, "kv": [[[2**31 - 2, 3]], [[3, 2]]]}, TreeError, ("kv",)),
    "list": ([GOOD], FormatError, ("tree", "not a JSON object", "to_json")),
    "number": (5, FormatError, ("tree = 5", "not a JSON object")),
    "null": (None, FormatError, ("tree = null", "not a JSON object")),
}


SHAPE = Shape(8, 8, 64)
PLAN = strategies.deft_flatten().plan(Problem(TREE, SHAPE, target_from(None)))
FORMS = {
    Tree: TREE.with_kv([[5, 6, 7], [2, 1]]).to_json(),
    Plan: PLAN.to_json(),
    Schedule: lower(PLAN, Problem(TREE, SHAPE, target_from(None))).to_json(),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text: str) -> None:
    rejected(lambda: Tree.parse(text), FormatError, "tree = ", *TEXTS[text])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0/5", ("nodes_per_level[0] = 0",)),
        ("1,2/5", ("tokens_per_node = [5]", "2 levels")),
        ("1/5,6", ("tokens_per_node = [5, 6]", "1 levels")),
        ("9999999999", ("tokens[0] = 9999999999", "outside")),
        ("2147483647*2", ("tokens = 4294967294", "split the forest")),
    ],
)
def test_texts_of_impossible_trees(text: str, words: tuple[str, ...]) -> None:
    rejected(lambda: Tree.parse(text), TreeError, *words)


@pytest.mark.parametrize("text", [None, 5, b"5", ["5"]])
def test_texts_that_are_not_text(text: object) -> None:
    rejected(lambda: Tree.parse(text), FormatError, "tree = ")
    rejected(lambda: Tree.from_json(text), FormatError, "tree = ")


@pytest.mark.parametrize("text", NODE_LISTS)
def test_node_lists(text: str) -> None:
    rejected(lambda: tree_text.parse_node_list(text), FormatError, *NODE_LISTS[text])


@pytest.mark.parametrize(
    ("text", "words"),
    [("2\n1 0 5 1\n0 1 5 1", ("parents[0] = 1", "cycle")), ("1\n7 0 5 0", ("parents[0] = 7",))],
)
def test_node_lists_of_impossible_trees(text: str, words: tuple[str, ...]) -> None:
    rejected(lambda: Tree.from_parents(*tree_text.parse_node_list(text)), TreeError, *words)


@pytest.mark.parametrize("case", JSONS)
def test_json(case: str) -> None:
    value, error, words = JSONS[case]
    rejected(lambda: Tree.from_json(json.dumps(value)), error, *words)


@pytest.mark.parametrize("kind", [Tree, Plan, Schedule])
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "{",
        '{"format": 1',
        "[" * 100_000,
        '{"a":' * 100_000,
        "1" * 5000,
        '{"format": 1} {}',
        "not json",
        "\x00",
        "'a'",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_broken_json(kind: type[Tree] | type[Plan] | type[Schedule], text: str) -> None:
    rejected(lambda: kind.from_json(text), FormatError, f"{kind.__name__.lower()} = ", "JSON", "to_json")


def test_json_with_a_number_of_5000_digits() -> None:
    rejected(lambda: Tree.from_json(f'{{"format": 1, "parents": [-1], "tokens": [{"9" * 5000}]}}'), TreegenError)


@pytest.mark.parametrize("kind", [Tree, Plan, Schedule])
@pytest.mark.parametrize("depth", [500, 100_000])
def test_deep_json_inside_a_field(kind: type[Tree] | type[Plan] | type[Schedule], depth: int) -> None:
    text = f'{{"format": 1, "parents": {"[" * depth}{"]" * depth}, "tokens": [3]}}'
    rejected(lambda: kind.from_json(text), TreegenError)


def test_deep_json_inside_tokens() -> None:
    for depth in (40, 300):
        text = f'{{"format": 1, "parents": [-1], "tokens": {"[" * depth}3{"]" * depth}}}'
        rejected(lambda text=text: Tree.from_json(text), TreegenError, "tokens")


@given(cut=st.integers(0, 10_000))
@examples(100)
def test_truncated_json(cut: int) -> None:
    text = Tree.from_parents([-1, 0], [3, 2], rows=[(1, 1)], kv=[[9, 8, 7], [1, 2]]).to_json()
    rejected(lambda: Tree.from_json(text[: cut % len(text)]), FormatError, "tree = ", "complete JSON")


@given(cut=st.integers(0, 10_000))
@examples(60)
def test_truncated_text(cut: int) -> None:
    """Every proper beginning either is a tree itself or is rejected with its place."""
    text = "4000(400(10*2,7)*10)+3(2)"
    begin = text[: cut % len(text)]
    if begin.count("(") == begin.count(")") and begin[-1:].isalnum() | begin.endswith(")"):
        assert Tree.parse(begin).num_rows >= 1
    else:
        rejected(lambda: Tree.parse(begin), FormatError, "tree = ", "found the end" if begin else "")


@given(text=st.text(alphabet="0123456789(),*+/_ -x\n", max_size=30))
@example("1*9999999*9999999")
@example("2\n1 0 3 0")
@examples(300)
def test_no_text_breaks_the_parsers(text: str) -> None:
    """Whatever the text, the result is a tree or a one-line TreegenError, never anything else."""
    for read in (Tree.parse, Tree.from_json, tree_text.parse_node_list):
        if read is Tree.parse and re.search(r"\d{5}", text):
            continue  # a hundred thousand nodes are legal and slow
        assert "\n" not in complaint(lambda read=read: read(text))


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers(-3, 5) | st.floats() | st.text(max_size=3) | st.just(2**40)
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=6)


@pytest.mark.parametrize("kind", [Tree, Plan, Schedule])
@given(data=st.data())
@examples(150)
def test_no_json_breaks_the_readers(kind: type[Tree] | type[Plan] | type[Schedule], data: st.DataObject) -> None:
    """Forms with some fields replaced by anything: read, or rejected in one line."""
    form = json.loads(FORMS[kind])
    for name in data.draw(st.lists(st.sampled_from(sorted(form)), min_size=1, max_size=2)):
        form[name] = data.draw(json_values())
    assert "\n" not in complaint(lambda: kind.from_json(json.dumps(form)))


def test_files(tmp_path: Path) -> None:
    """A file's errors are the text's, and name the file or the field."""
    rejected(lambda: Tree.load(tmp_path / "missing.json"), FormatError, "missing.json", "does not exist")
    (tmp_path / "short.json").write_text(TREE.to_json()[:-9])
    rejected(lambda: Tree.load(tmp_path / "short.json"), FormatError, "short.json", "complete JSON")
    (tmp_path / "short.txt").write_text("3\n-1 0 5 2\n0 1 5 0\n")
    rejected(lambda: Tree.load(tmp_path / "short.txt"), FormatError, "short.txt", "promises 3")
    (tmp_path / "future.json").write_text(json.dumps({**GOOD, "format": 9}))
    rejected(lambda: Tree.load(tmp_path / "future.json"), FormatError, "future.json", "newer than 1")
    (tmp_path / "empty.json").write_text("")
    rejected(lambda: Tree.load(tmp_path / "empty.json"), FormatError, "empty.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    rejected(lambda: Tree.load(tmp_path / "bytes.json"), FormatError, "bytes.json")
    rejected(lambda: Tree.load(tmp_path), FormatError, str(tmp_path)[-20:])
