"""Files of several policies: the shipped policies of a GPU, and exports of `treegen cache export`.

A file is one JSON object. Each entry has a line of its own, and lines are sorted by key, so that a changed policy is
one changed line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from treegen.autotune_cache.entry import Entry, bounded_json, check_format, own_entry
from treegen.autotune_cache.key import FORMAT, PolicyKey
from treegen.autotune_cache.store import read_regular
from treegen.ir.errors import FormatError

FILE_KIND = "treegen policies"
_MOST_CANDIDATES = 3
"""The most candidates of an entry, so that lines stay readable. The user's own folder has all of them."""
_MOST_BYTES = 64 * 1024 * 1024
_FIX_SHIPPED = "install treegen again"
_FIX = "name a file of `treegen cache export`"


def file_text(entries: Iterable[Entry]) -> str:
    """Returns the text of a file of these entries, each with its fastest candidates; equal entries give equal texts."""
    ordered = sorted(entries, key=lambda entry: (entry.key.target, entry.key.shape, entry.key.bucket, entry.key.digest))
    lines = ",\n".join(json.dumps(_shortened(entry).to_object()) for entry in ordered)
    return f'{{"kind": "{FILE_KIND}", "format": {FORMAT}, "entries": [\n{lines}\n]}}\n'


class PolicyFile:
    """The entries of a shipped file. Each is checked on access."""

    def __init__(self, text: str) -> None:
        """Reads a file's text. Raises ValueError, KeyError or TypeError if `file_text` did not make it."""
        self._objects = {_values(each["key"]): each for each in json.loads(text)["entries"]}

    def entry(self, key: PolicyKey) -> Entry | None:
        """Returns the entry of a key, None if there is none. Raises FormatError for a damaged one."""
        found = self._objects.get(_values(key.to_object()))
        return None if found is None else _entry(key, found)

    def entries(self) -> list[Entry | FormatError]:
        """Returns all entries in the file's order, and in place of a damaged one the error."""
        return [_entry_or_error(each) for each in self._objects.values()]


def exported(path: Path) -> list[Any]:
    """Returns the entries of a file as JSON objects, not yet checked. Raises FormatError for any other file."""
    try:
        value = bounded_json(read_regular(path, _MOST_BYTES))
    except OSError as cause:
        reason = f"cannot be read ({cause.strerror or type(cause).__name__})"
        raise FormatError("path", str(path), reason, "name a readable file") from cause
    except FormatError as error:
        raise FormatError("path", str(path), error.reason, _FIX) from error
    except ValueError as cause:
        raise FormatError("path", str(path), str(cause), _FIX) from cause
    if not isinstance(value, dict) or set(value) != {"kind", "format", "entries"} or value["kind"] != FILE_KIND:
        raise FormatError("path", str(path), f"does not hold {FILE_KIND}", _FIX)
    check_format(value)
    if not isinstance(value["entries"], list):
        raise FormatError("path", str(path), "has no list of entries", _FIX)
    return value["entries"]


def _shortened(entry: Entry) -> Entry:
    """Returns an entry with its fastest candidates only."""
    fastest = sorted(entry.candidates, key=lambda candidate: math.inf if candidate[1] is None else candidate[1])
    return replace(entry, candidates=tuple(fastest[:_MOST_CANDIDATES]))


def _values(key: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(key.values())


def _entry(key: PolicyKey, value: dict[str, Any]) -> Entry:
    try:
        return own_entry(key, value)
    except (KeyError, TypeError, AttributeError) as cause:
        raise FormatError("entry", key.bucket, f"is damaged ({type(cause).__name__})", _FIX_SHIPPED) from cause


def _entry_or_error(value: dict[str, Any]) -> Entry | FormatError:
    try:
        return _entry(PolicyKey(**value["key"]), value)
    except TypeError as cause:
        return FormatError("key", value["key"], f"is damaged ({cause})", _FIX_SHIPPED)
    except FormatError as error:
        return error
