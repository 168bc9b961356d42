"""Trees in files: treegen JSON, FastTree's node list, TREE texts, and recorded reasoning templates."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from treegen.ir.arrays import INT32_MAX, Ints, int32_array
from treegen.ir.errors import FormatError
from treegen.ir.tree import Tree
from treegen.ir.tree_text import parse_node_list

_TEMPLATE_FIELDS = frozenset({"parent", "tokens", "start", "end"})
_SELECTED = re.compile(r"(?P<path>.+?)#(?P<index>\d+)(?:@(?P<step>\d+))?")


@dataclass(frozen=True)
class Template:
    """A recorded reasoning tree: every node grows by one token per step from step `start` to step `end`, inclusive.

    The root is the prompt (`end` at most 0). A node has a query row exactly in the steps in which it grows (DeFT, section
    4 and appendix; Graph-of-Thoughts runs).
    """

    parent: Ints
    start: Ints
    end: Ints

    @property
    def steps(self) -> range:
        """The decoding steps at which some row is alive."""
        return range(1, int(self.end.max(initial=0)) + 1)

    @cached_property
    def middle(self) -> int:
        """The middle step."""
        return self.steps[len(self.steps) // 2] if self.steps else 1

    def at(self, step: int) -> Tree:
        """The tree at a step: alive rows with the tokens that they have so far, and whole ancestors; the rest is pruned.

        Nodes keep their order. Raises FormatError when no row is alive.
        """
        alive = (self.start <= step) & (step <= self.end) & (self.end > 0)
        if not alive.any():
            raise FormatError("step", step, "has no alive row", f"choose a step of 1..{len(self.steps)}")
        needed = alive.copy()
        frontier = np.flatnonzero(alive)
        while len(frontier):
            above = self.parent[frontier]
            frontier = np.unique(above[above >= 0])
            frontier = frontier[~needed[frontier]]
            needed[frontier] = True
        kept = np.flatnonzero(needed)
        number = np.cumsum(needed) - 1
        parent = np.where(self.parent[kept] >= 0, number[np.maximum(self.parent[kept], 0)], -1)
        grown = np.minimum(self.end, step) - self.start + 1
        rows = [(int(number[node]), int(grown[node])) for node in np.flatnonzero(alive)]
        return Tree.from_parents(parent, grown[kept], rows)


def load_templates(path: str | Path) -> list[Template]:
    """The recorded trees of a JSON file: one object or a list of objects. Raises FormatError."""
    return _templates(_read_json(Path(path)), str(path))


def load_tree(path: str | Path) -> Tree:
    """A tree from a file; `FILE#INDEX@STEP` picks a template and a step (default: the first, in the middle).

    Raises FormatError for a file that cannot be read, TreeError for an impossible tree.
    """
    index, step = 0, None
    selected = _SELECTED.fullmatch(str(path))
    if selected and not Path(path).exists():
        path, index = selected["path"], int(selected["index"])
        step = None if selected["step"] is None else int(selected["step"])
    file = Path(path)
    if file.suffix == ".json":
        value = _read_json(file)
        if isinstance(value, dict) and not _TEMPLATE_FIELDS <= value.keys():
            return Tree.from_json(_read_text(file))
        templates = _templates(value, str(file))
        if index >= len(templates):
            raise FormatError("path", f"{file}#{index}", f"has {len(templates)} trees", "choose a lower index")
        template = templates[index]
        return template.at(template.middle if step is None else step)
    text = _read_text(file)
    if "\n" in text.strip():
        return Tree.from_parents(*parse_node_list(text))
    return Tree.parse(text)


def tree_from_argument(argument: str) -> Tree:
    """The tree that a command-line argument means: a file if it names one or ends in .json or .txt, else a TREE text."""
    path = argument.partition("#")[0]
    if path.endswith((".json", ".txt")) or Path(argument).is_file():
        return load_tree(argument)
    return Tree.parse(argument)


def save_text(path: str | Path, text: str) -> None:
    """Writes a text file."""
    Path(path).write_text(text, encoding="utf-8")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) else "is not UTF-8 text"
        raise FormatError("path", str(path), f"cannot be read: {reason}", "name a readable file") from cause


def _read_json(path: Path) -> Any:
    text = _read_text(path)
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as cause:
        raise FormatError("path", str(path), f"is not complete JSON ({cause})", "write the file again") from cause


def _templates(value: Any, path: str) -> list[Template]:
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise FormatError("path", path, "holds no trees", "name another file")
    return [_template(entry, f"{path}#{index}") for index, entry in enumerate(listed)]


def _template(entry: Any, name: str) -> Template:
    if not isinstance(entry, dict) or entry.keys() != _TEMPLATE_FIELDS:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        fields = ", ".join(sorted(_TEMPLATE_FIELDS))
        raise FormatError(name, found, "is not a recorded tree", f"give exactly the fields {fields}")
    if not all(isinstance(entry[field], list) for field in _TEMPLATE_FIELDS):
        raise FormatError(name, sorted(entry), "has a field that is not a list", "give one integer per node")
    columns = {
        field: int32_array(f"{name} {field}", entry[field], low=-INT32_MAX, error=FormatError)
        for field in _TEMPLATE_FIELDS
    }
    parent, tokens, start, end = (columns[field] for field in ("parent", "tokens", "start", "end"))
    if len({len(parent), len(tokens), len(start), len(end)}) != 1 or len(parent) == 0:
        raise FormatError(name, len(parent), "has fields of different lengths or no nodes", "give one entry per node")
    wrong = np.flatnonzero((end.astype(np.int64) - start + 1 != tokens) | (parent >= len(parent)) | (parent < -1))
    if len(wrong):
        reason = "its parent is out of range, or its tokens are not end - start + 1"
        raise FormatError(f"{name} node {wrong[0]}", int(tokens[wrong[0]]), reason, "correct the node")
    return Template(parent, start, end)
