"""Instances of frozen dataclasses without their checks, for values that treegen itself has made.

An engine plans at every decoding step, and what plans and schedules check at their public constructors takes longer
than making them. Tests hold what is made here to the constructors' checks.
"""

from __future__ import annotations

from typing import Any, TypeVar

Made = TypeVar("Made")


def unchecked(cls: type[Made], *values: Any) -> Made:
    """An instance of a frozen dataclass with slots, of the values of all its fields in order."""
    made = object.__new__(cls)
    for name, value in zip(cls.__slots__, values, strict=True):  # type: ignore[attr-defined]
        object.__setattr__(made, name, value)
    return made
