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


def test_values_that_switches_do_not_have(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TREEGEN_SHARING", "no")
    monkeypatch.setenv("TREEGEN_CHECK", "1")
    monkeypatch.setenv("TREEGEN_TRACE", "true")
    assert notes(capsys) == [
        "TREEGEN_SHARING = no: is neither on nor off; set it to off, or leave it unset, which means on",
        "TREEGEN_TRACE = true: is neither 0 nor 1; set it to 1, or leave it unset, which means 0",
    ]
