"""Checks of single options: names out of a list, and numbers that a float holds."""

from __future__ import annotations

import sys
from collections.abc import Collection


def is_one_of(value: object, known: Collection[str]) -> bool:
    """Whether this is one of some names; what is no text, such as an array, is none."""
    return isinstance(value, str) and value in known


def is_finite(value: object) -> bool:
    """Whether this is a number that a float holds, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
