"""Measuring candidates on the current GPU, so that none can harm the caller or another one.

Candidates run in a process of their own (treegen.tuning.measuring_process). A CUDA error stays with its process, and a
hanging kernel ends only with it. The process is killed after a timeout, a crash, a CUDA error or a wrong output, and
another one goes on with the rest.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from treegen.ir.arrays import positive_int
from treegen.ir.errors import BackendError, InputError, TreeError
from treegen.ir.tree import Tree
from treegen.strategies import Strategy
from treegen.target.problem import Problem
from treegen.tuning.measuring_process import MeasuringProcess
from treegen.tuning.worker import LEAVING_S, Job, Meter, Reply


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one candidate: a time or a problem."""

    strategy: str  # the candidate's text
    microseconds: float | None  # median on a cold L2; None with a problem
    problem: str | None  # one line: wrong output, failed, timed out, process died
    out_error: float | None  # the larger error of out and lse (treegen.backends.oracle); None if nothing was computed


class Measurer:
    """Measures candidates for one tree after another on a CUDA device.

    Kernels that are compiled for one tree serve the others. Use it in a `with` statement, and from one thread at a
    time.

    Args:
        device: The index of the CUDA device; by default the current one.
        repeats: Timed calls.
        timeout_s: Seconds for one candidate, including compiling and checking it.
        meter: Measures in place of the device. It has to pickle, by a name that another process can import, as
            strategies have to.

    Raises:
        BackendError: There is no CUDA device, and no meter.
        InputError: An argument is out of range. Both are raised before a process starts.
    """

    def __init__(
        self, device: int | None = None, repeats: int = 15, timeout_s: float = 60.0, meter: Meter | None = None
    ) -> None:
        repeats = positive_int("repeats", repeats, InputError)
        check_timeout("timeout_s", timeout_s)
        environment = dict(os.environ)
        if meter is None:
            index = _checked_device(device)
            environment["CUDA_VISIBLE_DEVICES"] = _name_of_device(index, environment.get("CUDA_VISIBLE_DEVICES"))
            from treegen.tuning.kernel_meter import KernelMeter

            meter = KernelMeter(repeats)
        self._meter = meter
        self._timeout_s = timeout_s
        self._tolerance = 0.0
        self._process = MeasuringProcess(environment)

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
        """Returns the outcomes of all candidates in the given order.

        Args:
            problem: The tree, the attention shape and the target.
            candidates: The strategies to measure.
            on_candidate: Called as `on_candidate(outcome)` after each.

        Raises:
            TreeError: The tree has no rows.
            StoppedError: Another thread called `stop`.
        """
        check_tree(problem.tree)
        self._process.load(_pickled_job(Job(self._meter, problem)))

        from treegen.backends.oracle import TOLERANCE

        self._tolerance = TOLERANCE[problem.shape.dtype]
        return self.again(candidates, on_candidate)

    def again(
        self, candidates: Sequence[Strategy], on_candidate: Callable[[Outcome], None] | None = None
    ) -> list[Outcome]:
        """Returns the outcomes of candidates for the tree that was measured last."""
        outcomes = []
        for candidate in candidates:
            reply = _reply(self._process, candidate, self._timeout_s)
            if reply.problem is None and not (reply.out_error is not None and reply.out_error <= self._tolerance):
                problem = f"wrong output: error {reply.out_error:.1e} exceeds {self._tolerance:.1e}"
                # A kernel that writes wrong results may also write elsewhere: inputs and reference are made anew.
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


def check_timeout(argument: str, seconds: float) -> None:
    """Raises InputError unless this is a finite number above 0."""
    if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise InputError(argument, seconds, "is not a positive number", "give seconds, 60 for example")


def _reply(process: MeasuringProcess, candidate: Strategy, timeout_s: float) -> Reply:
    """Returns the process's answer about a candidate."""
    try:
        message = pickle.dumps(candidate, pickle.HIGHEST_PROTOCOL)
    except Exception as cause:  # any error of a class's own pickling
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        return Reply(problem=f"cannot be sent to another process: {text}")
    return process.ask(message, timeout_s)


def check_tree(tree: Tree) -> None:
    """Raises TreeError for a tree with nothing to measure."""
    if not isinstance(tree, Tree) or tree.num_rows == 0:
        raise TreeError("tree", tree, "has no rows to measure", "give a Tree with at least one row")


def _checked_device(device: int | None) -> int:
    """Returns the index of a CUDA device on which emitted kernels run. Raises BackendError."""
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
    """Returns the CUDA_VISIBLE_DEVICES that shows this device alone, out of those shown now. Raises BackendError."""
    if visible is None:
        return str(index)
    names = [name.strip() for name in visible.split(",")]
    if index >= len(names):
        reason = f"has no entry {index}: it was changed after CUDA started"
        raise BackendError("CUDA_VISIBLE_DEVICES", visible, reason, "set it before importing torch")
    return names[index]


def _pickled_job(job: Job) -> bytes:
    """Pickles a job. Raises InputError if that is not possible."""
    try:
        # Protocol 5 keeps read-only arrays read-only.
        return pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
    except Exception as cause:
        reason = f"cannot be sent to another process: {cause}"
        raise InputError("meter", job.meter, reason, "define it at the top of a module") from cause
