"""Files of the cache folder: written atomically (a reader sees a whole file or none), read within bounds."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from treegen.autotune_cache.folders import cache_folder, make_folder, private_folder, warn_once
from treegen.environment import cache_root

WRITABLE = "set TREEGEN_CACHE_DIR to a writable folder"


def write_text(folder: str, name: str, text: str) -> Path:
    """Puts a file into a folder of the cache ("kernels") and returns its path.

    A file that already holds exactly this text is left alone; any other is replaced atomically. When the cache cannot
    be written or is not safe to use, the file goes into a private temporary folder, with one warning.
    """
    try:
        return replace_text(cache_folder(folder), name, text)
    except OSError as cause:
        reason = f"cannot be written ({cause.strerror or type(cause).__name__}): using a private temporary folder"
        warn_once(cache_root(), reason, WRITABLE)
        return replace_text(private_folder() / folder, name, text)


def replace_text(folder: Path, name: str, text: str) -> Path:
    """Puts a file into a folder, which is made if it is missing, and returns the file's path. Raises OSError.

    A process that dies on the way leaves at most a temporary file `.<name>.<random>`.
    """
    path = folder / name
    data = text.encode()
    if _holds(path, data):
        return path
    make_folder(folder)
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


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Returns the content of a regular file. Raises OSError, or ValueError for a larger file and for anything else.

    It neither waits for nor reads a pipe or a device in the file's place.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("is not a regular file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    finally:
        os.close(handle)
    if len(data) > most_bytes:
        raise ValueError(f"is larger than {most_bytes} bytes")
    return data


def _holds(path: Path, data: bytes) -> bool:
    """Tells whether a file holds exactly these bytes."""
    try:
        return read_regular(path, len(data)) == data
    except (OSError, ValueError):
        return False
