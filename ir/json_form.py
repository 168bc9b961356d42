"""The frame that all JSON forms share: a kind, a format version, and known fields only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from treegen.ir.arrays import INT32_MAX, Ints, int32_array
from treegen.ir.errors import FormatError, PlanError

FORMAT = 1
_NONE: Mapping[str, str] = MappingProxyType({})


def read_object(
    text: str, kind: str, fields: frozenset[str], required: frozenset[str], earlier: Mapping[str, str] = _NONE
) -> dict[str, Any]:
    """Returns the fields of a JSON object of this kind.

    Args:
        text: The JSON text.
        kind: The kind that the object has to be, as `write_object` wrote it.
        fields: The names of all known fields.
        required: The names of the fields that must be there.
        earlier: The present names of fields that had other names, by these.

    Raises:
        FormatError: The text is no such object, or a newer version of treegen wrote it.
    """
    if not isinstance(text, str):
        raise FormatError(kind, text, "is not a text", "give what to_json returned")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as cause:
        # Besides broken text, nesting can be too deep and a number too long for Python to read.
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
    value = renamed(value, earlier)
    unknown = sorted(value.keys() - fields)
    if unknown:
        raise FormatError(f"{kind}.{unknown[0]}", value[unknown[0]], "is an unknown field", f"use {sorted(fields)}")
    missing = sorted(required - value.keys())
    if missing:
        raise FormatError(f"{kind}.{missing[0]}", None, "is missing", "write the whole form")
    return value


def renamed(value: Mapping[str, Any], earlier: Mapping[str, str]) -> dict[str, Any]:
    """Returns an object with the present names of its fields; a present name wins over an earlier one."""
    return {
        earlier.get(name, name): entry for name, entry in sorted(value.items(), key=lambda each: each[0] not in earlier)
    }


def write_object(kind: str, fields: dict[str, Any]) -> str:
    """Returns the JSON text of these fields, with the format version and the kind in front."""
    return json.dumps({"format": FORMAT, "kind": kind, **fields}, separators=(",", ":"))


def checked_ints(argument: str, value: Any) -> Ints:
    """Returns a JSON list of int32 values as an array. Raises PlanError."""
    if not isinstance(value, list):
        raise PlanError(argument, value, "is not a list", "give integers")
    return int32_array(argument, value, low=-INT32_MAX, error=PlanError)
