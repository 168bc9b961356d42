"""Checks of single options: names out of a list, and numbers."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import numpy as np


def is_one_of(value: object, known: Collection[str]) -> bool:
    """Tells whether the value is one of these names; a value that is no text, such as an array, is not."""
    return isinstance(value, str) and value in known


def plain_number(value: Any) -> Any:
    """Returns a number of NumPy as one of Python, and anything else as it is."""
    return value.item() if isinstance(value, np.number) else value


def is_finite(value: object) -> bool:
    """Tells whether the value is a number that a float holds, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
