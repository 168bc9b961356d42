"""Measuring candidates on the current GPU, each on its own: none can harm the caller or another one.

Candidates run in a process of their own. A CUDA error stays with its process, and a hanging kernel ends only with it,
so the process is killed after a timeout, a crash, a CUDA error or a wrong output, and another one goes on with the
rest. It is started as a fresh interpreter: one that multiprocessing spawns would import the caller's `__main__` again.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO

from treegen.ir.arrays import positive_int
from treegen.ir.errors import BackendError, InputError, TreeError
from treegen.ir.tree import Tree
from treegen.strategies import Strategy
from treegen.target.problem import Problem
from treegen.tuning.worker import LEAVING_S, Job, Meter, Reply

_START_S = 120.0  # until a process has imported what its meter needs; torch from a cold disk takes long
_DYING_S = 5.0
_LAST_BYTES = 4096  # of a dead process's output, in which its last words are looked for
_LONGEST_WORDS = 160


class StoppedError(RuntimeError):
    """Raised where candidates are measured when another thread stops that."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one candidate: a time, or the problem that it has instead."""

    strategy: str  # the candidate's text
    microseconds: float | None  # median on a cold L2; None with a problem
    problem: str | None  # one line: wrong output, failed, timed out, process died
    out_error: (
        float | None
    )  # the larger error of out and lse, as in treegen.backends.oracle; None where nothing was computed


class Measurer:
    """Measures candidates for one tree after another, on the CUDA device of this index, by default the current one.

    What is compiled for one tree serves the others. repeats: timed calls. timeout_s: seconds for one candidate, with
    compiling and checking it. meter: measures in place of the device; has to pickle, by a name that another process can
    import, as have strategies. Raises BackendError without a CUDA device (unless there is a meter), and InputError, all
    before a process starts. To be used in a `with` statement, by one thread at a time.
    """

    def __init__(
        self, device: int | None = None, repeats: int = 15, timeout_s: float = 60.0, meter: Meter | None = None
    ) -> None:
        positive_int("repeats", repeats, InputError)
        if not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
            raise InputError("timeout_s", timeout_s, "is not a positive number", "give seconds, 60 for example")
        environment = dict(os.environ)
        if meter is None:
            index = _checked_device(device)
            environment["CUDA_VISIBLE_DEVICES"] = _name_of_device(index, environment.get("CUDA_VISIBLE_DEVICES"))
            from treegen.tuning.kernel_meter import KernelMeter

            meter = KernelMeter(repeats)
        self._meter = meter
        self._timeout_s = timeout_s
        self._tolerance = 0.0
        self._process = _Process(environment)

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.stop(leaving_s=0.0 if kind else 2 * LEAVING_S)

    def measure(
        self,
        problem: Problem,
        candidates: Sequence[Strategy],
        on_candidate: Callable[[Outcome], None] | None = None,
    ) -> list[Outcome]:
        """The outcomes of all candidates in the order given. on_candidate(outcome): called after each.

        Raises TreeError for a tree without rows, and StoppedError when another thread calls `stop`.
        """
        check_tree(problem.tree)
        self._process.load(_pickled_job(Job(self._meter, problem)))

        from treegen.backends.oracle import TOLERANCE

        self._tolerance = TOLERANCE[problem.shape.dtype]
        return self.again(candidates, on_candidate)

    def again(
        self, candidates: Sequence[Strategy], on_candidate: Callable[[Outcome], None] | None = None
    ) -> list[Outcome]:
        """The outcomes of candidates for the tree that was measured last."""
        outcomes = []
        for candidate in candidates:
            reply = _reply(self._process, candidate, self._timeout_s)
            if reply.problem is None and not (reply.out_error is not None and reply.out_error <= self._tolerance):
                problem = f"wrong output: error {reply.out_error:.1e} exceeds {self._tolerance:.1e}"
                # What writes wrong results may also write elsewhere: inputs and reference are made anew.
                reply = reply._replace(microseconds=None, problem=problem, lost=True)
            if reply.lost:
                self._process.stop()
            outcome = Outcome(str(candidate), reply.microseconds, reply.problem, reply.out_error)
            outcomes.append(outcome)
            if on_candidate:
                on_candidate(outcome)
        return outcomes

    def stop(self) -> None:
        """Kills the process for good, from any thread; `measure` raises StoppedError."""
        self._process.kill()


