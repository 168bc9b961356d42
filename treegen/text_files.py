"""Reads and writes text files, with errors that name the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treegen.ir.errors import FormatError, TreegenError

_LONGEST_SHOWN = 60


def save_text(path: str | Path, text: str) -> None:
    """Writes a file in one piece: readers see the old text or the new. Raises FormatError if it cannot be written."""
    check_path(path)
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            # A pipe or a device is written to, and must not be replaced.
            Path(path).write_text(text, encoding="utf-8")
            return
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with open(temporary, "x", encoding="utf-8", newline="\n") as file:
                file.write(text)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as cause:
        reason = f"cannot be written ({cause.strerror})" if isinstance(cause, OSError) else "is not the name of a file"
        raise FormatError("path", shown(path), reason, "name another file") from cause


def check_path(path: object) -> None:
    """Raises FormatError unless `path` is a str or a path object."""
    if not isinstance(path, str | os.PathLike):
        raise FormatError("path", path, "is not a path", "give a str or a pathlib.Path")


def shown(path: str | Path) -> str:
    """Shortens a long path for an error message to its end, which tells files apart."""
    text = str(path)
    return text if len(text) <= _LONGEST_SHOWN else f"...{text[3 - _LONGEST_SHOWN :]}"


def read_text(path: str | Path) -> str:
    """Reads a file's text. Raises FormatError."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as cause:
        raise FormatError("path", shown(path), "does not exist", "name a file") from cause
    except OSError as cause:
        raise FormatError("path", shown(path), f"cannot be read ({cause.strerror})", "name a readable file") from cause
    except ValueError as cause:
        reason = "is not UTF-8 text" if isinstance(cause, UnicodeDecodeError) else "is not the name of a file"
        raise FormatError("path", shown(path), reason, "name a text file") from cause


def parsed_json(text: str, path: str | Path) -> Any:
    """Parses the JSON text of a file. Raises FormatError, which names the file."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as cause:  # ValueError: also an integer of thousands of digits
        raise FormatError("path", shown(path), f"is not complete JSON ({cause})", "write the file again") from cause


@contextmanager
def inside(place: str | Path) -> Iterator[None]:
    """Puts the file's name in front of the argument in errors of the block."""
    try:
        yield
    except TreegenError as error:
        raise type(error)(f"{place}: {error.argument}", error.value, error.reason, error.fix) from error
