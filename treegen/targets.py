"""Targets as data: what plans need to know about a device."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from treegen.ir.errors import BackendError


@dataclass(frozen=True, slots=True)
class Target:
    """A device. capability: compute capability times ten (0: no GPU); shared_bytes: shared memory of one block, at
    most.
    """

    name: str
    capability: int
    sms: int
    shared_bytes: int
    shared_bytes_per_sm: int


@cache
def targets() -> dict[str, Target]:
    """The shipped targets by name."""
    table = json.loads(files("treegen").joinpath("targets.json").read_text(encoding="utf-8"))
    names = [field.name for field in fields(Target)]
    return {entry["name"]: Target(**{name: entry[name] for name in names}) for entry in table["targets"]}


DEFAULT_TARGET = "h200"


def target_from(target: str | Target | None) -> Target:
    """The target of this name (default h200), or the object itself. Raises BackendError."""
    if isinstance(target, Target):
        return target
    name = DEFAULT_TARGET if target is None else target
    if not isinstance(name, str) or name not in targets():
        raise BackendError("target", name, "is not known", f"use one of {', '.join(targets())}")
    return targets()[name]
