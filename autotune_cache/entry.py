"""Entries of the policy cache: what a policy was measured for, and what it was measured against, as strict JSON."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from numbers import Real
from types import MappingProxyType
from typing import Any

from treegen.autotune_cache.key import FORMAT, PolicyKey
from treegen.ir.errors import FormatError
from treegen.version import VERSION

PolicyValue = str | int | None | tuple[int, ...]
Policy = Mapping[str, PolicyValue]
"""A policy as data, never code: flat, of texts, whole numbers, None and tuples of whole numbers."""
Candidate = tuple[str, float | None, str]

KIND = "treegen policy"
MAX_BYTES = 256 * 1024
"""Of an entry's file. An entry within the limits below is always smaller."""
MAX_CANDIDATES = 250
_LONGEST_TEXT = 160
_MOST_PARAMETERS = 32
_MOST_NUMBERS = 16
_INT_DIGITS = 18
_MOST_US = 1e15
_FLOAT_CHARACTERS = 32
_DEEPEST = 6
_MEASURE_AGAIN = "remove the file; it is measured again"


@dataclass(frozen=True, slots=True)
class Entry:
    """The policy that was measured as the fastest for a key. Raises FormatError for a policy that is no policy.

    policy: at most 32 values; lists become tuples. measured_us: microseconds of the policy, None when it was chosen
    without a measurement. candidates: what it was compared with, as (policy, microseconds or None, outcome); the first
    250 are kept. source: the device and how was measured. made_with: versions of packages by name, as
    `installed_versions` gives them. Texts are kept as up to 160 characters of printable ASCII.
    """

    key: PolicyKey
    policy: Policy
    measured_us: float | None
    candidates: tuple[Candidate, ...] = ()
    source: str = ""
    made_with: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "policy", _checked_policy(self.policy))
        set_field(self, "measured_us", _microseconds(self.measured_us))
        candidates = tuple(
            (_plain(policy), _microseconds(time), _plain(outcome)) for policy, time, outcome in self.candidates
        )
        set_field(self, "candidates", candidates[:MAX_CANDIDATES])
        set_field(self, "source", _plain(self.source))
        made_with = {_plain(name): _plain(version) for name, version in list(self.made_with.items())[:_MOST_PARAMETERS]}
        set_field(self, "made_with", MappingProxyType(made_with))

    def to_object(self) -> dict[str, Any]:
        """Returns the JSON object that `entry_from` takes."""
        value = {
            "kind": KIND,
            "key": self.key.to_object(),
            "policy": {name: list(value) if isinstance(value, tuple) else value for name, value in self.policy.items()},
            "measured_us": self.measured_us,
            "source": self.source,
            "made_with": dict(self.made_with),
            "candidates": [list(candidate) for candidate in self.candidates],
        }
        return {**value, "checksum": _checksum(value)}

    def to_json(self) -> str:
        """Returns the text of the entry's file; equal entries have equal texts."""
        return json.dumps(self.to_object(), indent=1) + "\n"

    @classmethod
    def from_json(cls, data: bytes, digest: str) -> Entry:
        """The inverse of `to_json`, of a file whose name carries this key digest. Raises FormatError for all else."""
        entry = entry_from(bounded_json(data))
        if entry.key.digest != digest:
            raise _wrong("key", entry.key.digest, "is not the one of the file's name")
        return entry


def policy_text(policy: Policy) -> str:
    """A policy on one line: `name=value name=value`."""
    return " ".join(f"{name}={_value_text(value)}" for name, value in policy.items())


def _value_text(value: PolicyValue) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else "none" if value is None else str(value)


def entry_from(value: Any) -> Entry:
    """The entry in a JSON object: exactly what `Entry.to_object` gives. Raises FormatError for all else."""
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise _wrong("entry", "a value", f"is not a {KIND}")
    key, candidates = value.get("key"), value.get("candidates")
    if not isinstance(key, dict):
        raise _wrong("key", "a value", "is not an object")
    check_format(key)
    if set(value) != _NAMES:
        raise _wrong("entry", ", ".join(sorted(set(value) ^ _NAMES)), "are fields that lack or are unknown")
    if set(key) != _KEY_NAMES:
        raise _wrong("key", "a value", "lacks fields or has unknown ones")
    if not isinstance(value["policy"], dict) or not isinstance(value["made_with"], dict):
        raise _wrong("policy, made_with", "a value", "is not an object")
    if not isinstance(candidates, list) or not all(isinstance(each, list) and len(each) == 3 for each in candidates):
        raise _wrong("candidates", "a value", "are not a list of policies, times and outcomes")
    if value["checksum"] != _checksum({name: part for name, part in value.items() if name != "checksum"}):
        raise _wrong("checksum", value["checksum"], "does not match the entry")
    entry = own_entry(PolicyKey(**key), value)
    if entry.to_object() != value:
        raise _wrong("entry", "a value", "holds times or texts that treegen does not write")
    return entry


