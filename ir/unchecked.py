"""Instances of frozen dataclasses without their checks, for values that treegen itself has made.

An engine plans at every decoding step, and what plans and schedules check at their public constructors takes longer
than making them. Tests hold what is made here to the constructors' checks.
"""

from __future__ import annotations

from typing import Any, TypeVar

Made = TypeVar("Made")


def unchecked(cls: type[Made], fields: dict[str, Any]) -> Made:
    """An instance of a frozen dataclass without slots, of all its fields by name."""
    made = object.__new__(cls)
    object.__setattr__(made, "__dict__", fields)
    return made
