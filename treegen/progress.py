"""Progress of long calls, reported to a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


def now(doing: str) -> None:
    """Reports the next step, such as `weighing deft-node`, to the listener if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(doing)


@contextmanager
def told_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Calls `listener(doing)` before every step inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
