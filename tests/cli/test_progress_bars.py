"""Bars: on a terminal alone, from the second second on, with what is being done; and io moves within a decoding."""

import io
import time
from types import SimpleNamespace

import pytest

from treegen import cli, progress
from treegen.cli import progress_bars
from treegen.cli.progress_bars import activity_bar, progress_bar
from treegen.report.decode_io import decode_io
from treegen.workloads.traces import workload_from


class Terminal(io.StringIO):
    """A stderr that people look at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setattr(progress_bars, "sys", SimpleNamespace(stderr=made))  # pytest sets the real one anew
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return made


def shown_after(terminal: Terminal, text: str) -> bool:
    """Whether the text is drawn within some seconds."""
    end = time.monotonic() + 20
    while text not in terminal.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    return text in terminal.getvalue()


def test_an_activity_is_named(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bars, "QUIET_SECONDS", 0.0)
    with activity_bar():
        progress.now("weighing cohort(head_rows=64)")
        assert shown_after(terminal, "weighing cohort(head_rows=64)")
        progress.now("verifying [cohort]")
        assert shown_after(terminal, "verifying [cohort]")
    progress.now("nobody listens")
    assert "nobody" not in terminal.getvalue()


def test_steps_are_shown(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bars, "QUIET_SECONDS", 0.0)
    with progress_bar(4, "counting") as on_steps:
        on_steps()
        assert shown_after(terminal, "25%")
        on_steps(0.4)
        assert shown_after(terminal, "35%")


def test_what_is_quick_draws_nothing(terminal: Terminal) -> None:
    with activity_bar():
        progress.now("reading the tree")
    with progress_bar(2) as on_steps:
        on_steps()
    assert terminal.getvalue() == ""


def test_no_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress_bars, "QUIET_SECONDS", 0.0)
    assert cli.main(["explain", "1,4/100,10"]) == 0
    assert cli.main(["io", "few-shot:steps=20"]) == 0
    assert capsys.readouterr().err == ""


def test_io_moves_within_a_decoding() -> None:
    amounts: list[float] = []
    decode_io(workload_from("few-shot:steps=200"), ["query", "deft-node", "fasttree"], on_progress=amounts.append)
    assert len(amounts) >= 3
    assert sum(amounts) == pytest.approx(1)
    assert max(amounts) < 0.5
