"""Instances of frozen dataclasses without their checks, for values that treegen itself has made.

An engine plans at every decoding step, and the checks of public constructors take longer than making a plan or a
schedule. Tests hold unchecked values to the constructors' checks.
"""

from __future__ import annotations

from typing import Any, TypeVar

Made = TypeVar("Made")


def unchecked(cls: type[Made], fields: dict[str, Any]) -> Made:
    """Makes an instance of a frozen dataclass without slots from all of its fields by name."""
    made = object.__new__(cls)
    object.__setattr__(made, "__dict__", fields)
    return made
