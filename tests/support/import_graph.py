"""The import graph of the package, read from its sources, and the layers of its folders. As a command it draws them."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple, TypeAlias

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ROOTS = ("treegen", "ir", "autotune_cache", "templates")  # folders of sources; all but the first are subpackages of it

# Top to bottom: a folder imports only folders on lines below its own, so folders on one line do not import each other.
# A single module in treegen/ counts as a folder. "treegen" is treegen/__init__.py, where the parts are put together:
# whoever imports from it imports nearly everything, so only faces of the package do, on lines above it.
LAYERS = (
    ("cli",),
    ("treegen",),
    ("bench", "integrations"),
    ("engine",),
    ("distributed",),
    ("api",),
    ("runtime",),
    ("report",),
    ("tuning",),
    ("search",),
    ("backends",),
    ("cost", "codegen", "compiled"),
    ("schedule", "autotune_cache"),
    ("strategies", "workloads"),
    ("target", "scoring"),
    ("text_files", "timed"),
    ("environment",),
    ("ir",),
    ("progress", "version"),
    ("templates",),
)

_COLUMNS = 100
_INDENT = 24


class Import(NamedTuple):
    """That the file at `path` imports `name` in this line: a module of the package, or another package."""

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path} line {self.line} imports {self.name}"


class Module(NamedTuple):
    """A source file.

    types: classes and type aliases at module level. imports: of the package's modules; others: of other packages.
    """

    path: str
    doc: str
    types: tuple[str, ...]
    imports: tuple[Import, ...]
    others: tuple[Import, ...]


Graph: TypeAlias = dict[str, Module]
"""Modules by their dotted names."""


@cache
def read_graph() -> Graph:
    """The graph of this checkout."""
    paths = sorted(path for root in ROOTS for path in (REPOSITORY / root).rglob("*.py"))
    return graph_of({path.relative_to(REPOSITORY).as_posix(): path.read_text("utf-8") for path in paths})


def graph_of(sources: Mapping[str, str]) -> Graph:
    """The graph of sources by their paths, like treegen/api/compile.py. Imports inside functions count; those under `if
    TYPE_CHECKING` do not.
    """
    names = {path: _name_of(path) for path in sources}
    graph = {}
    for path, name in names.items():
        parsed = ast.parse(sources[path], path)
        package = name if path.endswith("/__init__.py") else name.rpartition(".")[0]
        found = dict.fromkeys(_imports(parsed, package))
        own = [(line, _module_in(dotted, set(names.values()))) for line, dotted in found if _is_own(dotted)]
        others = [(line, dotted.partition(".")[0]) for line, dotted in found if not _is_own(dotted)]
        graph[name] = Module(
            path,
            ast.get_docstring(parsed) or "",
            tuple(_types(parsed)),
            tuple(Import(path, *each) for each in dict.fromkeys(own)),
            tuple(Import(path, *each) for each in dict.fromkeys(others)),
        )
    return graph


def folder_of(module: str) -> str:
    """The folder of LAYERS that a module belongs to."""
    _, _, rest = module.partition(".")
    folder = rest.partition(".")[0] or "treegen"
    return "cli" if folder == "__main__" else folder


def layer_of(folder: str) -> int | None:
    """The number of a folder's layer, from 0 at the top; None for one without a layer."""
    return next((number for number, folders in enumerate(LAYERS) if folder in folders), None)


def drawing(graph: Graph) -> str:
    """The layers from top to bottom: of every folder its place, what it is for, and which folders it imports."""
    below: dict[str, set[str]] = {}
    for name, module in graph.items():
        below.setdefault(folder_of(name), set()).update(folder_of(each.name) for each in module.imports)
    order = [folder for folders in LAYERS for folder in folders]
    layers = []
    for folders in LAYERS:
        lines = []
        for folder in folders:
            module = graph["treegen" if folder == "treegen" else f"treegen.{folder}"]
            place = module.path if folder == "treegen" else module.path.removesuffix("__init__.py")
            purpose = module.doc.partition("\n")[0].partition(". ")[0].rstrip(".,")
            lines += _wrapped(f"{place:<{_INDENT}}{purpose}")
            if imported := below[folder] - {folder}:
                lines += _wrapped(f"{'':{_INDENT}}-> {', '.join(sorted(imported, key=order.index))}")
        layers.append("\n".join(lines))
    return f"\n{'-' * _COLUMNS}\n".join(layers)


def _types(module: ast.Module) -> Iterator[str]:
    """The names of classes and of type aliases, which are annotated so."""
    for node in module.body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if ast.unparse(annotation).rpartition(".")[2] == "TypeAlias":
                    yield name


def _name_of(path: str) -> str:
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "treegen" else ["treegen", *parts])


def _is_own(dotted: str) -> bool:
    return dotted.partition(".")[0] == "treegen"


def _module_in(dotted: str, names: set[str]) -> str:
    """The module that an import of a module, or of a name in it, reads."""
    while dotted not in names and "." in dotted:
        dotted = dotted.rpartition(".")[0]
    return dotted


def _imports(node: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """The lines and dotted names of all imports in a node of a package's module, also by `import_module("name")`."""
    inside = ast.iter_child_nodes(node)
    match node:
        case ast.If(test=test, orelse=otherwise) if re.fullmatch(r"(\w+\.)?_?TYPE_CHECKING", ast.unparse(test)):
            inside = iter(otherwise)
        case ast.Import(names=names):
            yield from ((node.lineno, each.name) for each in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            origin = resolve_name("." * level + (module or ""), package)
            yield from ((node.lineno, f"{origin}.{each.name}") for each in names)
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(function).rpartition(".")[2] in ("import_module", "__import__"):
                yield node.lineno, name
    for child in inside:
        yield from _imports(child, package)


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, _COLUMNS, subsequent_indent=" " * _INDENT)


if __name__ == "__main__":
    print(drawing(read_graph()))
