"""A lock in a file for one process at a time; the operating system releases it when its holder dies."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    HAS_FLOCK = False
else:
    HAS_FLOCK = True

ABANDONED_S = 600.0
_SHORTEST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
_Release = Callable[[], None]


@contextmanager
def held(path: Path, wait_s: float) -> Iterator[bool]:
    """Holds the lock in a file of an existing folder while the body runs; the file is gone afterwards.

    Yields whether the lock is held: False after waiting `wait_s` seconds, so that a holder that hangs stops nobody for
    ever. Raises OSError where no file can be made or the file system has no locks.

    Without flock the file itself is the lock. A crash leaves it there, and it counts as abandoned after ten minutes.
    Two processes that find it abandoned at the same moment may both hold the lock for once.
    """
    release = _acquire(path, wait_s)
    try:
        yield release is not None
    finally:
        if release is not None:
            release()


def _acquire(path: Path, wait_s: float) -> _Release | None:
    """Returns a function that releases the lock; None if it was not free for `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    pause = _SHORTEST_PAUSE_S
    while True:
        release = _try_flock(path) if HAS_FLOCK else _try_exclusive(path)
        if release is not None or time.monotonic() >= deadline:
            return release
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _try_flock(path: Path) -> _Release | None:
    """Takes the lock with flock. Returns a function that releases it; None if it is held."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have removed the file that we opened; another process may then hold a new file.
        if os.path.samestat(os.fstat(handle), os.stat(path)):

            def release() -> None:
                with suppress(OSError):
                    path.unlink()
                os.close(handle)

            return release
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def _try_exclusive(path: Path) -> _Release | None:
    """Takes the lock by making its file. Returns a function that releases it; None if it is held."""
    token = secrets.token_hex(16)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()
        return None
    with os.fdopen(handle, "w") as file:
        file.write(token)

    def release() -> None:
        with suppress(OSError):
            if path.read_text() == token:
                path.unlink()

    return release
