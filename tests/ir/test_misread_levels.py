"""Texts that are nearly in the level form: the error points at the first character that does not fit."""

import pytest

from support.rejections import rejected
from treegen import Tree
from treegen.ir.errors import FormatError


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        ("1,4/10,-1", "a number of tokens", "'-' at position 7"),
        ("1,-4/10,1", "a number of nodes", "'-' at position 2"),
        ("1,4/10,1.5", "',' or the end", "'.' at position 8"),
        ("1,4//10,1", "a number of tokens", "'/' at position 4"),
        ("1,4/10,", "a number of tokens", "the end"),
        ("1,4/10,1/3", "',' or the end", "'/' at position 8"),
        ("1 , 4 / 10 , x", "a number of tokens", "'x' at position 13"),
        ("1,4(2)/10", "',' or '/'", "'(' at position 3"),
        ("1_", "a number of tokens", "the end"),
    ],
)
def test_the_first_mistake(text: str, expected: str, found: str) -> None:
    rejected(lambda: Tree.parse(text), FormatError, f"tree = {text}: expected {expected}, found {found}")
