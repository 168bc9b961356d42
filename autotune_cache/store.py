"""Atomic file writing into the cache folder: a reader sees a whole file or none, whoever else writes."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path

from treegen.environment import cache_root
from treegen.ir.errors import CacheWarning


@cache
def _private_folder() -> Path:
    """A temporary folder for this process alone, removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="treegen-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _warn_unwritable(folder: Path, cause: str) -> None:
    warnings.warn(
        f"cache folder {folder} cannot be written ({cause}): using a private temporary folder; "
        "set TREEGEN_CACHE_DIR to a writable folder",
        CacheWarning,
        stacklevel=2,
    )


def write_text(folder: str, name: str, text: str) -> Path:
    """Puts a file into a subfolder of the cache and returns its path.

    A file that already holds exactly this text is left alone, any other is replaced atomically. When the cache cannot
    be written the file goes into a private temporary folder, with one warning.
    """
    try:
        return _write(cache_root() / folder, name, text)
    except OSError as cause:
        _warn_unwritable(cache_root(), type(cause).__name__)
        return _write(_private_folder() / folder, name, text)


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
