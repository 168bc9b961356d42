"""Groups and segments: a plan's parts as small objects, and the columns of the arrays that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treegen.ir.arrays import Ints, frozen, offsets

ROW_ARRAYS = ("row_lo", "row_hi")
"""Columns of rank intervals."""
SEGMENT_ARRAYS = ("node", "start", "stop", "seen_lo", "seen_hi")
"""Columns of segments."""
ARRAYS = ("row_indptr", *ROW_ARRAYS, "segment_indptr", *SEGMENT_ARRAYS, "round")
"""All arrays of a plan."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start:stop` of one node, read by a group and seen by its rows `seen[0]:seen[1]` (group row numbers)."""

    node: int
    start: int
    stop: int
    seen: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are processed together, and the segments that they read.

    Attributes:
        rows: Ascending disjoint intervals (lo, hi) of ranks.
        segments: The segments that the group reads.
        round: The round in which the group is launched, after the groups of earlier rounds have been merged.
    """

    rows: tuple[tuple[int, int], ...]
    segments: tuple[Segment, ...]
    round: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of all intervals; inside the group they are numbered from 0 in rank order."""
        return sum(hi - lo for lo, hi in self.rows)

    @property
    def masked(self) -> bool:
        """Whether some row does not see all segments."""
        return any(segment.seen != (0, self.num_rows) for segment in self.segments)

    def __str__(self) -> str:
        rows = ",".join(f"{lo}-{hi - 1}" for lo, hi in self.rows)
        round = f"round {self.round} | " if self.round else ""
        return f"{round}rows {rows} | " + ", ".join(self._segment_text(segment) for segment in self.segments)

    def _segment_text(self, segment: Segment) -> str:
        text = f"n{segment.node}[{segment.start}:{segment.stop}]"
        lo, hi = segment.seen
        if (lo, hi) == (0, self.num_rows):
            return text
        return f"{text} seen {lo}-{hi - 1}" if hi > lo else f"{text} unseen"


def arrays_of(groups: Sequence[Group]) -> dict[str, Any]:
    """Returns the arrays of a plan of these groups, by name."""
    intervals = [interval for group in groups for interval in group.rows]
    segments = [(s.node, s.start, s.stop, *s.seen) for group in groups for s in group.segments]
    return {
        "row_indptr": frozen(offsets(np.array([len(group.rows) for group in groups], np.int64))),
        "segment_indptr": frozen(offsets(np.array([len(group.segments) for group in groups], np.int64))),
        "round": frozen(np.array([group.round for group in groups], np.int64)),
        **_columns(ROW_ARRAYS, intervals),
        **_columns(SEGMENT_ARRAYS, segments),
    }


def _columns(names: tuple[str, ...], rows: Sequence[tuple[int, ...]]) -> dict[str, Ints]:
    """Returns the columns of these rows by name."""
    table = np.array(rows, np.int64).reshape(-1, len(names))
    return {name: frozen(column) for name, column in zip(names, table.T, strict=True)}
