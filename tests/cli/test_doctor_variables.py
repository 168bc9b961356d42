"""`treegen doctor`: what it says of environment variables."""

import json
from typing import Any

import pytest

from treegen import cli
from treegen.environment import NAMES


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["doctor", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return [note for note in found["notes"] if "TREEGEN_" in note]


def test_every_variable_is_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TREEGEN_DATA", "recordings")
    assert notes(capsys) == []
    monkeypatch.setenv("TREEGEN_DATUM", "recordings")
    (note,) = notes(capsys)
    assert note == f"TREEGEN_DATUM is not a variable of treegen: use {', '.join(NAMES)}"
