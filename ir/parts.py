"""Results that are made in parts: between two parts the caller does other work."""

from __future__ import annotations

from collections.abc import Generator
from itertools import count
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")

InParts: TypeAlias = Generator[None, None, _T]
"""Yields between parts, and returns the result."""


def go_on(parts: InParts[_T], most: int | None = None) -> _T | None:
    """Makes the next parts, by default all, and returns the result after the last one. most: the most parts to make."""
    try:
        for _ in count() if most is None else range(most):
            next(parts)
    except StopIteration as done:
        result: _T = done.value
        return result
    return None
