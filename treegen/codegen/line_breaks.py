"""Long lines of emitted code, broken at their brackets as a formatter breaks them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

MOST_COLUMNS = 100
"""Length of a line of an emitted module, at most."""

_STATEMENT = re.compile(r"( *)((?:[\w, ]+(?:: [\w.]+)? = )?)(.*)")
_LEVELS = (
    ("or ",), ("and ",), ("== ", "!= ", "<= ", ">= ", "< ", "> "), ("| ",), ("^ ",), ("& ",), ("<< ", ">> "),
    ("+ ", "- "), ("* ", "/ ", "// ", "% "),
)  # fmt: skip
"""Operators that lines break in front of, those that bind least first."""


def broken(code: str) -> str:
    """Breaks lines of over MOST_COLUMNS.

    Args:
        code: Lines of Python. Only docstrings and comments on lines of their own hold brackets that are no code.

    Returns:
        The same code. Lines without brackets, comments and the first lines of docstrings stay as long as they are.
    """
    return "\n".join(piece for line in code.split("\n") for piece in _statement(line))


def _statement(line: str) -> Iterator[str]:
    found = _STATEMENT.fullmatch(line)
    if _fits(line) or found is None or found[3].startswith(("#", '"""')):
        yield line
        return
    indent, target, value = found.groups()
    if target and any(len(_before(value, operators)) > 1 for operators in _LEVELS):
        yield f"{indent}{target}("
        yield from _expression(value, f"{indent}    ")
        yield f"{indent})"
    else:
        yield from _call(value, indent, target)


def _expression(text: str, indent: str) -> Iterator[str]:
    """The lines of what stands between brackets."""
    if _fits(indent + text):
        yield indent + text
        return
    for pieces in (_behind_commas(text), *(_before(text, operators) for operators in _LEVELS)):
        if len(pieces) > 1:
            for piece in pieces:
                yield from _expression(piece, indent)
            return
    yield from _call(text, indent)


def _call(text: str, indent: str, target: str = "") -> Iterator[str]:
    """The lines of an expression that is broken at its longest pair of brackets."""
    pairs = list(_pairs(text))
    if not pairs:
        yield indent + target + text
        return
    first, last = max(pairs, key=lambda pair: pair[1] - pair[0])
    yield indent + target + text[: first + 1]
    yield from _expression(text[first + 1 : last], f"{indent}    ")
    yield indent + text[last:]


def _fits(line: str) -> bool:
    return len(line) <= MOST_COLUMNS


def _behind_commas(text: str) -> list[str]:
    """Items of a list, each with a comma behind it."""
    cuts = [place + 1 for place, char in _outside(text) if char == ","]
    pieces = [piece.removesuffix(",") for piece in _cut(text, cuts)]
    return [f"{piece}," for piece in pieces if piece] if cuts else [text]


def _before(text: str, operators: tuple[str, ...]) -> list[str]:
    """Operands, all but the first with one of these operators in front of them."""
    cuts = [place for place, char in _outside(text) if char == " " and text.startswith(operators, place + 1)]
    return _cut(text, cuts)


def _cut(text: str, cuts: list[int]) -> list[str]:
    return [text[first:last].strip() for first, last in pairwise([0, *cuts, len(text)])]


def _outside(text: str) -> Iterator[tuple[int, str]]:
    """The places and characters that are outside of brackets."""
    depth = 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            yield place, char


def _pairs(text: str) -> Iterator[tuple[int, int]]:
    """The places of brackets that are in no others, in pairs."""
    depth = begin = 0
    for place, char in enumerate(text):
        if char in "([{":
            begin = begin if depth else place
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                yield begin, place
