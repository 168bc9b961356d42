"""The command run: a table of time and memory for each strategy, from any tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from treegen import cli


def test_a_tree_is_run_with_each_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "40(6*3)", "--compare", "auto,query,none,flashinfer", "--page-size", "4"]) == 0
    first, missing, titles, *rows = capsys.readouterr().out.splitlines()
    assert first == "40(6*3): 40 prompt tokens, model tiny, cpu"
    assert missing.startswith("flashinfer: ")
    assert titles.startswith("provider  ms a token  ms a step  attention")
    assert [row.split()[0] for row in rows] == ["auto", "query", "none"]
    for row in rows:
        shares = re.findall(r"([0-9]+)%", row)
        assert len(shares) == 4
        assert 97 <= sum(map(int, shares)) <= 103


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["5+6"], "has a prompt without tokens, or without tokens below it"),
        (["40(6*3)", "--compare", "fastest"], "fastest"),
        (["40(6*3)", "--model", "no/such/folder/here"], "cannot be loaded; name a folder"),
        (["40(6*3)", "--page-size", "3"], "power of two"),
    ],
)
def test_what_is_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert cli.main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1
