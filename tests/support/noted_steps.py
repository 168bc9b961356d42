"""Decoding steps that are noted when they are launched, and controllers that note when they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from treegen.engine import Branch, Engine, Frontier, Growth


def note_launches(engine: Engine, noted: list[str]) -> None:
    """Appends `launch` to `noted` when a decoding step of an engine begins."""
    step = engine.forward.decoding
    begin = step.begin

    def launch(*given: Any, **options: Any) -> dict[int, int]:
        noted.append("launch")
        return begin(*given, **options)

    step.begin = launch  # type: ignore[method-assign]


class Noting:
    """Notes in which order a controller, the class after this one, decides and commits.

    trouble: the commit that is interrupted.
    """

    noted: list[str]
    trouble: int

    def __init__(self, *given: Any, trouble: int = 0, **options: Any) -> None:
        super().__init__(*given, **options)
        object.__setattr__(self, "noted", [])  # the controller may be frozen
        object.__setattr__(self, "trouble", trouble)

    def decide(self, frontier: Frontier) -> Growth:
        self.noted.append("decide")
        return super().decide(frontier)  # type: ignore[misc]

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        self.noted.append("commit")
        if self.noted.count("commit") == self.trouble:
            raise KeyboardInterrupt
        return super().commit(branches, tokens)  # type: ignore[misc]


class NotingTokens(Noting):
    """Notes as well when tokens are selected."""

    def select(self, frontier: Frontier) -> torch.Tensor:
        self.noted.append("select")
        return super().select(frontier)  # type: ignore[misc]
