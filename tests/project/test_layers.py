"""The layers of the package: imports go down, names are unique, and docs/architecture.md shows what is true."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath
from typing import TypeAlias

import networkx as nx
import pytest

from support.import_graph import LAYERS, REPOSITORY, Graph, Import, drawing, folder_of, graph_of, layer_of, read_graph
from support.page_blocks import hold

Rule: TypeAlias = Callable[[Graph], Iterable[str]]

LIGHT = ("ir", "cost", "search", "report")  # folders that work where none of these is installed
HEAVY = ("torch", "triton", "jinja2")
MOST_FLAT = 8  # Python files right in treegen/
# Has the name of treegen/schedule/passes/, and keeps it: the documentation shows its import path.
NAMED_LIKE_FOLDERS = ("treegen/strategies/passes.py",)


def every_folder_has_a_layer(graph: Graph) -> Iterator[str]:
    for folder in sorted({folder_of(name) for name in graph}):
        if layer_of(folder) is None:
            yield f"{folder} has no layer: give it one in LAYERS of tests/support/import_graph.py"


def every_layer_has_its_folders(graph: Graph) -> Iterator[str]:
    there = {folder_of(name) for name in graph}
    for folders in LAYERS:
        for folder in folders:
            if folder not in there:
                yield f"LAYERS of tests/support/import_graph.py names {folder}, which does not exist: take it out"


def imports_go_down(graph: Graph) -> Iterator[str]:
    for name, module in graph.items():
        own = folder_of(name)
        for each in module.imports:
            other = folder_of(each.name)
            here, there = layer_of(own), layer_of(other)
            if other == own or here is None or there is None or there > here:
                continue
            yield f"{each}, which lies {'above' if there < here else 'beside'} it"


def modules_form_no_circle(graph: Graph) -> Iterator[str]:
    return circles((name, each.name, each) for name, module in graph.items() for each in module.imports)


def folders_form_no_circle(graph: Graph) -> Iterator[str]:
    imports = ((folder_of(name), folder_of(each.name), each) for name, m in graph.items() for each in m.imports)
    return circles((importer, imported, each) for importer, imported, each in imports if importer != imported)


def light_folders_stay_light(graph: Graph) -> Iterator[str]:
    """Also through other modules of the package, but not through treegen/__init__.py, which every import runs."""
    for name, module in graph.items():
        if folder_of(name) not in LIGHT:
            continue
        yield from (str(each) for each in module.others if each.name in HEAVY)
        for each in module.imports:
            ways = () if folder_of(each.name) in LIGHT else heavy_ways(graph, each.name)
            for heavy, way in ways:
                yield f"{each}, which leads to {heavy}: {' -> '.join(way)}"


def class_names_are_unique(graph: Graph) -> Iterator[str]:
    """Also those of type aliases."""
    types = [(each, module.path) for module in graph.values() for each in module.types]
    return (f"class or type alias {name} is in {places}: rename all but one" for name, places in repeated(types))


def file_names_are_unique(graph: Graph) -> Iterator[str]:
    files = [PurePosixPath(module.path) for module in graph.values()]
    modules = [(path.name, str(path)) for path in files if path.stem not in ("__init__", "__main__")]
    return (f"modules {places} have the same name: rename all but one" for _, places in repeated(modules))


def folder_names_are_unique(graph: Graph) -> Iterator[str]:
    folders = [(path.name, str(path)) for path in folders_of(graph)]
    return (f"folders {places} have the same name: rename all but one" for _, places in repeated(folders))


def files_and_folders_have_different_names(graph: Graph) -> Iterator[str]:
    """A module may have the name of its own folder, or of a folder of another root."""
    for module in graph.values():
        path = PurePosixPath(module.path)
        for folder in folders_of(graph):
            same = folder.name == path.stem and folder.parts[0] == path.parts[0]
            if same and folder != path.parent and module.path not in NAMED_LIKE_FOLDERS:
                yield f"{path} has the name of {folder}/: rename one"


def few_files_lie_flat(graph: Graph) -> Iterator[str]:
    flat = sum(PurePosixPath(module.path).parent.as_posix() == "treegen" for module in graph.values())
    if flat > MOST_FLAT:
        yield f"{flat} Python files lie flat in treegen/, {MOST_FLAT} at most: move some into folders"


def circles(edges: Iterable[tuple[str, str, Import]]) -> Iterator[str]:
    """One circle of every set of nodes that reach one another."""
    imports = nx.DiGraph()
    for importer, imported, each in edges:
        imports.add_edge(importer, imported, by=each)
    for nodes in nx.strongly_connected_components(imports):
        inside = imports.subgraph(nodes)
        if inside.number_of_edges():
            steps = nx.find_cycle(inside, min(nodes))
            yield f"a circle: {', '.join(str(inside.edges[step]['by']) for step in steps)}"


def heavy_ways(graph: Graph, start: str) -> Iterator[tuple[str, list[str]]]:
    """The heavy packages that importing a module leads to, and a shortest way from it to each."""
    ways = {start: [start]}
    for name in (waiting := [start]):  # grows while it is read
        following = [each.name for each in graph[name].imports]
        if name.count(".") > 1:
            following.append(name.rpartition(".")[0])  # the package's __init__.py runs before the module
        for after in following:
            if after in graph and after not in ways:
                ways[after] = [*ways[name], after]
                waiting.append(after)
    found: dict[str, list[str]] = {}
    for name, way in ways.items():
        for each in graph[name].others:
            if each.name in HEAVY:
                found.setdefault(each.name, way)
    yield from found.items()


def folders_of(graph: Graph) -> list[PurePosixPath]:
    """All folders with modules, nested ones included."""
    return sorted({PurePosixPath(module.path).parent for module in graph.values()})


def repeated(named: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Names that are in several places, and these places."""
    places: dict[str, list[str]] = {}
    for name, place in named:
        places.setdefault(name, []).append(place)
    return ((name, " and ".join(of_name)) for name, of_name in places.items() if len(of_name) > 1)