def _reply(process: _Process, candidate: Strategy, timeout_s: float) -> Reply:
    try:
        message = pickle.dumps(candidate, pickle.HIGHEST_PROTOCOL)
    except Exception as cause:  # whatever a class's own pickling raises
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        return Reply(problem=f"cannot be sent to another process: {text}")
    return process.ask(message, timeout_s)


class _Process:
    """The measuring process: started when it is first asked, and again after it was stopped."""

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
        """Takes another pickled job, to which the following candidates belong."""
        self._job, self._is_loaded, self._obstacle = job, False, None

    def ask(self, candidate: bytes, timeout_s: float) -> Reply:
        """The answer about a pickled candidate; a job for which the process fails is not tried again.

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
        """Starts the process where there is none, and sends it the job."""
        deadline = time.monotonic() + _START_S
        if self._process is None:
            self._start()
        return self._send(self._job, max(0.0, deadline - time.monotonic()))

    def _conversation(self, talk: Callable[[], Reply], timeout_s: float) -> Reply:
        """What `talk` returns, or the problem with which it ended; a process with a problem of its own is stopped."""
        try:
            return talk()
        except TimeoutError:
            problem = f"timed out after {timeout_s:g} s"
        except (EOFError, OSError) as cause:
            problem = f"process died: {self._last_words() or cause}"
        self.stop(leaving_s=0.0)
        return Reply(problem=problem)

    def _start(self) -> None:
        self._connection, other = Pipe()
        with other:
            # The caller's own search path, and behind it the place of this package, however it was found.
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
                start_new_session=True,  # a Ctrl-C is for the caller alone, and what the process starts dies with it
            )
        if self._is_killed:  # before there was a process to kill
            self.kill()
        self._receive(_START_S)  # before this the process reads nothing, and sending a large job would not return

    def _send(self, message: bytes, timeout_s: float) -> Reply:
        assert self._connection is not None
        self._connection.send_bytes(message)
        reply = pickle.loads(self._receive(timeout_s))
        assert isinstance(reply, Reply)
        return reply

    def _receive(self, timeout_s: float) -> bytes:
        assert self._connection is not None
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv_bytes()

    def _last_words(self) -> str:
        """The exit status of a process that is gone, and the last line of its output; empty if it is not gone."""
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
        """Ends the process, with what it started: at once, or after it had some seconds to end by itself."""
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


def check_tree(tree: Tree) -> None:
    """Raises TreeError for a tree with nothing to measure."""
    if not isinstance(tree, Tree) or tree.num_rows == 0:
        raise TreeError("tree", tree, "has no rows to measure", "give a Tree with at least one row")


def _checked_device(device: int | None) -> int:
    """The index of a CUDA device on which emitted kernels run. Raises BackendError."""
    import torch

    from treegen.backends.devices import backend_for, interpreted

    if not torch.cuda.is_available():
        raise BackendError("device", "cpu", "has no CUDA device to measure", "run it on a machine with a GPU")
    index = torch.cuda.current_device() if device is None else device
    if not isinstance(index, int) or not 0 <= index < torch.cuda.device_count():
        raise BackendError("device", index, f"is not one of {torch.cuda.device_count()} CUDA devices", "use 0")
    backend_for(torch.device("cuda", index), "triton")
    if interpreted():
        raise BackendError("TRITON_INTERPRET", 1, "replaces the compiler", "unset it before importing triton")
    return index


def _name_of_device(index: int, visible: str | None) -> str:
    """What makes CUDA show this device alone, out of those that `CUDA_VISIBLE_DEVICES` shows."""
    if visible is None:
        return str(index)
    names = [name.strip() for name in visible.split(",")]
    if index >= len(names):
        reason = f"has no entry {index}: it was changed after CUDA started"
        raise BackendError("CUDA_VISIBLE_DEVICES", visible, reason, "set it before importing torch")
    return names[index]


def _pickled_job(job: Job) -> bytes:
    try:
        # Protocol 5 keeps read-only arrays read-only.
        return pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
    except Exception as cause:
        reason = f"cannot be sent to another process: {cause}"
        raise InputError("meter", job.meter, reason, "define it at the top of a module") from cause
