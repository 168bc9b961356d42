"""The entries whose keys are nearest to a key that missed, field by field, for people to read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from treegen.autotune_cache.key import PolicyKey
from treegen.autotune_cache.listed_entries import Listed

_MOST_NEAREST = 3


def nearest_texts(key: PolicyKey, entries: Iterable[Listed], folder: Path) -> list[str]:
    """Returns lines about the entries that differ from a key in the fewest fields, with the differing fields."""
    valid = [(listed, listed.entry) for listed in entries if listed.entry is not None]
    valid.sort(key=lambda pair: _distance(key, pair[1].key))
    if not valid:
        return [f"no entries in {folder}, and none are shipped"]
    lines = []
    for listed, entry in valid[:_MOST_NEAREST]:
        differing = _differing(key, entry.key)
        differ = f"differs in {len(differing)} of {len(fields(key))} fields" if differing else "is the one asked for"
        lines.append(f"{listed.where} entry {listed.name[:12]} {differ}")
        lines += [f"  {name}: {getattr(key, name)}; the entry: {getattr(entry.key, name)}" for name in differing]
    return lines


def _differing(mine: PolicyKey, theirs: PolicyKey) -> list[str]:
    """Returns the names of the fields that differ."""
    return [field.name for field in fields(mine) if getattr(mine, field.name) != getattr(theirs, field.name)]


def _distance(mine: PolicyKey, theirs: PolicyKey) -> tuple[int, int]:
    """Returns the number of fields that differ, and of the parts of texts that differ in them."""
    differing = _differing(mine, theirs)
    parts = sum(
        len(set(str(getattr(mine, name)).split(", ")) ^ set(str(getattr(theirs, name)).split(", ")))
        for name in differing
    )
    return len(differing), parts
