"""Progress bars on stderr for commands that take longer than a second, where stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import TYPE_CHECKING, Protocol

from treegen import progress

if TYPE_CHECKING:
    from rich.progress import Progress

QUIET_SECONDS = 1.0


class Advance(Protocol):
    """Advances a bar by a number of steps."""

    def __call__(self, steps: float = 1) -> None: ...


@contextmanager
def progress_bar(steps: float, doing: str = "") -> Iterator[Advance]:
    """Yields a function that advances the bar by the number of steps done since its last call."""
    with _bar(steps, doing) as bar:
        yield bar.advance if bar else _ignore


@contextmanager
def activity_bar() -> Iterator[None]:
    """Shows the progress that treegen.progress reports inside the block, with a bar of unknown length."""
    with _bar(None, "") as bar:
        if bar is None:
            yield
            return
        with progress.told_to(bar.tell):
            yield


@contextmanager
def _bar(steps: float | None, doing: str) -> Iterator[_Bar | None]:
    """Yields a bar, which is shown after QUIET_SECONDS; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(steps, doing)
    timer = Timer(QUIET_SECONDS, bar.show)
    timer.daemon = True
    timer.start()
    try:
        yield bar
    finally:
        timer.cancel()
        timer.join()
        bar.hide()


class _Bar:
    """The text and the progress of a bar. `show` is called from another thread."""

    def __init__(self, steps: float | None, doing: str) -> None:
        self._steps, self._done, self._doing = steps, 0.0, doing
        self._lock = Lock()
        self._shown: Progress | None = None

    def tell(self, doing: str) -> None:
        """Changes the text."""
        with self._lock:
            self._doing = doing
            if self._shown is not None:
                self._shown.update(self._shown.task_ids[0], description=doing)

    def advance(self, steps: float = 1) -> None:
        """Adds steps that are done."""
        with self._lock:
            self._done += steps
            if self._shown is not None:
                self._shown.update(self._shown.task_ids[0], completed=self._done)

    def show(self) -> None:
        """Draws the bar, which redraws itself several times a second."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        percent = () if self._steps is None else (TaskProgressColumn(),)
        text = TextColumn("{task.description}", markup=False)
        console = Console(file=sys.stderr)
        shown = Progress(text, BarColumn(20), *percent, TimeElapsedColumn(), console=console, transient=True)
        with self._lock:
            shown.update(shown.add_task(self._doing, total=self._steps), completed=self._done)
            shown.start()
            self._shown = shown

    def hide(self) -> None:
        """Removes the bar if it is shown."""
        if self._shown is not None:
            self._shown.stop()


def _ignore(steps: float = 1) -> None:
    """Does nothing, where no bar is shown."""
