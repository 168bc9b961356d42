"""Engines on several ranks: the tokens of one process, and an end of all ranks where one fails."""

from __future__ import annotations

import pytest

from support.ranks import run_ranks


@pytest.mark.parametrize(("program", "ranks"), [
    ("context", 2),
    *(pytest.param(*each, marks=pytest.mark.full) for each in (("heads", 2), ("pools", 2), ("both", 4))),
])  # fmt: skip
def test_tokens_are_those_of_one_process(program: str, ranks: int) -> None:
    code, printed = run_ranks(f"support.engine_programs:{program}", ranks)
    assert code == 0, printed


def test_all_ranks_end_where_one_fails() -> None:
    code, printed = run_ranks("support.engine_programs:failures", 2)
    assert code == 1, printed  # that of the rank that was killed
    assert printed.endswith("rank 0 ended\n")
