"""Candidates that do what they are told instead of planning, and the meter that lets them: no torch, no device."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from treegen.ir.plan import Plan
from treegen.strategies import Strategy
from treegen.strategies.strategy import OnPass
from treegen.target.problem import Problem
from treegen.tuning.worker import DeviceLostError


@dataclass(frozen=True)
class Deed(Strategy):
    """What the meter is to do; `noted` is a file for process ids."""

    name: str
    noted: str = ""

    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        """Not called by this module's meter."""
        raise NotImplementedError


@dataclass(frozen=True)
class Unpicklable(Deed):
    """A candidate that cannot leave its process."""

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("stays here")


def perform(problem: Problem, strategy: Strategy) -> tuple[float | None, float]:
    """Does the deed. Where it gives a time, that is the process's id, so that tests see which process it was."""
    assert isinstance(strategy, Deed)
    match strategy.name:
        case "hang":
            other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            note = Path(strategy.noted)
            note.with_suffix(".part").write_text(f"{os.getpid()} {other.pid}")
            note.with_suffix(".part").replace(note)
            time.sleep(600)
        case "exit":
            print("last words", file=sys.stderr)
            os._exit(3)
        case "crash":
            os.kill(os.getpid(), 11)
        case "raise":
            raise ValueError("first line\n  second line")
        case "raise at length":
            raise ValueError("a" * 500 + "z")
        case "lose":
            try:
                raise RuntimeError("illegal memory access")
            except RuntimeError as cause:
                raise DeviceLostError from cause
        case "wrong":
            return 5.0, 0.25
        case "infinite":
            return None, float("inf")
        case "not a number":
            return 5.0, float("nan")
        case "print":
            print("something on stdout", flush=True)
            os.write(1, b"more of it")
        case "torch":
            return float("torch" in sys.modules), 0.0
        case "arguments":
            assert not problem.tree.tokens.flags.writeable
            facts = (problem.tree.num_rows, problem.shape.head_dim, problem.target.sms)
            return float("".join(map(str, facts))), 0.0
    return float(os.getpid()), 1e-4


def cycles(call: object, repeats: int) -> float:
    """A timer that times nothing: the number of repeats, after one call."""
    assert callable(call)
    call()
    return float(repeats)


@dataclass
class Wavering:
    """A meter by the texts of strategies: one time after another of those given, 20 us for the others; None is a wrong
    output.
    """

    times: dict[str, tuple[float | None, ...]]

    def __call__(self, problem: Problem, strategy: Strategy) -> tuple[float | None, float]:
        first, *others = self.times.get(str(strategy), (20.0,))
        if others:
            self.times[str(strategy)] = tuple(others)
        return first, 0.0 if first is not None else 1.0


@dataclass(frozen=True)
class Favourite:
    """A meter by the texts of strategies: 10 us for `best`, 20 for the others, and wrong or failing outputs.

    noted: a file that gets a line for every call, which begins with the process's id. seconds: that a call takes.
    """

    best: str = ""
    wrong: tuple[str, ...] = ()
    failing: bool = False
    noted: str = ""
    seconds: float = 0.0

    def __call__(self, problem: Problem, strategy: Strategy) -> tuple[float | None, float]:
        if self.noted:
            with Path(self.noted).open("a") as file:
                file.write(f"{os.getpid()} {strategy}\n")
        time.sleep(self.seconds)
        if self.failing:
            raise RuntimeError("does not compile")
        return 10.0 if str(strategy) == self.best else 20.0, 1.0 if str(strategy) in self.wrong else 0.0
