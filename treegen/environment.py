"""The environment variables that treegen reads. Arguments override them."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from treegen.ir.errors import InputError

NAMES = ("TREEGEN_CACHE_DIR", "TREEGEN_CHECK", "TREEGEN_DATA", "TREEGEN_SHARING", "TREEGEN_TRACE")
"""All environment variables that belong to treegen. `TREEGEN_DATA` is read by typer, as the default of an option."""
SWITCHES = {"TREEGEN_CHECK": ("0", "1"), "TREEGEN_SHARING": ("on", "off"), "TREEGEN_TRACE": ("0", "1")}
"""Those that are switches, with their two values. The first value is the default, also where a variable is empty."""


def cache_root() -> Path:
    """Returns the cache folder: `TREEGEN_CACHE_DIR`, by default `treegen` in the XDG cache home (~/.cache).

    A leading `~` is kept where the home folder is unknown.
    """
    get = os.environ.get
    return _cache_root(get("TREEGEN_CACHE_DIR"), get("XDG_CACHE_HOME"), get("HOME"))


@lru_cache(8)
def _cache_root(chosen: str | None, cache_home: str | None, home: str | None) -> Path:
    """Returns `cache_root` for values of these variables. `home` is in the key because it decides what `~` means."""
    if chosen:
        return Path(os.path.expanduser(chosen))
    return Path(os.path.expanduser(cache_home or "~/.cache")) / "treegen"


def checks_inputs() -> bool:
    """Returns whether `TREEGEN_CHECK=1`: every call then checks KV slots and NaN, and waits for the device."""
    return is_changed("TREEGEN_CHECK")


def shares() -> bool:
    """Returns whether plans of running batches share KV: not with `TREEGEN_SHARING=off`. Kernels are the same."""
    return not is_changed("TREEGEN_SHARING")


def traces_phases() -> bool:
    """Returns whether `TREEGEN_TRACE=1`: the time of every step (plan, lower, emit, load, launch) goes to stderr."""
    return is_changed("TREEGEN_TRACE")


def is_changed(switch: str) -> bool:
    """Returns whether a switch is set to its second value. Raises InputError if it is set to neither value."""
    given = os.environ.get(switch)
    if not given:
        return False
    default, other = SWITCHES[switch]
    value = given.lower()
    if value not in (default, other):
        fix = f"set it to {other}, or leave it unset, which means {default}"
        raise InputError(switch, given, f"is neither {default} nor {other}", fix)
    return value == other


def check_switches() -> None:
    """Raises InputError for the first switch that is set to neither of its values."""
    for switch in SWITCHES:
        is_changed(switch)
