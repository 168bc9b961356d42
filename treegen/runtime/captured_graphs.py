"""Captured graphs: the caches that CUDA graphs of a kernel read."""

from __future__ import annotations

from collections.abc import Iterable

from treegen.runtime.prepared import Program


class CapturedGraphs:
    """The programs that CUDA graphs captured, each with the KV slots of the smallest cache of its captures.

    A replay reads the program's tables and the caches of its capture. So the tables must not name slots beyond the
    smallest of these. Programs stay here when the kernel serves another tree, because graphs may still replay them.
    """

    def __init__(self) -> None:
        self._slots: dict[Program, int] = {}

    def note(self, programs: Iterable[Program], slots: int) -> None:
        """Notes a capture of programs with a cache of `slots` KV slots."""
        for program in tuple(programs):
            self._slots[program] = min(slots, self._slots.get(program, slots))

    def least_slots(self, programs: Iterable[Program]) -> int | None:
        """Returns the KV slots of the smallest cache that graphs of these programs read; None without graphs."""
        return min((self._slots[program] for program in programs if program in self._slots), default=None)
