"""Ways to walk a tree as arrays: which cohort reads what, many ways at once, and what is made of them besides."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import INT32_MAX, Longs, ragged_ranges
from treegen.ir.schedule import TileClass


class Walks(NamedTuple):
    """Cohorts with something to read, of several lines (each a launch of work items), line by line.

    A way to walk the tree has `stages` lines: one, or under "final" merge two, of which the second has the lowest
    parts of paths. line, rows, lo, tokens: of every cohort, lo being its first rank; top: 1 + the place in depth-first
    order of the cut node at or below which it reads, 0 where there is none; of, span: what every cohort reads, root
    first, cohort by cohort. whole: whether no path is cut, so that every row is in one cohort of its line.
    """

    lines: int
    stages: int
    whole: bool
    line: Longs
    rows: Longs
    lo: Longs
    tokens: Longs
    top: Longs
    of: Longs
    span: Longs

    @property
    def ways(self) -> int:
        """Ways to walk the tree."""
        return self.lines // self.stages

    def taken(self, ways: Longs, spans: bool = True) -> Walks:
        """These ways to walk the tree, in this order; one may be taken several times. spans: with what cohorts read."""
        lines = ways if self.stages == 1 else (ways[:, None] * self.stages + np.arange(self.stages)).ravel()
        first = np.searchsorted(self.line, np.arange(self.lines + 1))
        counts = (first[1:] - first[:-1])[lines]
        line = np.repeat(np.arange(len(lines)), counts)
        return self._picked(len(lines), line, ragged_ranges(first[lines], counts), spans)

    def staged(self, lowest: npt.NDArray[np.bool_]) -> Walks:
        """The same ways in two stages: second the cohorts that are `lowest`."""
        line = 2 * self.line + lowest
        order = np.argsort(line, kind="stable")
        return self._picked(2 * self.lines, line[order], order)._replace(stages=2, whole=False)

    def _picked(self, lines: int, line: Longs, cohort: Longs, spans: bool = True) -> Walks:
        """These cohorts, as of lines `line`."""
        columns = (self.rows[cohort], self.lo[cohort], self.tokens[cohort], self.top[cohort])
        of = span = np.empty(0, np.int64)
        if spans:
            first = np.searchsorted(self.of, np.arange(len(self.line) + 1))
            pairs = (first[1:] - first[:-1])[cohort]
            of = np.repeat(np.arange(len(cohort)), pairs)
            span = self.span[ragged_ranges(first[cohort], pairs)]
        return Walks(lines, self.stages, self.whole, line, *columns, of, span)


class Merging(NamedTuple):
    """What is merged. Per way to walk the tree: rows that a launch of merges writes, partials of the one that has most,
    and all that it reads. Per line: rows of partials that its items write, and that they join; the most of a row.
    """

    rows: Longs
    longest: Longs
    read: Longs
    written: Longs
    joined: Longs
    longest_joined: Longs


class Lines(NamedTuple):
    """What plans are made of besides their walks: every way's tile class, an index of `classes`, and split."""

    classes: tuple[TileClass, ...]
    tile: Longs
    split: Longs

    def taken(self, ways: Longs) -> Lines:
        """Of these ways."""
        return Lines(self.classes, self.tile[ways], self.split[ways])

    def cut(self, split: int | None) -> Lines:
        """The same with this split."""
        return self._replace(split=np.full(len(self.split), split or INT32_MAX))


def highest(values: Longs, line: Longs, lines: int) -> Longs:
    """The highest value of every line, 0 where a line has none; `line` ascends."""
    result = np.zeros(lines, np.int64)
    first = np.flatnonzero(np.append(True, line[1:] != line[:-1])[: len(line)])
    if len(first):
        result[line[first]] = np.maximum.reduceat(values, first)
    return result