# Every rule, and sources that break it with what is said of them.
RULES: dict[Rule, list[tuple[dict[str, str], str]]] = {
    every_folder_has_a_layer: [
        (
            {"treegen/fleet/batch.py": ""},
            "fleet has no layer: give it one in LAYERS of tests/support/import_graph.py",
        ),
        ({"treegen/loose.py": ""}, "loose has no layer: give it one in LAYERS of tests/support/import_graph.py"),
    ],
    every_layer_has_its_folders: [
        ({"ir/a.py": ""}, "LAYERS of tests/support/import_graph.py names cli, which does not exist: take it out"),
    ],
    imports_go_down: [
        (
            {"ir/a.py": "import os\nfrom treegen.cost.b import c", "treegen/cost/b.py": ""},
            "ir/a.py line 2 imports treegen.cost.b, which lies above it",
        ),
        (
            {"ir/a.py": "def f():\n    if x:\n        import treegen.cost.b", "treegen/cost/b.py": ""},
            "ir/a.py line 3 imports treegen.cost.b, which lies above it",
        ),
        (
            {"ir/a.py": "from treegen import cost", "treegen/cost/__init__.py": ""},
            "ir/a.py line 1 imports treegen.cost, which lies above it",
        ),
        (
            {"ir/a.py": "from ..cost import b", "treegen/cost/b.py": ""},
            "ir/a.py line 1 imports treegen.cost.b, which lies above it",
        ),
        (
            {"ir/a.py": "import_module('treegen.cost.b')", "treegen/cost/b.py": ""},
            "ir/a.py line 1 imports treegen.cost.b, which lies above it",
        ),
        (
            {"treegen/cost/a.py": "import treegen.codegen.b", "treegen/codegen/b.py": ""},
            "treegen/cost/a.py line 1 imports treegen.codegen.b, which lies beside it",
        ),
        (
            {"treegen/api/a.py": "from treegen import Tree", "treegen/__init__.py": "Tree = 1"},
            "treegen/api/a.py line 1 imports treegen, which lies above it",
        ),
        (
            {"treegen/__init__.py": "def f():\n    import treegen.cli", "treegen/cli/__init__.py": ""},
            "treegen/__init__.py line 2 imports treegen.cli, which lies above it",
        ),
    ],
    modules_form_no_circle: [
        (
            {"ir/a.py": "from treegen.ir import b", "ir/b.py": "def f():\n    import treegen.ir.a"},
            "a circle: ir/a.py line 1 imports treegen.ir.b, ir/b.py line 2 imports treegen.ir.a",
        ),
        ({"ir/a.py": "from treegen.ir.a import x"}, "a circle: ir/a.py line 1 imports treegen.ir.a"),
    ],
    folders_form_no_circle: [
        (
            {
                "treegen/cost/a.py": "import treegen.codegen.b",
                "treegen/codegen/b.py": "",
                "treegen/codegen/c.py": "import treegen.cost.d",
                "treegen/cost/d.py": "",
            },
            "a circle: treegen/codegen/c.py line 1 imports treegen.cost.d, "
            "treegen/cost/a.py line 1 imports treegen.codegen.b",
        ),
    ],
    light_folders_stay_light: [
        ({"treegen/cost/a.py": "def f():\n    from torch.cuda import x"}, "treegen/cost/a.py line 2 imports torch"),
        (
            {
                "treegen/report/a.py": "import treegen.codegen.b",
                "treegen/codegen/b.py": "from treegen.codegen import c",
                "treegen/codegen/c.py": "def f():\n    import jinja2",
            },
            "treegen/report/a.py line 1 imports treegen.codegen.b, which leads to jinja2: "
            "treegen.codegen.b -> treegen.codegen.c",
        ),
        (
            {
                "ir/a.py": "import treegen.scoring.b",
                "treegen/scoring/__init__.py": "import triton",
                "treegen/scoring/b.py": "",
            },
            "ir/a.py line 1 imports treegen.scoring.b, which leads to triton: treegen.scoring.b -> treegen.scoring",
        ),
    ],
    class_names_are_unique: [
        (
            {"ir/a.py": "class _Job: ...", "treegen/cost/b.py": "class _Job: ..."},
            "class or type alias _Job is in ir/a.py and treegen/cost/b.py: rename all but one",
        ),
        (
            {"ir/a.py": "class Job: ...", "treegen/cost/b.py": "Job: TypeAlias = int", "treegen/cost/c.py": "Job = 1"},
            "class or type alias Job is in ir/a.py and treegen/cost/b.py: rename all but one",
        ),
        (
            {"ir/a.py": "Job: typing.TypeAlias = int", "treegen/cost/b.py": "Job: TypeAlias = int\nn: int = 1"},
            "class or type alias Job is in ir/a.py and treegen/cost/b.py: rename all but one",
        ),
    ],
    file_names_are_unique: [
        (
            {"ir/a.py": "", "treegen/cost/a.py": ""},
            "modules ir/a.py and treegen/cost/a.py have the same name: rename all but one",
        ),
    ],
    folder_names_are_unique: [
        (
            {"ir/cost/a.py": "", "treegen/cost/b.py": ""},
            "folders ir/cost and treegen/cost have the same name: rename all but one",
        ),
    ],
    files_and_folders_have_different_names: [
        (
            {"treegen/cost/search.py": "", "treegen/search/a.py": ""},
            "treegen/cost/search.py has the name of treegen/search/: rename one",
        ),
    ],
    few_files_lie_flat: [
        (
            {f"treegen/{name}.py": "" for name in "abcdefghi"},
            "9 Python files lie flat in treegen/, 8 at most: move some into folders",
        ),
    ],
}
BREACHES = [
    pytest.param(rule, sources, said, id=f"{rule.__name__}-{number}")
    for rule, breaches in RULES.items()
    for number, (sources, said) in enumerate(breaches)
]
ALLOWED = {
    "treegen/__init__.py": "from treegen import api\nfrom treegen.api.a import b",
    "treegen/__main__.py": "from treegen.cli import main",
    "treegen/cli/__init__.py": "import treegen\nfrom treegen.cli import a_command",
    "treegen/cli/a_command.py": "",
    "treegen/api/__init__.py": "",
    "treegen/api/a.py": "import torch\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import treegen.cli",
    "treegen/cost/cost.py": "import numpy\nfrom treegen.ir.tree import Tree\nimport treegen.ir.schedule",
    "treegen/schedule/__init__.py": "",
    "ir/schedule.py": "class Schedule: ...",
    "ir/tree/__init__.py": "from treegen.ir.tree.tree import Tree",
    "ir/tree/tree.py": "class Tree:\n    class Schedule: ...",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Rule) -> None:
    found = list(rule(read_graph()))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("rule", "sources", "said"), BREACHES)
def test_a_breach_is_named(rule: Rule, sources: dict[str, str], said: str) -> None:
    assert said in list(rule(graph_of(sources)))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule is not every_layer_has_its_folders])
def test_what_is_allowed(rule: Rule) -> None:
    assert list(rule(graph_of(ALLOWED))) == []


def test_the_drawing_is_up_to_date(request: pytest.FixtureRequest) -> None:
    for rule in (every_folder_has_a_layer, every_layer_has_its_folders):
        test_rule(rule)
    drawn = drawing(read_graph())
    assert max(map(len, drawn.splitlines())) <= 100
    hold(REPOSITORY / "docs" / "architecture.md", "layers", drawn, request)


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Pytest collects only one of two modules with the same name."""
    names = [path.name for path in (REPOSITORY / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
