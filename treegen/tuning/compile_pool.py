"""Compilation ahead of time in several processes: a failing kernel harms neither the others nor the caller.

Processes are fresh interpreters, like those of `treegen.tuning.measuring_process`: multiprocessing would import the
caller's `__main__` again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from treegen.codegen.aot import compile_for
from treegen.codegen.compile_counter import kernel_counts
from treegen.codegen.emit import Source
from treegen.ir.arrays import positive_int
from treegen.ir.errors import BackendError
from treegen.ir.shape import Shape
from treegen.target.targets import Target
from treegen.tuning.worker import LEAVING_S, problem_of

TIMEOUT_S = 300.0
"""Seconds for one kernel, including the start of its process."""
_DYING_S = 5.0
_LONGEST_WORDS = 160


@dataclass(frozen=True, slots=True)
class Compiled:
    """The outcome of one kernel.

    Attributes:
        source: The kernel.
        shape: The shape of its launches.
        seconds: The time it took.
        cached: Whether Triton's cache had it.
        problem: One line; None if there is machine code.
    """

    source: Source
    shape: Shape
    seconds: float
    cached: bool = False
    problem: str | None = None


def compile_all(
    kernels: Iterable[tuple[Source, Shape]],
    target: Target,
    processes: int | None = None,
    on_variant: Callable[[Compiled], None] | None = None,
) -> list[Compiled]:
    """Compiles kernels for a target into Triton's cache, and returns their outcomes in order.

    A kernel that does not compile, or whose process dies, is an outcome with a problem.

    Args:
        kernels: Sources, each with the shape of its launches. The next one is taken when a process is free for it.
        target: The target.
        processes: Processes at a time; by default the CPUs that this process may use.
        on_variant: Called here as `on_variant(outcome)` when a kernel ends.

    Raises:
        BackendError: The target has no GPU.
    """
    if not target.capability:
        raise BackendError("target", target.name, "has no GPU", "name the GPU to compile for")
    count = len(os.sched_getaffinity(0)) if processes is None else positive_int("processes", processes, BackendError)
    waiting, outcomes = iter(enumerate(kernels)), dict[int, Compiled]()
    workers: dict[Connection, _Worker] = {}
    try:
        while True:
            while len(workers) < count and (given := next(waiting, None)) is not None:
                worker = _Worker(target)
                workers[worker.connection] = worker
                worker.give(*given)
            if not workers:
                break
            earliest = min(worker.deadline for worker in workers.values())
            ready = wait(list(workers), max(0.0, earliest - time.monotonic()))
            late = [link for link, worker in workers.items() if worker.deadline <= time.monotonic()]
            for link in dict.fromkeys([*(link for link in workers if link in ready), *late]):
                worker = workers[link]
                outcome = worker.outcome()
                outcomes[worker.index] = outcome
                if worker.alive and (given := next(waiting, None)) is not None:
                    worker.give(*given)
                else:
                    workers.pop(link).stop(LEAVING_S if worker.alive else 0.0)
                if on_variant:
                    on_variant(outcome)
    finally:
        for worker in workers.values():
            worker.stop()
    return [outcomes[index] for index in sorted(outcomes)]


class _Worker:
    """A process that compiles one kernel after another."""

    def __init__(self, target: Target) -> None:
        self.connection, other = Pipe()
        self.index, self.deadline, self.alive = -1, 0.0, True
        self._target = target
        self._kernel: tuple[Source, Shape] | None = None
        self._begun = 0.0
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
        path = [*(entry for entry in sys.path if isinstance(entry, str)), str(Path(__file__).parents[2])]
        begin = f"import sys; sys.path[:] = {path!r}; from treegen.tuning.compile_pool import serve"
        program = f"{begin}; serve({other.fileno()})"
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
                pass_fds=(other.fileno(),),
                start_new_session=True,  # a Ctrl-C is for the caller alone, and ptxas ends with its process
            )

    def give(self, index: int, kernel: tuple[Source, Shape]) -> None:
        """Sends the process its next kernel."""
        self.index, self._kernel = index, kernel
        self._begun = time.monotonic()
        self.deadline = self._begun + TIMEOUT_S
        with suppress(OSError):  # a dead process is found when its answer is read
            self.connection.send((*kernel, self._target))

    def outcome(self) -> Compiled:
        """Returns the answer about the kernel, or an outcome with a problem; the process is then not alive."""
        assert self._kernel is not None
        try:
            if self.connection.poll():
                seconds, cached, problem = self.connection.recv()
                return Compiled(*self._kernel, seconds, cached, problem)
            problem = f"timed out after {TIMEOUT_S:g} s"
        except (EOFError, OSError):
            problem = f"process died: {self._last_words()}"
        self.alive = False
        return Compiled(*self._kernel, time.monotonic() - self._begun, problem=problem)

    def _last_words(self) -> str:
        """Returns the exit status of a process that is gone, and the last line of its output."""
        self._end(_DYING_S)
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return f"exit status {self._process.returncode}" + (f" ({lines[-1][:_LONGEST_WORDS]})" if lines else "")

    def _end(self, leaving_s: float) -> None:
        """Ends the process, and those that it started, unless it ends by itself within some seconds."""
        try:
            self._process.wait(leaving_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self, leaving_s: float = 0.0) -> None:
        """Ends the process at once, or after some seconds in which it may end by itself."""
        self.connection.close()
        self._end(leaving_s)
        self._output.close()


def serve(handle: int) -> None:
    """Compiles the kernels that come through the socket with this file descriptor, until it closes."""
    connection = Connection(handle)
    with suppress(EOFError, OSError):
        while True:
            source, shape, target = connection.recv()
            begun, before, problem = time.monotonic(), kernel_counts().compiled, None
            try:
                compile_for(source, shape, target)
            except Exception as cause:  # any error of a compiler is this kernel's problem
                problem = problem_of(cause)
            cached = problem is None and kernel_counts().compiled == before
            connection.send((time.monotonic() - begun, cached, problem))
