"""Processes that tests start: each can be interrupted, however the tests themselves were started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.paths import TESTS

# A shell starts the commands that it puts into the background with SIGINT ignored, and what they start inherits that.
_INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def started(program: str, *arguments: str, environment: dict[str, str] | None = None, **options: Any) -> Any:
    """A new Python process, a `subprocess.Popen`, that runs `program` with these arguments, finds treegen and the
    modules beside the tests, and ends with KeyboardInterrupt when it receives SIGINT. environment: variables to add.
    """
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    command = [sys.executable, "-c", _INTERRUPTIBLE + program, *arguments]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, **(environment or {})}, **options)


def finished(program: str, *arguments: str, environment: dict[str, str], seconds: int) -> tuple[int, str]:
    """Runs `program` as `started` does, and whatever it forks; returns its exit code, and all that was printed.

    After `seconds` all of its processes are killed, and the code is 255.
    """
    process = started(
        program, *arguments, environment=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        return 255, f"{printed}\nhung for {seconds} s"
    return process.returncode, printed


def run_function(call: str, seconds: int = 120) -> str:
    """Runs a function of the tests, `support.crews:deaths('folder')`, in a process of its own, which may fork, and
    returns what it printed. It has to succeed within `seconds`.
    """
    module, _, text = call.partition(":")
    environment = {"OMP_NUM_THREADS": "1"}
    code, printed = finished(f"import {module}; {module}.{text}", environment=environment, seconds=seconds)
    assert code == 0, printed
    return printed


@contextmanager
def in_background() -> Iterator[None]:
    """Ignores SIGINT in this process, as a shell lets the commands in its background do."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
