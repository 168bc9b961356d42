"""Engines on several ranks: the tokens of one process, and an end of all ranks where one fails."""

from __future__ import annotations

from support.ranks import run_ranks


def test_heads_are_divided() -> None:
    code, printed = run_ranks("support.engine_programs:heads", 2)
    assert code == 0, printed
