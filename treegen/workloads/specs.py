"""Specs: texts that name many trees: a file or a folder of trees, a decoding, a recorded trace, a table of levels."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treegen.ir.errors import FormatError
from treegen.ir.tree import Tree
from treegen.text_files import inside, parsed_json, read_text, shown
from treegen.workloads.traces import is_generated, workload_from
from treegen.workloads.tree_files import load_tree, tree_from_argument

STRIDE = 64
"""Default number of decoding steps between the trees taken from a decoding."""
_ENDINGS = (".json", ".jsonl", ".txt")
_LEVELS = ("nodes_per_level", "tokens_per_node")
_DECODINGS = frozenset({"start", "end", "paths", "accepted"})  # fields that no tree has
_DESCRIPTION = frozenset({"heads", "head_dim", "dtype"})  # the shape a table was measured with; callers give their own
_WHOLE_TEMPLATE = re.compile(r".+\.json#[0-9]{1,9}", re.DOTALL | re.IGNORECASE)


def trees_of(spec: str, stride: int = STRIDE) -> Iterator[tuple[str, Tree]]:
    """Yields all trees that a spec names, each with a name of its own.

    A spec is one of:

    - a TREE text or a file that holds a tree, as `treegen explain` takes them;
    - a generated or recorded decoding, as `treegen io` takes it, which gives its trees at every event and every
      `stride` steps;
    - a `.jsonl` file with a tree on every line: treegen JSON, a TREE text in quotes, or an object with nodes_per_level
      and tokens_per_node;
    - a `.json` file with an object whose field `trees` is a list of such trees;
    - a folder, which gives all its `.json`, `.jsonl` and `.txt` files in the order of their paths.

    Args:
        spec: The text.
        stride: Decoding steps between two trees of a decoding.

    Raises:
        FormatError, TreeError: A file or a tree is wrong; the message names the file.
    """
    if is_generated(spec):
        yield from _of_workload(spec, stride)
    elif os.path.isdir(spec):
        yield from _of_folder(Path(spec), stride)
    elif spec.lower().endswith(".jsonl"):
        yield from _of_trace(spec)
    elif _WHOLE_TEMPLATE.fullmatch(spec) and not os.path.exists(spec):
        yield from _of_workload(spec, stride)
    elif spec.lower().endswith(".json") and os.path.exists(spec):
        yield from _of_json(spec, stride)
    else:
        yield spec, tree_from_argument(spec)


def _of_folder(folder: Path, stride: int) -> Iterator[tuple[str, Tree]]:
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS and path.is_file())
    if not found:
        raise FormatError("spec", shown(folder), f"holds no {', '.join(_ENDINGS)} files", "name another folder")
    for path in found:
        yield from trees_of(str(path), stride)


def _of_json(path: str, stride: int) -> Iterator[tuple[str, Tree]]:
    value = parsed_json(read_text(path), path)
    if isinstance(value, list) or (isinstance(value, dict) and _DECODINGS & set(value)):
        yield from _of_workload(path, stride)
    elif isinstance(value, dict) and "trees" in value:
        yield from _of_table(value, path)
    else:
        yield path, load_tree(path)


def _of_table(value: dict[str, Any], path: str) -> Iterator[tuple[str, Tree]]:
    unknown = set(value) - _DESCRIPTION - {"trees"}
    if unknown or not isinstance(value["trees"], list):
        field = min(unknown, default="trees")
        reason = "is an unknown field of a table" if unknown else "is not a list"
        raise FormatError(f"{path}: {field}", type(value[field]).__name__, reason, "give trees, as a list")
    for index, entry in enumerate(value["trees"]):
        with inside(f"{path}#{index}"):
            yield f"{path}#{index}", _tree(entry)


def _of_trace(path: str) -> Iterator[tuple[str, Tree]]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            with inside(f"{path}:{number}"):
                yield f"{path}:{number}", _tree(_value(line))


def _value(line: str) -> Any:
    """Returns the JSON value of a line. Raises FormatError."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as cause:
        fix = 'write treegen JSON, or a TREE text in quotes, as "1,4/10,10"'
        raise FormatError("line", line, f"is not JSON ({cause})", fix) from cause


def _tree(value: Any) -> Tree:
    """Makes the tree of a line, or of an entry of a table."""
    if isinstance(value, str):
        return Tree.parse(value)
    if not isinstance(value, dict):
        raise FormatError("tree", value, "is neither a text nor an object", "give a TREE text or treegen JSON")
    if set(value) == set(_LEVELS):
        return Tree.from_levels(value[_LEVELS[0]], value[_LEVELS[1]])
    return Tree.from_json(json.dumps(value))


def _of_workload(text: str, stride: int) -> Iterator[tuple[str, Tree]]:
    for decode in workload_from(text).decodes:
        for segment in decode.segments():
            for step in sorted({*range(segment.first, segment.last + 1, stride), segment.last}):
                yield f"{decode.name}@{step}", segment.at(step)
