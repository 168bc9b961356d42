"""What a long call is doing, told to whoever listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


def now(doing: str) -> None:
    """Tells the listener, if there is one, what comes next: `weighing deft-node`."""
    listener = _listener.get()
    if listener is not None:
        listener(doing)


@contextmanager
def told_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Inside, `listener(doing)` is called before every step."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
