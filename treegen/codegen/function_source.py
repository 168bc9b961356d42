"""The source of the constants and functions that emitted kernels share, as it stands in templates/.

It is read as text. Importing it would import Triton, which emission does without.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import NamedTuple

_FILES = ("kernel_functions.py", "ptx_functions.py")
_NAME = re.compile(r"\b[a-z]\w*(?=\()|\b[A-Z][A-Z0-9_]*\b")
"""Functions that are called, and constants."""


class Definition(NamedTuple):
    """A constant or a kernel function of module level. text: with the comment above it."""

    name: str
    text: str
    is_function: bool


def definitions_for(kernel: str) -> tuple[list[str], list[str]]:
    """Finds what a kernel's code uses of the shared definitions, directly and through others.

    Args:
        kernel: The kernel's code.

    Returns:
        The texts of the constants and of the functions, each in the order of the files.
    """
    shared = _shared()
    used: set[str] = set()
    waiting = [kernel]
    for text in waiting:  # grows while it is read
        found = {name for name in _names(text) if name in shared} - used
        used |= found
        waiting += (shared[name].text for name in found)
    taken = [definition for name, definition in shared.items() if name in used]
    return [each.text for each in taken if not each.is_function], [each.text for each in taken if each.is_function]


def _names(code: str) -> Iterator[str]:
    """Names in code, without comments: those of constants may name others."""
    for line in code.splitlines():
        yield from _NAME.findall(line.partition("#")[0])


@cache
def _shared() -> dict[str, Definition]:
    texts = (files("treegen.templates").joinpath(name).read_text("utf-8") for name in _FILES)
    return {each.name: each for text in texts for each in _definitions(text)}


def _definitions(text: str) -> Iterator[Definition]:
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            name, first = node.name, node.decorator_list[0].lineno
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, first = node.targets[0].id, node.lineno
        else:
            continue
        while lines[first - 2].startswith("#"):
            first -= 1
        yield Definition(name, "\n".join(lines[first - 1 : node.end_lineno]), isinstance(node, ast.FunctionDef))
