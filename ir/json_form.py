"""The frame that all JSON forms share: a kind, a format version, known fields only."""

from __future__ import annotations

import json
from typing import Any

from treegen.ir.errors import FormatError

FORMAT = 1


def read_object(text: str, kind: str, fields: frozenset[str], required: frozenset[str]) -> dict[str, Any]:
    """The fields of a JSON object of this kind; raises FormatError for anything else, a future version included."""
    if not isinstance(text, str):
        raise FormatError(kind, text, "is not a text", "give what to_json returned")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as cause:
        # Not only broken text: nesting and numbers can be too deep and too long for Python to read.
        where = f" ({cause.msg} at position {cause.pos})" if isinstance(cause, json.JSONDecodeError) else ""
        raise FormatError(kind, text[:40], f"is not complete JSON{where}", "write it again with to_json") from cause
    if not isinstance(value, dict):
        raise FormatError(kind, text[:40], "is not a JSON object", "write it with to_json")
    version = value.pop("format", None)
    if type(version) is not int or version < 1:
        raise FormatError(f"{kind}.format", version, "is not a format version", f"give {FORMAT}")
    if version > FORMAT:
        raise FormatError(f"{kind}.format", version, f"is newer than {FORMAT}", "upgrade treegen")
    if value.pop("kind", kind) != kind:
        raise FormatError(f"{kind}.kind", text[:40], f"is another kind than {kind!r}", f"give a {kind}")
    unknown = sorted(value.keys() - fields)
    if unknown:
        raise FormatError(f"{kind}.{unknown[0]}", value[unknown[0]], "is an unknown field", f"use {sorted(fields)}")
    missing = sorted(required - value.keys())
    if missing:
        raise FormatError(f"{kind}.{missing[0]}", None, "is missing", "write the whole form")
    return value


def write_object(kind: str, fields: dict[str, Any]) -> str:
    """The JSON text of these fields with kind and format version in front."""
    return json.dumps({"format": FORMAT, "kind": kind, **fields}, separators=(",", ":"))
