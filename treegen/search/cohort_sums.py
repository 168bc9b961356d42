"""Cohorts added up: totals of whole walks, and bins of cohorts with about equal tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Floats, Longs, ramp
from treegen.schedule.pack_runs import MOST_SPREAD
from treegen.search.cohort_counts import Cohorts

_BIN_BITS, BINS = 19, 512  # dropping 19 bits of a float32 leaves 16 bins per power of two; 32 powers fit
_FIRST_BIN = 127 << 4  # the bin of 1.0
_TIES = float(1 << 26)  # more than the packed tiles of any cohort


def fold(of_chunks: Floats, walks: int, join: np.ufunc) -> Floats:
    """Joins the values of a walk's two chunks, in place: [..., chunks] become [..., walks]."""
    lower = of_chunks.shape[-1] - walks
    of_walks = of_chunks[..., :walks]
    if lower:
        last = of_walks[..., walks - lower :]
        join(last, of_chunks[..., walks:], out=last)
    return of_walks


class Tally(NamedTuple):
    """Totals of whole cohorts, per walk.

    Attributes:
        tokens: Tokens of all cohorts.
        cohorts: Cohorts, without empty ones.
        full: Full tiles.
        packed: Packed tiles.
        longest: Tokens of the cohort with most tokens.
        longest_full: Full tiles of the cohort with most tiles.
        longest_packed: Packed tiles of the cohort with most tiles.
    """

    tokens: Floats
    cohorts: Floats
    full: Floats
    packed: Floats
    longest: Floats
    longest_full: Floats
    longest_packed: Floats


def tally(cohorts: Cohorts, walks: int) -> Tally:
    """Adds up the cohorts of each walk. Runs are packed whole or token by token, as `lower` packs a launch."""
    first, columns = cohorts.first, cohorts.columns
    tokens, _, full, by_run, by_token = fold(np.add.reduceat(columns, first, axis=1), walks, np.add)
    alive = fold(np.add.reduceat(cohorts.tokens > 0, first, dtype=np.float64), walks, np.add)
    spread = full + by_run > MOST_SPREAD * (full + by_token)
    packed = columns[3]
    if np.count_nonzero(spread):
        packed = np.where(spread[cohorts.walk].repeat(cohorts.counts), columns[4], packed)
    tiles = columns[2] + packed
    tiles *= _TIES
    tiles += packed
    longest = fold(np.maximum.reduceat(cohorts.tokens, first), walks, np.maximum)
    most_tiles = fold(np.maximum.reduceat(tiles, first), walks, np.maximum)
    longest_tiles, longest_packed = np.divmod(most_tiles, _TIES)
    packed = np.where(spread, by_token, by_run)
    return Tally(tokens, alive, full, packed, longest, longest_tiles - longest_packed, longest_packed)


class Bins(NamedTuple):
    """Cohorts of one chunk with about equal tokens.

    Attributes:
        cohorts: `[bins]`; the number of cohorts.
        rows: `[bins]`; the rows of all of them.
        tokens: `[bins]`; the mean tokens of one of them.
        first: `[chunks]`; the first bin of each chunk.
        counts: `[chunks]`; the bins of each chunk.
        walk: `[bins]`; the walk of each bin.
    """

    cohorts: Floats
    rows: Floats
    tokens: Floats
    first: Longs
    counts: Longs
    walk: Longs

    def parts(self, splits: Floats) -> Floats:
        """Returns the work items that splits [splits, walks] make of a cohort: [splits, bins]."""
        parts: Floats = np.ceil(self.tokens / splits.take(self.walk, axis=1))
        return parts

    def sums(self, values: Floats, walks: int) -> Floats:
        """Adds up values [..., bins] for each walk: [..., walks]."""
        return fold(np.add.reduceat(values, self.first, axis=-1), walks, np.add)


def bins_of(cohorts: Cohorts) -> Bins:
    """Returns the bins of all chunks: one per cohort in small chunks, else 16 bins per power of two of tokens."""
    chunks, counts = len(cohorts.counts), cohorts.counts
    if int(counts.max()) <= BINS:
        ones = np.ones(len(cohorts.tokens))
        return Bins(ones, cohorts.rows, cohorts.tokens, cohorts.first, counts, cohorts.walk.repeat(counts))
    cell = cohorts.tokens.astype(np.float32).view(np.int32) >> _BIN_BITS
    cell -= _FIRST_BIN - 1
    np.maximum(cell, 0, out=cell)
    place = ramp(len(cell)) - cohorts.first.repeat(counts)
    cells = np.where((counts <= BINS).repeat(counts), place, cell)
    cells += (BINS * ramp(chunks)).repeat(counts)
    found = np.bincount(cells)
    bins = found.nonzero()[0]
    number = found[bins].astype(np.float64)
    rows, tokens = (np.bincount(cells, column)[bins].astype(np.float64) for column in (cohorts.rows, cohorts.tokens))
    first = (bins // BINS).searchsorted(np.arange(chunks + 1))
    of_chunks = first[1:] - first[:-1]
    return Bins(number, rows, tokens / number, first[:-1], of_chunks, cohorts.walk.repeat(of_chunks))
