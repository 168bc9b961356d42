"""Specs: which trees a text means, in which order and under which names; and what is refused."""

import json
from pathlib import Path

import pytest

from treegen import Tree, TreegenError
from treegen.workloads.specs import trees_of


def names(spec: object, stride: int = 64) -> list[str]:
    return [name for name, _ in trees_of(str(spec), stride)]


def test_a_text_and_a_file_are_a_tree(tmp_path: Path) -> None:
    assert [(name, tree.text) for name, tree in trees_of("1,4/20,5")] == [("1,4/20,5", "1,4/20,5")]
    Tree.parse("9(3*2)").save(tmp_path / "tree.json")
    (tmp_path / "tree.txt").write_text("7(2,3)\n")
    assert [tree.tokens.tolist() for _, tree in trees_of(str(tmp_path / "tree.json"))] == [[9, 3, 3]]
    assert [tree.tokens.tolist() for _, tree in trees_of(str(tmp_path / "tree.txt"))] == [[7, 2, 3]]


def test_of_a_decoding_events_and_every_stride() -> None:
    found = list(trees_of("few-shot:prompt=50,width=3,steps=10", 4))
    assert [name.rpartition("@")[2] for name, _ in found] == ["1", "5", "9", "10"]
    assert [tree.tokens.tolist() for _, tree in found] == [[50, step, step, step] for step in (1, 5, 9, 10)]


def test_a_template_in_a_file_with_its_segments(tmp_path: Path) -> None:
    path = tmp_path / "templates.json"
    one = {"parent": [-1, 0, 0], "tokens": [5, 3, 2], "start": [-4, 1, 1], "end": [0, 3, 2]}
    path.write_text(json.dumps([one, one]))
    tokens = [tree.tokens.tolist() for _, tree in trees_of(f"{path}#1")]
    assert tokens == [[5, 1, 1], [5, 2, 2], [5, 3]]  # the second row ends with step 2, which begins a segment
    assert names(path) == [f"{path}#{index}@{step}" for index in (0, 1) for step in (1, 2, 3)]
    assert [tree.tokens.tolist() for _, tree in trees_of(f"{path}#1@2")] == [[5, 2, 2]]


def test_a_trace_has_a_tree_on_every_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    levels = {"nodes_per_level": [1, 2], "tokens_per_node": [4, 6]}
    lines = [Tree.parse("8(1*3)").to_json(), "", json.dumps("1,2/5,6"), json.dumps(levels)]
    path.write_text("\n".join(lines) + "\n")
    found = list(trees_of(str(path)))
    assert [name for name, _ in found] == [f"{path}:1", f"{path}:3", f"{path}:4"]
    assert [tree.tokens.tolist() for _, tree in found] == [[8, 1, 1, 1], [5, 6, 6], [4, 6, 6]]


def test_a_table_of_levels(data_dir: Path) -> None:
    found = list(trees_of(str(data_dir / "fasttree_kernel_bench.json")))
    assert len(found) == 15
    assert all(tree.num_rows for _, tree in found)


def test_a_folder_has_all_of_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("5(1*2)")
    (tmp_path / "a.jsonl").write_text('"3(1*2)"\n"4(1*2)"\n')
    (tmp_path / "c.json").write_text('{"trees": ["6(1*2)"]}')
    (tmp_path / "README.md").write_text("no tree")
    assert [int(tree.tokens[0]) for _, tree in trees_of(str(tmp_path))] == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("trace.jsonl", '"3(1*2)"\n{"format": 1', "trace.jsonl:2"),
        ("trace.jsonl", "[1]", "trace.jsonl:1"),
        ("trace.jsonl", '"3(1*2"', "trace.jsonl:1"),
        ("table.json", '{"trees": 3}', "table.json: trees"),
        ("table.json", '{"trees": [], "colour": 3}', "table.json: colour"),
        ("table.json", '{"trees": ["1,2/3"]}', "table.json#0"),
        ("broken.json", '{"trees": [', "broken.json"),
        ("empty", None, "empty"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(name: str, text: str | None, place: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    with pytest.raises(TreegenError) as caught:
        list(trees_of(str(path)))
    assert place in str(caught.value)


@pytest.mark.parametrize("spec", ["nowhere.json", "nowhere.jsonl", "few-shot:width=x", "1,2/3", ""])
def test_what_is_no_spec(spec: str) -> None:
    with pytest.raises(TreegenError):
        list(trees_of(spec))
