"""Entries of the policy cache as lists show them, and the reading of their files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from treegen.autotune_cache.entry import MAX_BYTES, Entry
from treegen.autotune_cache.store import read_regular
from treegen.ir.errors import FormatError

if TYPE_CHECKING:
    from importlib.abc import Traversable

Where = Literal["memory", "user", "shipped", "made", "none"]
ENTRY_NAME = re.compile(r"[0-9a-f]{64}\.json")


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of the user's folder, or an entry of a shipped file.

    Attributes:
        name: The name of the file, or the digest of a shipped entry's key.
        where: "user" or "shipped".
        entry: The entry, None if there is none.
        reason: The reason why there is none.
    """

    name: str
    where: Where
    entry: Entry | None
    reason: str = ""


def read_entry(path: Path, digest: str) -> tuple[Entry | None, str]:
    """Returns the entry of a file; or None and the reason, which is empty when there is no file."""
    try:
        return Entry.from_json(read_regular(path, MAX_BYTES), digest), ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as cause:
        return None, f"cannot be read ({os_reason(cause)})"
    except FormatError as error:
        return None, invalid_text(error)
    except ValueError as cause:
        return None, str(cause)


def listed_files(folder: Path) -> Iterator[Listed]:
    """Yields the files of the user's folder by name; temporaries and locks are left out."""
    for name in file_names(folder):
        if ENTRY_NAME.fullmatch(name):
            yield Listed(name, "user", *read_entry(folder / name, name.removesuffix(".json")))
        elif name.endswith(".json"):
            yield Listed(name, "user", None, "is not named by a digest")


def file_names(folder: Traversable) -> list[str]:
    """Returns the names in a folder, sorted; none if it cannot be read."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def os_reason(cause: OSError) -> str:
    """Returns the text of an operating system's error."""
    return cause.strerror or type(cause).__name__


def invalid_text(error: FormatError) -> str:
    """Returns the reason why an entry is not valid."""
    return f"is not valid: {error.argument} {error.reason}"
