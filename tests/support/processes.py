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


@contextmanager
def in_background() -> Iterator[None]:
    """Ignores SIGINT in this process, as a shell lets the commands in its background do."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
