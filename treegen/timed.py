"""Timings of the steps of compiling and launching, printed to stderr on request."""

from __future__ import annotations

import sys
import time

from treegen.environment import traces_phases


class phase:  # noqa: N801 (used like a function)
    """Prints the time of the body in milliseconds if TREEGEN_TRACE=1."""

    __slots__ = ("_begin", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._begin = time.perf_counter() if traces_phases() else None

    def __exit__(self, kind: object, *_: object) -> None:
        if self._begin is not None and kind is None:
            print(f"treegen: {self._name} {1e3 * (time.perf_counter() - self._begin):.3f} ms", file=sys.stderr)
