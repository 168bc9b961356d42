"""Folders of the cache: the user's own if nobody else can plant files in it, otherwise a private temporary one."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from functools import cache, lru_cache
from pathlib import Path

from treegen.environment import cache_root
from treegen.ir.errors import CacheWarning, warn

OWN_FOLDER = "set TREEGEN_CACHE_DIR to a folder that only you may write"
warned: set[str] = set()


def cache_folder(name: str) -> Path:
    """Returns the folder for one kind of files, as "kernels" or "policies"; it may not exist yet.

    Where `refusal` has a reason, it is a folder in a private temporary one, with one warning per process.
    """
    folder = _below(cache_root(), name)
    reason = refusal(folder)
    if not reason:
        return folder
    warn_once(folder.parent, f"{reason}: using a private temporary folder", OWN_FOLDER)
    return private_folder() / name


@lru_cache(16)
def _below(root: Path, name: str) -> Path:
    return root / name


def refusal(folder: Path) -> str:
    """Returns the reason why a folder of the cache is not used; empty if it is used.

    Both the folder and the cache's root above it have to belong to this user or to root, and nobody else may write
    them. The root may be a folder like /tmp, whose sticky bit keeps others from replacing files that are not theirs.
    Systems without user ids (Windows) have no such bits, and nothing is refused there.
    """
    if str(folder).startswith("~"):  # it was not expanded
        return "is not used (there is no such home folder: HOME is not set, or the user is unknown)"
    if not hasattr(os, "geteuid"):
        return ""
    return _distrust(folder.parent, sticky=True) or _distrust(folder, sticky=False)


def _distrust(folder: Path, sticky: bool) -> str:
    """Returns the reason not to trust one folder; empty if there is none. sticky: whether a sticky bit is enough."""
    try:
        link = os.lstat(folder)
        facts = os.stat(folder) if stat.S_ISLNK(link.st_mode) else link
    except OSError:  # storing a file there makes the folder, or fails
        return ""
    for owner in (link.st_uid, facts.st_uid):
        if owner not in (0, os.geteuid()):
            return f"is not used ({folder} belongs to another user, uid {owner})"
    mode = stat.S_IMODE(facts.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not (sticky and mode & stat.S_ISVTX):
        return f"is not used (other users may write {folder}, mode {mode:04o}: `chmod go-w` mends that)"
    return ""


@cache
def private_folder() -> Path:
    """Returns a temporary folder for this process alone, which is removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="treegen-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def make_folder(folder: Path) -> None:
    """Makes a folder of the cache, and the cache's root, which only this user may enter. Raises OSError."""
    for path in (folder.parent, folder):
        path.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)


def warn_once(place: object, reason: str, fix: str) -> None:
    """Warns of a file or folder of the cache that cannot be used, once per process."""
    if str(place) not in warned:
        warned.add(str(place))
        warn(CacheWarning, f"cache: {place} {reason}; {fix}")