def own_entry(key: PolicyKey, value: dict[str, Any]) -> Entry:
    """Returns the entry of a key in a JSON object of `Entry.to_object` whose checksum fits, or is not needed."""
    others = value["measured_us"], tuple(map(tuple, value["candidates"])), value["source"], value["made_with"]
    return Entry(key, value["policy"], *others)


_NAMES = frozenset({"kind", "checksum", *(each.name for each in fields(Entry))})
_KEY_NAMES = frozenset(each.name for each in fields(PolicyKey))


def _checksum(value: Mapping[str, Any]) -> str:
    """Returns 32 hexadecimal digits that change with any part of a JSON object."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def installed_versions() -> dict[str, str]:
    """Returns the versions of treegen and, as major.minor, of Triton and torch, which are not imported for it.

    "none" stands for a package that is not installed.
    """
    return {"treegen": VERSION, "triton": _installed("triton"), "torch": _installed("torch")}


@cache
def _installed(package: str) -> str:
    try:
        return ".".join(version(package).split(".")[:2])
    except PackageNotFoundError:
        return "none"


def differing_versions(entry: Entry) -> list[str]:
    """Returns a text for each package whose version differs from the one that an entry was measured with."""
    here = installed_versions()
    return [f"{name} {made}, here {here.get(name)}" for name, made in entry.made_with.items() if made != here.get(name)]


def check_format(value: Mapping[str, Any]) -> None:
    """Raises FormatError unless a JSON object is of this version's format."""
    found = value.get("format")
    if type(found) is not int or found != FORMAT:
        newer = type(found) is int and found > FORMAT
        reason = f"is newer than {FORMAT}, which this treegen reads" if newer else f"is not {FORMAT}"
        raise FormatError("format", found, reason, "upgrade treegen, or remove the file" if newer else _MEASURE_AGAIN)


def bounded_json(data: bytes) -> Any:
    """Any JSON value, with what makes parsers slow, deep or ambiguous refused. Raises FormatError.

    Refused are nesting deeper than entries are (before it is parsed, whatever the recursion limit is), numbers of more
    digits than any of ours, NaN, Infinity, and objects with a name twice.
    """
    try:
        text = data.decode()
        # With escaped characters gone, every second piece between quotes is outside of strings.
        outside = "".join(re.sub(r"\\.", "", text, flags=re.DOTALL).split('"')[::2])
        steps = (1 if mark in "[{" else -1 for mark in re.findall(r"[\[\]{}]", outside))
        if max(accumulate(steps), default=0) > _DEEPEST:
            raise ValueError("nested too deeply")
        return json.loads(
            text, parse_int=_int, parse_float=_float, parse_constant=_constant, object_pairs_hook=_distinct
        )
    except (ValueError, RecursionError) as cause:
        reason = "not UTF-8" if isinstance(cause, UnicodeDecodeError) else str(cause)
        raise _wrong("text", f"{len(data)} bytes", f"is not JSON of ours ({reason})") from cause


def _int(text: str) -> int:
    if len(text) > _INT_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    if len(text) > _FLOAT_CHARACTERS or not math.isfinite(float(text)):
        raise ValueError("a number out of range")
    return float(text)


def _constant(text: str) -> None:
    raise ValueError(f"{text} for a number")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name twice in one object")
    return result


def _wrong(argument: str, value: object, reason: str) -> FormatError:
    return FormatError(argument, value, reason, _MEASURE_AGAIN)


def _plain(text: object) -> str:
    """A text without control and non-ASCII characters, its end cut off beyond 160 characters."""
    if not isinstance(text, str):
        return ""
    if len(text) <= _LONGEST_TEXT and text.isascii() and text.isprintable():
        return text
    line = re.sub(r"[^ -~]", "?", " ".join(text.split()).encode("ascii", "backslashreplace").decode())
    return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 3] + "..."


def _microseconds(time: object) -> float | None:
    number = -1.0
    if isinstance(time, float) or (isinstance(time, Real) and not isinstance(time, bool)):
        number = float(time)
    return number if 0 <= number < _MOST_US else None


def _checked_policy(policy: object) -> Policy:
    fix = "give a flat mapping of names to texts, whole numbers, None or lists of whole numbers"
    if not isinstance(policy, Mapping) or len(policy) > _MOST_PARAMETERS:
        raise FormatError("policy", policy, f"is not a mapping of at most {_MOST_PARAMETERS} values", fix)
    result: dict[str, PolicyValue] = {}
    for name, value in policy.items():
        if not isinstance(name, str) or name != _plain(name) or not name:
            raise FormatError("policy", name, "has a name that is not short printable ASCII", fix)
        given = tuple(value) if isinstance(value, list) else value
        numbers = given if isinstance(given, tuple) else () if given is None or isinstance(given, str) else (given,)
        whole = all(type(number) is int and abs(number) < 10 ** (_INT_DIGITS - 1) for number in numbers)
        if not whole or len(numbers) > _MOST_NUMBERS or (isinstance(given, str) and given != _plain(given)):
            raise FormatError(f"policy.{name}", value, "is not a value of a policy", fix)
        result[name] = given
    return MappingProxyType(result)
