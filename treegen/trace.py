"""Stage timings on stderr, when asked for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from treegen.environment import traces_stages


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Prints how long the body took, in milliseconds, if TREEGEN_TRACE=1."""
    if not traces_stages():
        yield
        return
    begin = time.perf_counter()
    yield
    print(f"treegen: {name} {1e3 * (time.perf_counter() - begin):.3f} ms", file=sys.stderr)
