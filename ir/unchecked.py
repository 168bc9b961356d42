"""Instances of frozen dataclasses without their checks, for values that treegen itself has made.

An engine plans at every decoding step, and what plans and schedules check at their public constructors takes longer
than making them. Tests hold what is made here to the constructors' checks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

Made = TypeVar("Made")


def unchecked(cls: type[Made], *values: Any) -> Made:
    """An instance of a frozen dataclass with slots, of the values of all its fields in order."""
    made = object.__new__(cls)
    for set_field, value in zip(_setters(cls), values, strict=True):
        set_field(made, value)
    return made


@cache
def _setters(cls: type[Any]) -> tuple[Callable[[Any, Any], None], ...]:
    """What sets the fields of a class with slots, in order."""
    return tuple(getattr(cls, name).__set__ for name in cls.__slots__)
