"""Comparison of values that hold NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def differences(made: Any, known: Any, path: str = "") -> Iterator[str]:
    """Yields where two values differ, of NumPy arrays in type and entries."""
    if isinstance(known, np.ndarray):
        alike = (
            made.shape == known.shape and made.dtype == known.dtype and made.flags.writeable == known.flags.writeable
        )
        if not (alike and np.array_equal(made, known)):
            yield f"{path}: {made!r} instead of {known!r}"
    elif is_dataclass(known) or isinstance(known, tuple):
        if type(made) is not type(known):
            yield f"{path}: {type(made)} instead of {type(known)}"
            return
        names = [field.name for field in fields(known)] if is_dataclass(known) else range(len(known))
        for name in names:
            ours, theirs = (getattr(v, name) if is_dataclass(known) else v[name] for v in (made, known))
            yield from differences(ours, theirs, f"{path}.{name}")
    elif made != known:
        yield f"{path}: {made!r} instead of {known!r}"


def check(made: Any, known: Any) -> None:
    assert not list(differences(made, known))
