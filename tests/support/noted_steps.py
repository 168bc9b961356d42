"""Decoding steps that are noted when they are launched."""

from __future__ import annotations

from typing import Any

from treegen.engine import Engine


def note_launches(engine: Engine, noted: list[str]) -> None:
    """Appends `launch` to `noted` when a decoding step of an engine begins."""
    step = engine.forward.decoding
    begin = step.begin

    def launch(*given: Any, **options: Any) -> dict[int, int]:
        noted.append("launch")
        return begin(*given, **options)

    step.begin = launch  # type: ignore[method-assign]
