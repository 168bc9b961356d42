"""The measuring process: loads a meter, then measures the candidates that it is sent, one after another.

`treegen.tuning.measuring_process` starts it and talks to it over one socket. It sends a job (a pickled Job), whose
answer is a Reply without a time; then pickled strategies, each answered with a Reply; then the next job. The process
ends when the other side closes the socket or is gone, whatever it is doing. Nothing here imports torch: a meter that
needs it does.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple, TypeAlias

from treegen.strategies import Strategy
from treegen.target.problem import Problem

Meter: TypeAlias = Callable[[Problem, Strategy], tuple[float | None, float]]
"""Returns microseconds of a candidate, None where a wrong output was not worth timing, and its output's error."""

LEAVING_S = 1.0
"""Seconds that the process takes for an orderly end once the other side is gone."""
_LONGEST_PROBLEM = 300


class Job(NamedTuple):
    """The part that all candidates have in common."""

    meter: Meter
    problem: Problem


class Reply(NamedTuple):
    """The answer to one message.

    Attributes:
        microseconds: The candidate's time; None with a problem.
        out_error: The larger error of out and lse; None if nothing was computed.
        problem: One line; None if there is none.
        lost: Whether the device or its data cannot be trusted any more; the process then ends.
    """

    microseconds: float | None = None
    out_error: float | None = None
    problem: str | None = None
    lost: bool = False


class DeviceLostError(RuntimeError):
    """Raised by a meter whose device fails from now on, as CUDA does after an illegal memory access; ends the process.

    It stays in this process: the candidate's problem is its text.
    """


def serve(handle: int) -> None:
    """Answers messages on the socket with this file descriptor until it closes."""
    connection = Connection(handle)
    messages: SimpleQueue[bytes | None] = SimpleQueue()
    Thread(target=_receive, args=(connection, messages), daemon=True).start()
    connection.send_bytes(b"")  # from here on messages of any size are taken off the socket
    job: Job | None = None
    while (message := messages.get()) is not None:
        try:
            value = pickle.loads(message)
        except Exception as cause:
            text = "the meter cannot be loaded in another process"
            if job is not None:
                text = "cannot be loaded in another process, where __main__ is another"
            reply = Reply(problem=f"{text}: {problem_of(cause)}", lost=job is None)
        else:
            if isinstance(value, Job):
                job, reply = value if job is None else value._replace(meter=job.meter), Reply()
            else:
                assert job is not None
                reply = _measured(job, value)
        connection.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))
        if reply.lost:
            return


def _receive(connection: Connection, messages: SimpleQueue[bytes | None]) -> None:
    """Queues messages; at their end it gives the process a moment to finish, then ends it in the middle of its work."""
    try:
        while True:
            messages.put(connection.recv_bytes())
    except (EOFError, OSError):
        messages.put(None)
    time.sleep(LEAVING_S)
    os._exit(1)


def _measured(job: Job, strategy: Strategy) -> Reply:
    """Measures a candidate and returns the reply."""
    try:
        microseconds, out_error = job.meter(job.problem, strategy)
        return Reply(None if microseconds is None else float(microseconds), float(out_error))
    except Exception as cause:
        return Reply(problem=f"failed: {problem_of(cause)}", lost=isinstance(cause, DeviceLostError))


def problem_of(cause: Exception) -> str:
    """Returns an exception on one line: its type and text.

    Long texts lose their middle, because compilers put the place of an error first and its kind last.
    """
    shown = cause.__cause__ if isinstance(cause, DeviceLostError) and cause.__cause__ else cause
    text = " ".join(f"{type(shown).__name__}: {shown}".split()).removesuffix(":")
    if len(text) <= _LONGEST_PROBLEM:
        return text
    return f"{text[: _LONGEST_PROBLEM // 3]} ... {text[-(_LONGEST_PROBLEM - _LONGEST_PROBLEM // 3) :]}"
