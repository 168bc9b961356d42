"""Ctrl-C at any line of treegen's code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import treegen
import treegen.ir

EVERYWHERE = tuple(f"{Path(module.__path__[0])}/" for module in (treegen, treegen.ir))
"""Parts of the paths of all files."""


def interrupted_at(
    line: int, run: Callable[[], Any], files: Collection[str] = EVERYWHERE, but: Collection[str] = ()
) -> bool:
    """Runs, and presses Ctrl-C at this line of those that are executed; says whether the run gets that far.

    Counts the lines of functions in files whose paths have one of these parts, without functions of the names `but`.
    """
    seen = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal seen
        code = frame.f_code
        if not any(part in code.co_filename for part in files):
            return None
        if event == "line" and code.co_name not in but:
            seen += 1
            if seen == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
