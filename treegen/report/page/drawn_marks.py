"""Marks of a drawing: boxes of tokens and rows, which are folded together where they are too small to see.

A tree is drawn with tokens to the right and rows downward. A run of tokens that the same rows see is then a box:

    tokens   0            100     150
    row 0    ┌────────────┬───────┐
    row 1    │ node 0     │ node 1│
             │            ├───────┴──┐
    row 2    │            │ node 2   │
             └────────────┴──────────┘
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Longs

_CELLS = 4096, 2048
"""Cells of the finest grid, in tokens and rows: more than the points of a screen, so that a drawing can be enlarged."""


class Boxes(NamedTuple):
    """Boxes of tokens `start:stop` and rows `lo:hi`, `[boxes]` each."""

    start: Longs
    stop: Longs
    lo: Longs
    hi: Longs


class Folding(NamedTuple):
    """Marks that stand for boxes.

    Attributes:
        mark: `[boxes]`; the mark of each box.
        first: `[marks]`; the first box of each mark, ascending.
        bounds: `[marks]`; the box around all boxes of each mark.
        boxes: `[marks]`; the number of boxes of each mark.
    """

    mark: Longs
    first: Longs
    bounds: Boxes
    boxes: Longs


def fold(boxes: Boxes, most: int) -> Folding:
    """Folds boxes into at most `most` marks.

    Boxes keep a mark of their own where there are few, and where they are wider and higher than a cell of a grid. The
    others share the mark of their cell. The grid gets coarser until the marks are few enough.

    Args:
        boxes: The boxes, in the order in which marks are to be numbered.
        most: The most marks, at least 1.
    """
    marks = len(boxes.start)
    mark, first, bounds = np.arange(marks), np.arange(marks), boxes
    columns, rows = _CELLS
    while len(first) > most:
        _, found, joined = np.unique(_cells(bounds, columns, rows), return_index=True, return_inverse=True)
        place = np.empty(len(found), np.int64)
        place[np.argsort(found)] = np.arange(len(found))
        joined = place[joined]
        mark, first, bounds = joined[mark], first[np.sort(found)], _around(bounds, joined, len(found))
        columns, rows = max(columns // 2, 1), max(rows // 2, 1)
    return Folding(mark, first, bounds, np.bincount(mark, minlength=len(first)))


def _cells(boxes: Boxes, columns: int, rows: int) -> Longs:
    """Returns a key for each box: that of the cell that it shares, or one of its own."""
    width = max(-(-int(boxes.stop.max()) // columns), 1)
    height = max(-(-int(boxes.hi.max()) // rows), 1)
    low, narrow = boxes.hi - boxes.lo < height, boxes.stop - boxes.start < width
    if columns == 1 == rows:
        low[:] = True
    column, top, bottom = boxes.start // width, boxes.lo // height, np.where(low, 0, 1 + boxes.hi // height)
    cell = (column * (rows + 1) + top) * (rows + 2) + bottom
    return np.where(low | narrow, cell, -1 - np.arange(len(low)))


def _around(boxes: Boxes, mark: Longs, marks: int) -> Boxes:
    """Returns the smallest box around the boxes of each mark."""
    start, lo = np.full((2, marks), np.iinfo(np.int64).max)
    stop, hi = np.zeros((2, marks), np.int64)
    np.minimum.at(start, mark, boxes.start)
    np.maximum.at(stop, mark, boxes.stop)
    np.minimum.at(lo, mark, boxes.lo)
    np.maximum.at(hi, mark, boxes.hi)
    return Boxes(start, stop, lo, hi)
