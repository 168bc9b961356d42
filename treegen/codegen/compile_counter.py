"""How many kernels this process has loaded and compiled, and the warning where compiling took a caller by surprise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from treegen.ir.errors import PerformanceWarning, warn

MODULE_PREFIX = "treegen_kernel_"
"""How the names of emitted modules begin, by which Triton's compilations of them are told from others."""
_OWN = (MODULE_PREFIX, "treegen.backends.")
"""The same with modules of kernels that are not emitted."""


@dataclass(frozen=True, slots=True)
class KernelCounts:
    """Kernels of this process. loaded: emitted modules that were run, in Triton's interpreter as well; compiled:
    compilations of their kernels that Triton's own cache did not have, those made on purpose included.
    """

    loaded: int
    compiled: int


@dataclass(slots=True)
class CompileState:
    """What a process knows of its compilations.

    loaded, compiled: see KernelCounts. watching: whether it listens to Triton. warned: whether it has warned of
    compilations. surprises: kernels compiled while somebody waited, with seconds, not yet told.
    """

    loaded: int = 0
    compiled: int = 0
    watching: bool = False
    warned: bool = False
    surprises: list[tuple[str, float]] = field(default_factory=list)


state = CompileState()
_lock = Lock()
_expected: ContextVar[bool] = ContextVar("expected", default=False)


def kernel_counts() -> KernelCounts:
    """The counts so far. A process that serves what `treegen warm` compiled ahead keeps `compiled` at 0."""
    return KernelCounts(state.loaded, state.compiled)


@contextmanager
def expected_compiles() -> Iterator[None]:
    """Within it kernels are compiled on purpose, by this thread: they count, and nothing warns of them."""
    token = _expected.set(True)
    try:
        yield
    finally:
        _expected.reset(token)


def count_loaded() -> None:
    """Counts a module, which has imported Triton, and from the first one on Triton's compilations."""
    with _lock:
        state.loaded += 1
    watch_compiles()


def watch_compiles() -> None:
    """Listens to Triton's compiler from now on, beside whoever listened before."""
    from triton import knobs

    with _lock:
        if state.watching:
            return
        state.watching = True
        before = knobs.compilation.listener

        def listen(**facts: Any) -> None:
            _count_compiled(**facts)
            if before is not None:
                before(**facts)

        knobs.compilation.listener = listen


def _count_compiled(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
    kernel = getattr(src, "fn", None)  # only of Python sources
    module = getattr(kernel, "__module__", "")
    if cache_hit or not module.startswith(_OWN):
        return
    with _lock:
        state.compiled += 1
        if not _expected.get() and not state.warned:
            state.surprises.append((f"{src.name} of {module.removeprefix(MODULE_PREFIX)}", times.total / 1e6))


def warn_of_compiles() -> None:
    """Warns, once per process, when kernels were compiled in a launch and nobody expected it."""
    if not state.surprises:
        return
    with _lock:
        told, state.surprises = state.surprises, []
        said, state.warned = state.warned, True
    if said or not told:
        return
    more = f" and {len(told) - 1} more" if len(told) > 1 else ""
    warn(
        PerformanceWarning,
        f"a launch waited {sum(seconds for _, seconds in told):.1f} s for Triton to compile {told[0][0]}{more}: "
        "`treegen warm` compiles a shape's kernels ahead, and treegen.kernel_counts() counts (said once)",
    )
