"""Trees in files: treegen JSON, FastTree's node list, TREE texts, and templates of reasoning trees."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from treegen.ir.errors import FormatError
from treegen.ir.tree import Tree
from treegen.ir.tree.tree_text import parse_node_list
from treegen.text_files import check_path, inside, parsed_json, read_text, shown
from treegen.workloads.recorded_decodings import Template, templates_in

_ONLY_IN_TEMPLATES = frozenset({"parent", "start", "end"})
_SELECTION = re.compile(r"(?P<path>.+)#(?P<index>[0-9]{1,9})(?:@(?P<step>[0-9]{1,9}))?", re.DOTALL)
_NODE_LIST = re.compile(r"\s*[0-9]{1,9}[ \t]*\n\s*\S")
_FILE_ENDINGS = (".json", ".txt")
_STANDARD_INPUT = "-"


def load_tree(path: str | Path) -> Tree:
    """Reads the tree in a file.

    Args:
        path: A file with treegen JSON, templates, FastTree's node list (a node count on the first line), or a TREE
            text. `FILE#INDEX@STEP` selects a template and a step of its decoding; by default the first template, and
            the middle of its decoding.

    Raises:
        FormatError: The file cannot be read or holds no tree; the message names the file.
        TreeError: The tree is impossible; the message names the file.
    """
    check_path(path)
    selection = None if os.path.exists(path) else _SELECTION.fullmatch(str(path))
    file = selection["path"] if selection else path
    return _tree_in(read_text(file), file, path, selection)


def _tree_in(text: str, file: str | Path, path: str | Path, selection: re.Match[str] | None = None) -> Tree:
    """Reads the tree in the text of a file (see load_tree). path: the file, with a selection if there is one."""
    is_json = _ending(file) == ".json" or (_ending(file) != ".txt" and text.lstrip()[:1] in ("{", "["))
    value = parsed_json(text, file) if is_json else None
    if isinstance(value, list) or (
        isinstance(value, dict) and "format" not in value and _ONLY_IN_TEMPLATES & set(value)
    ):
        return _selected(templates_in(value, file), file, selection)
    if selection:
        raise FormatError("path", shown(path), "selects from a file that holds a single tree", f"give {file}")
    with inside(file):
        if is_json:
            return Tree.from_json(text)
        return Tree.from_parents(*parse_node_list(text)) if _NODE_LIST.match(text) else Tree.parse(text)


def tree_from_argument(text: str) -> Tree:
    """Makes the tree that an argument of the command line names.

    Args:
        text: The name of a file (any text that names a file or ends in .json or .txt), also with a selection
            `#INDEX@STEP`; `-` for a file's text on standard input; or a TREE text.

    Raises:
        FormatError, TreeError: The file or the text is wrong.
    """
    if text == _STANDARD_INPUT:
        return _tree_in(_standard_input(), "standard input", text)
    selection = _SELECTION.fullmatch(text)
    names = (text, selection["path"]) if selection else (text,)
    # os.path, unlike pathlib, takes a TREE text that is too long for a file's name.
    is_file = any(
        _ending(name) in _FILE_ENDINGS or (os.path.exists(name) and not os.path.isdir(name)) for name in names
    )
    if is_file:
        return load_tree(text)
    try:
        return Tree.parse(text)
    except FormatError as cause:
        if os.path.isdir(text):
            reason = "is a folder"
            raise FormatError("path", shown(text), reason, "name a file in it, or write a TREE text") from cause
        raise


def _standard_input() -> str:
    """Reads standard input. Raises FormatError."""
    try:
        return "" if sys.stdin is None else sys.stdin.buffer.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as cause:
        reason = "is not UTF-8 text" if isinstance(cause, UnicodeDecodeError) else "cannot be read"
        raise FormatError("path", _STANDARD_INPUT, f"standard input {reason}", "give it a tree's text") from cause


def _ending(path: str | Path) -> str:
    return os.path.splitext(path)[1].lower()


def _selected(templates: list[Template], path: str | Path, selection: re.Match[str] | None) -> Tree:
    index = int(selection["index"]) if selection else 0
    if index >= len(templates):
        raise FormatError("path", shown(f"{path}#{index}"), f"holds {len(templates)} templates", "choose a lower index")
    template = templates[index]
    with inside(f"{path}#{index}"):
        return template.at(int(selection["step"]) if selection and selection["step"] else template.middle)
