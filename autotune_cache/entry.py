"""Entries of the policy cache: the policy, its key, and the candidates that it was compared with, as strict JSON."""

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
"""A policy as data, never code: a flat mapping to texts, whole numbers, None and tuples of whole numbers."""
Candidate = tuple[str, float | None, str]

KIND = "treegen policy"
MAX_BYTES = 256 * 1024
"""The most bytes of an entry's file. An entry within the limits below is always smaller."""
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
    """The policy that was measured as the fastest for a key.

    Texts are kept as up to 160 characters of printable ASCII.

    Attributes:
        key: The key.
        policy: At most 32 values; lists become tuples.
        measured_us: Microseconds of the policy; None if it was chosen without a measurement.
        candidates: The candidates that it was compared with, as (policy, microseconds or None, outcome); the first 250
            are kept.
        source: The device, and the way of measuring.
        made_with: Versions of packages by name, as `installed_versions` returns them.

    Raises:
        FormatError: `policy` is no policy.
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
        return {**value, "checksum": checksum(value)}

    def to_json(self) -> str:
        """Returns the text of the entry's file; equal entries have equal texts."""
        return json.dumps(self.to_object(), indent=1) + "\n"

    @classmethod
    def from_json(cls, data: bytes, digest: str) -> Entry:
        """Returns the entry of a file whose name carries this key digest; the inverse of `to_json`.

        Raises FormatError for anything else.
        """
        entry = entry_from(bounded_json(data))
        if entry.key.digest != digest:
            raise _wrong("key", entry.key.digest, "is not the one of the file's name")
        return entry


def policy_text(policy: Policy) -> str:
    """Returns a policy on one line: `name=value name=value`."""
    return " ".join(f"{name}={_value_text(value)}" for name, value in policy.items())


def _value_text(value: PolicyValue) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else "none" if value is None else str(value)


def entry_from(value: Any) -> Entry:
    """Returns the entry of a JSON object, which has to be exactly as `Entry.to_object` writes it.

    Raises FormatError for any other.
    """
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
    if value["checksum"] != checksum({name: part for name, part in value.items() if name != "checksum"}):
        raise _wrong("checksum", value["checksum"], "does not match the entry")
    entry = own_entry(PolicyKey(**key), value)
    if entry.to_object() != value:
        raise _wrong("entry", "a value", "holds times or texts that treegen does not write")
    return entry


def own_entry(key: PolicyKey, value: dict[str, Any]) -> Entry:
    """Returns the entry of a key in a JSON object of `Entry.to_object`; its checksum fits, or is not needed."""
    others = value["measured_us"], tuple(map(tuple, value["candidates"])), value["source"], value["made_with"]
    return Entry(key, value["policy"], *others)


_NAMES = frozenset({"kind", "checksum", *(each.name for each in fields(Entry))})
_KEY_NAMES = frozenset(each.name for each in fields(PolicyKey))


def checksum(value: Mapping[str, Any]) -> str:
    """Returns 32 hexadecimal digits that change with any part of a JSON object."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def installed_versions() -> dict[str, str]:
    """Returns the versions of treegen, and as major.minor of Triton and torch, without importing these.

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
    """Returns any JSON value, refusing texts that make parsers slow, deep or ambiguous. Raises FormatError.

    Refused are nesting deeper than entries have (before parsing, whatever the recursion limit is), numbers with more
    digits than any of treegen's, NaN, Infinity, and objects with a name twice.
    """
    try:
        text = data.decode()
        # Without escaped characters, every second piece between quotes is outside of strings.
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
    """Returns a text without control and non-ASCII characters, cut after 160 characters."""
    if not isinstance(text, str):
        return ""
    if len(text) <= _LONGEST_TEXT and text.isascii() and text.isprintable():
        return text
    line = re.sub(r"[^ -~]", "?", " ".join(text.split()).encode("ascii", "backslashreplace").decode())
    return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 3] + "..."


def _microseconds(time: object) -> float | None:
    """Returns a time as a float; None if it is no time."""
    number = -1.0
    if isinstance(time, float) or (isinstance(time, Real) and not isinstance(time, bool)):
        number = float(time)
    return number if 0 <= number < _MOST_US else None


def _checked_policy(policy: object) -> Policy:
    """Returns a policy as a read-only mapping. Raises FormatError for anything else."""
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
