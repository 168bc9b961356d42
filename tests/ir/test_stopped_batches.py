"""Changes of a LiveBatch that somebody stops at any line: the same call again makes the batch whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.stops import interrupted_at
from treegen import LiveBatch

CHANGES: dict[str, Callable[[LiveBatch], object]] = {
    "finish": lambda batch: batch.finish(0),
    "moved": lambda batch: batch.moved(0),
    "set_tokens": lambda batch: batch.set_tokens(0, 40),
    "reorder": lambda batch: batch.reorder({0: 3, 3: 0}),
    "set_rows": lambda batch: batch.set_rows(1, 5),
}


def family() -> LiveBatch:
    """A request, three others that share with it, and one that shares with one of these."""
    batch = LiveBatch(page_size=16)
    first = batch.add(200)
    second = batch.add(200, first, 160)
    batch.add(200, first, 64)
    batch.add(200, first, 96)
    batch.add(200, second, 192)
    return batch


@pytest.mark.parametrize("name", CHANGES)
def test_the_same_call_again(name: str) -> None:
    change, line, stopped = CHANGES[name], 1, True
    expected = family()
    change(expected)
    while stopped:
        batch = family()
        before = batch.changes, batch.moves
        stopped = interrupted_at(line, lambda batch=batch: change(batch))
        if name != "finish" or batch.row[0] >= 0:
            change(batch)
        shown = f"stopped at line {line}"
        batch.tree()  # refuses cycles
        assert (batch.tokens == expected.tokens).all(), shown
        assert (batch.rows == expected.rows).all(), shown
        assert (batch.row == expected.row).all(), shown
        assert (batch.shared_tokens <= expected.shared_tokens).all(), shown
        assert (batch.changes, batch.moves) > before, shown  # so that kernels look at it
        batch.add(200, 1, 64)  # walks up what was shared
        line += 1
    assert line > 10
