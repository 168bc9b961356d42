"""The caller's side of the measuring process: starts it, talks to it, and ends it (treegen.tuning.worker is the other).

    caller                              process
    ── job ──────────────────────────▶  loads the meter, makes inputs
    ◀─────────────── reply, no time ──
    ── candidate ────────────────────▶  compiles, checks and times it
    ◀── reply: time, error, problem ──
    closes the socket, or kills it      ends

It is started as a fresh interpreter: one that multiprocessing spawns would import the caller's `__main__` again.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from treegen.tuning.worker import Reply

_START_S = 120.0  # for a process to import the modules of its meter; torch from a cold disk takes long
_DYING_S = 5.0
_LAST_BYTES = 4096  # at the end of a dead process's output, which are searched for its last words
_LONGEST_WORDS = 160


class StoppedError(RuntimeError):
    """Raised in a thread that measures candidates when another thread stops that."""


class MeasuringProcess:
    """The measuring process: started on the first question, and again after it was stopped."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._job = b""
        self._is_loaded = False
        self._is_killed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._output: IO[bytes] | None = None
        self._obstacle: str | None = None

    def load(self, job: bytes) -> None:
        """Takes another pickled job, to which the next candidates belong."""
        self._job, self._is_loaded, self._obstacle = job, False, None

    def ask(self, candidate: bytes, timeout_s: float) -> Reply:
        """Returns the answer about a pickled candidate. A job for which the process fails is not tried again.

        Raises StoppedError.
        """
        if self._obstacle is None and not self._is_loaded:
            reply = self._conversation(self._prepare, _START_S)
            self._obstacle = reply.problem and f"no measuring process: {reply.problem}"
            self._is_loaded = self._obstacle is None
        reply = Reply(problem=self._obstacle)
        if self._obstacle is None:
            reply = self._conversation(lambda: self._send(candidate, timeout_s), timeout_s)
        if self._is_killed:
            raise StoppedError("the measurement was stopped")
        return reply

    def _prepare(self) -> Reply:
        """Starts the process if there is none, and sends it the job."""
        deadline = time.monotonic() + _START_S
        if self._process is None:
            self._start()
        return self._send(self._job, max(0.0, deadline - time.monotonic()))

    def _conversation(self, talk: Callable[[], Reply], timeout_s: float) -> Reply:
        """Returns the reply of `talk`, or the problem that ended it; a process with a problem of its own is stopped."""
        try:
            return talk()
        except TimeoutError:
            problem = f"timed out after {timeout_s:g} s"
        except (EOFError, OSError) as cause:
            problem = f"process died: {self._last_words() or cause}"
        self.stop(leaving_s=0.0)
        return Reply(problem=problem)

    def _start(self) -> None:
        """Starts the process and waits until it reads messages."""
        self._connection, other = Pipe()
        with other:
            # The caller's own search path, and at its end the place of this package, however it was found.
            path = [*(entry for entry in sys.path if isinstance(entry, str)), str(Path(__file__).parents[2])]
            program = (
                f"import sys; sys.path[:] = {path!r}; from treegen.tuning.worker import serve; serve({other.fileno()})"
            )
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=self._environment,
                pass_fds=(other.fileno(),),
                start_new_session=True,  # a Ctrl-C is for the caller alone, and the process's children die with it
            )
        if self._is_killed:  # before there was a process to kill
            self.kill()
        self._receive(_START_S)  # until then the process reads nothing, and sending a large job would not return

    def _send(self, message: bytes, timeout_s: float) -> Reply:
        """Sends a message and returns the reply. Raises TimeoutError, or EOFError and OSError for a dead process."""
        assert self._connection is not None
        self._connection.send_bytes(message)
        reply = pickle.loads(self._receive(timeout_s))
        assert isinstance(reply, Reply)
        return reply

    def _receive(self, timeout_s: float) -> bytes:
        """Returns the next message. Raises TimeoutError."""
        assert self._connection is not None
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv_bytes()

    def _last_words(self) -> str:
        """Returns the exit status of a process that is gone, and the last line of its output.

        It is empty if the process is not gone.
        """
        if self._process is None or self._output is None:
            return ""
        try:
            status = self._process.wait(_DYING_S)
        except subprocess.TimeoutExpired:
            return ""
        names = {number.value: number.name for number in signal.Signals}
        ended = names.get(-status, f"signal {-status}") if status < 0 else f"exit status {status}"
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _LAST_BYTES))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return f"{ended} ({' '.join(lines[-1].split())[:_LONGEST_WORDS]})" if lines else ended

    def stop(self, leaving_s: float = 0.0) -> None:
        """Ends the process, and those that it started: at once, or after some seconds in which it may end by itself."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(leaving_s)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if self._output is not None:
            self._output.close()
        self._process = self._connection = self._output = None
        self._is_loaded = False

    def kill(self) -> None:
        """Ends the process at once and for good, from any thread."""
        self._is_killed = True
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
