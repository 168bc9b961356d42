"""The environment variables that treegen reads, all here; arguments win over them."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

NAMES = ("TREEGEN_CACHE_DIR", "TREEGEN_CHECK", "TREEGEN_SHARING", "TREEGEN_TRACE")
"""All environment variables of treegen's own."""


def cache_root() -> Path:
    """`TREEGEN_CACHE_DIR`, else `treegen` in the XDG cache home (~/.cache).

    A path that begins with `~` stays as it is where there is no such home.
    """
    get = os.environ.get
    return _cache_root(get("TREEGEN_CACHE_DIR"), get("XDG_CACHE_HOME"), get("HOME"))


@lru_cache(8)
def _cache_root(chosen: str | None, cache_home: str | None, home: str | None) -> Path:
    """`cache_root` with these variables; `home` decides what `~` stands for."""
    if chosen:
        return Path(os.path.expanduser(chosen))
    return Path(os.path.expanduser(cache_home or "~/.cache")) / "treegen"


def checks_inputs() -> bool:
    """`TREEGEN_CHECK=1`: every call checks slot ranges and NaN, at the cost of a device synchronisation."""
    return os.environ.get("TREEGEN_CHECK") == "1"


def shares() -> bool:
    """Not with `TREEGEN_SHARING=off`: plans of running batches then share nothing, with the same kernels."""
    return os.environ.get("TREEGEN_SHARING") != "off"


def traces_stages() -> bool:
    """`TREEGEN_TRACE=1`: the time of every stage (plan, lower, emit, load, launch) is printed to stderr."""
    return os.environ.get("TREEGEN_TRACE") == "1"
