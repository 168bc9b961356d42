"""Trees in files: every form is read, templates replay as recorded, and a bad file is one line."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from treegen import Tree
from treegen.ir.errors import FormatError, TreeError, TreegenError
from treegen.text_files import save_text
from treegen.workloads.recorded_decodings import Template, load_templates
from treegen.workloads.tree_files import load_tree, tree_from_argument

# A prompt of 5 tokens; thoughts of 3, 4 and 0 tokens below it; the second goes on with 2 and 6, with a pause of 1 step.
TEMPLATE = {
    "parent": [-1, 0, 0, 0, 2, 2],
    "tokens": [5, 3, 4, 0, 2, 6],
    "start": [-4, 1, 1, 1, 6, 6],
    "end": [0, 3, 4, 0, 7, 11],
}


def written(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def described(tree: Tree) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    rows = list(zip(tree.row_node.tolist(), tree.row_sees.tolist(), strict=True))
    return tree.parent.tolist(), tree.tokens.tolist(), rows


def test_save_and_load(tmp_path: Path) -> None:
    tree = Tree.from_parents([-1, 0, 0], [4, 2, 3], rows=[(2, 1), (0, 4), (2, 3)], kv=[[9, 8, 7, 6], [0, 1], [3, 4, 5]])
    tree.save(tmp_path / "tree.json")
    loaded = Tree.load(tmp_path / "tree.json")
    assert loaded.to_json() == tree.to_json()
    assert [path.name for path in tmp_path.iterdir()] == ["tree.json"]


@pytest.mark.parametrize("ending", [".txt", ".tree", ""])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_tree_text(tmp_path: Path, ending: str, mark: str) -> None:
    assert load_tree(written(tmp_path / f"tree{ending}", f"{mark} 100(10*4)\n\n")).text == "1,4/100,10"
    assert load_tree(written(tmp_path / f"number{ending}", f"{mark}7\n")).text == "1/7"


def test_node_list(tmp_path: Path) -> None:
    path = written(tmp_path / "tree.txt", "3\n-1 0 100 2\n0 1 10 0\n0 2 20 0\n")
    assert described(load_tree(path)) == ([-1, 0, 0], [100, 10, 20], [(1, 10), (2, 20)])


@pytest.mark.parametrize("name", ["tree.json", "tree.data"])
def test_json_by_ending_or_content(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, Tree.parse("5(1,2)").to_json())
    assert load_tree(path).text == "5(1,2)"


@pytest.mark.parametrize(
    ("step", "expected", "nodes"),
    [
        (-2, ([-1], [3], [(0, 3)]), [0]),
        (0, ([-1], [5], [(0, 5)]), [0]),
        (1, ([-1, 0, 0], [5, 1, 1], [(1, 1), (2, 1)]), [0, 1, 2]),
        (3, ([-1, 0, 0], [5, 3, 3], [(1, 3), (2, 3)]), [0, 1, 2]),
        (4, ([-1, 0], [5, 4], [(1, 4)]), [0, 2]),
        (6, ([-1, 0, 1, 1], [5, 4, 1, 1], [(2, 1), (3, 1)]), [0, 2, 4, 5]),
        (11, ([-1, 0, 1], [5, 4, 6], [(2, 6)]), [0, 2, 5]),
    ],
)
def test_template_steps(tmp_path: Path, step: int, expected: object, nodes: list[int]) -> None:
    template = load_templates(written(tmp_path / "t.json", TEMPLATE))[0]
    assert described(template.at(step)) == expected
    assert template.nodes_at(step).tolist() == nodes


@pytest.mark.parametrize("step", [-5, 5, 12])
def test_steps_without_rows(step: int) -> None:
    template = Template(*(np.array(TEMPLATE[name]) for name in ("parent", "start", "end")))
    assert template.steps == range(1, 12)
    with pytest.raises(TreeError, match=r"no row that is alive; choose a step of 1\.\.11"):
        template.at(step)


def test_the_middle_has_rows() -> None:
    assert Template([-1, 0], [-1, 1], [0, 9]).middle == 5
    assert Template([-1, 0, 1], [-1, 1, 9], [0, 3, 9]).middle == 9  # steps 4..8 are a pause
    assert Template([-1], [-1], [0]).middle == 0


def test_selection(tmp_path: Path) -> None:
    other = {"parent": [-1, 0], "tokens": [2, 9], "start": [-1, 1], "end": [0, 9]}
    path = written(tmp_path / "two.json", [TEMPLATE, other])
    assert load_tree(path).text == "1,1,2/5,4,1"  # template 0 in step 6
    assert load_tree(f"{path}#0@2").text == "1,2/5,2"
    assert load_tree(f"{path}#1").text == "1,1/2,5"
    assert tree_from_argument(f"{path}#1@9").text == "1,1/2,9"
    with pytest.raises(FormatError, match=r"two\.json#2: holds 2 templates"):
        load_tree(f"{path}#2")
    with pytest.raises(TreeError, match=r"two\.json#1: step = 10"):
        load_tree(f"{path}#1@10")
    literal = written(tmp_path / "tree#1", "7(1*3)")
    assert tree_from_argument(str(literal)).text == "1,3/7,1"


def test_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tree_from_argument("1,4/100,10").text == "1,4/100,10"
    Path("7").mkdir()
    assert tree_from_argument("7").text == "1/7"  # a folder is no file
    written(Path("8"), "9")
    assert tree_from_argument("8").text == "1/9"
    assert tree_from_argument("+".join(["3"] * 2000)).num_rows == 2000  # longer than any file's name
    with pytest.raises(FormatError, match=r"absent\.txt: does not exist"):
        tree_from_argument("absent.txt")
    with pytest.raises(FormatError, match=r"absent\.json: does not exist"):
        tree_from_argument("absent.json#3@4")


WHOLE = Tree.parse("5(1,2)").to_json()
BAD_FILES = {
    "empty.json": "",
    "empty.txt": "",
    "truncated.json": WHOLE[:-9],
    "truncated-list.json": json.dumps([TEMPLATE])[:-9],
    "no-object.json": "3",
    "future.json": WHOLE.replace('"format":1', '"format":99'),
    "unknown-field.json": WHOLE.replace('"tokens"', '"token"'),
    "no-list.json": '{"format":1,"parents":0,"tokens":[1]}',
    "fraction.json": '{"format":1,"parents":[-1],"tokens":[1.5]}',
    "long-number.json": '{"format":1,"parents":[-1],"tokens":[' + "1" * 5000 + "]}",
    "deep.json": "[" * 100_000,
    "cycle.json": '{"format":1,"parents":[1,0],"tokens":[1,1]}',
    "no-templates.json": "[]",
    "not-templates.json": "[1, 2]",
    "missing.json": {name: TEMPLATE[name] for name in ("parent", "tokens", "start")},
    "extra.json": {**TEMPLATE, "colour": []},
    "text-field.json": {**TEMPLATE, "end": "later"},
    "text-entry.json": {**TEMPLATE, "end": [0, 3, 4, 0, 7, "later"]},
    "short.json": {**TEMPLATE, "end": [0, 3, 4, 0, 7]},
    "short-tokens.json": {**TEMPLATE, "tokens": [5]},
    "no-nodes.json": {name: [] for name in TEMPLATE},
    "wrong-tokens.json": {**TEMPLATE, "tokens": [5, 3, 4, 0, 2, 7]},
    "early-child.json": {**TEMPLATE, "start": [-4, 0, 1, 1, 6, 6], "tokens": [5, 4, 4, 0, 2, 6]},
    "late-parent.json": {**TEMPLATE, "parent": [-1, 2, 0, 0, 2, 2]},
    "negative.json": {**TEMPLATE, "end": [0, -3, 4, 0, 7, 11]},
    "no-tokens.json": {"parent": [-1], "tokens": [0], "start": [1], "end": [0]},
    "syntax.txt": "100(10*",
    "list-too-short.txt": "3\n-1 0 100 2\n0 1 10 0\n",
    "list-of-words.txt": "1\nfour words are here\n",
    "superscript.txt": "²\n-1 0 100 2\n",
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, BAD_FILES[name])
    with pytest.raises(TreegenError) as caught:
        load_tree(path)
    assert isinstance(caught.value, TreeError if name in ("cycle.json", "fraction.json") else FormatError)
    message = str(caught.value)
    assert name in message
    assert "\n" not in message


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"1,4/100,10 \xff")
    (tmp_path / "folder.json").mkdir()
    for name, reason in {
        "latin.txt": "is not UTF-8 text",
        "folder.json": "cannot be read",
        "absent.txt": "does not exist",
        "nul\0.txt": "is not the name of a file",
    }.items():
        with pytest.raises(FormatError, match=reason):
            load_tree(tmp_path / name)
    single = written(tmp_path / "single.json", WHOLE)
    with pytest.raises(FormatError, match="holds a single tree"):
        load_tree(f"{single}#0")


def test_saving_replaces_whole_files(tmp_path: Path) -> None:
    path = written(tmp_path / "out.json", "old")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    save_text(link, "new")
    assert path.read_text() == "new"
    assert link.is_symlink()
    with pytest.raises(FormatError, match="cannot be written"):
        save_text(tmp_path / "absent" / "out.json", "new")
    with pytest.raises(FormatError, match="cannot be written"):
        save_text(tmp_path, "new")
    save_text(os.devnull, "new")
    assert not Path(os.devnull).is_file()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.json", "out.json"]


def test_recorded_templates(data_dir: Path) -> None:
    files = sorted((data_dir / "deft").glob("reasoning_*.json"))
    templates = [template for file in files for template in load_templates(file)]
    assert len(templates) == 248
    for template in templates[::5]:
        steps = template.steps
        assert steps[0] == 1
        for step in (steps[0], template.middle, steps[-1]):
            tree = template.at(step)
            alive = (template.start <= step) & (step <= template.end)
            assert tree.num_rows == alive.sum()
            nodes = template.nodes_at(step)
            assert tree.tokens[0] == template.end[0] - template.start[0] + 1
            own = np.minimum(template.end, step) - template.start + 1
            assert tree.tokens.tolist() == own[nodes].tolist()
            assert nodes[tree.parent[1:]].tolist() == template.parent[nodes][1:].tolist()
    assert load_tree(f"{files[0]}#3@40").to_json() == load_templates(files[0])[3].at(40).to_json()
