"""Accounting: where the time of an engine goes, and how many pages it holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

PARTS = ("attention", "model", "pages", "control")
"""Attention layers with their writes of KV; the rest of the model; pages, tables and plans; controllers."""


@dataclass(slots=True)
class Accounting:
    """What an engine has done since it was made.

    Attributes:
        device: Set it to wait for this device at the end of each part. The times are then the device's as well, and
            steps on a GPU take longer.
        seconds: Seconds by part: "attention", "model", "pages" and "control".
        steps: Steps of the model.
        rows: Tokens that it computed.
        preempted: How often a branch was preempted.
        most_pages: The most pages that branches held at a time.
        most_unshared: The most pages that they would have held, each with pages of its own.
    """

    device: torch.device | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    steps: int = 0
    rows: int = 0
    preempted: int = 0
    most_pages: int = 0
    most_unshared: int = 0
    _within: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the time of its block for this part; not that of parts within it."""
        self._take()
        self._within.append(name)
        try:
            yield
        finally:
            self._take()
            self._within.pop()

    def _take(self) -> None:
        """Counts the time since the last call for the innermost part."""
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._within:
            self.seconds[self._within[-1]] += now - self._since
        self._since = now
