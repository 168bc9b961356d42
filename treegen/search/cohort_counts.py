"""The cohorts of all walks, counted at once by sums over ranks; treegen.search.weigh weighs policies by them.

A walk divides a tree's rows into cohorts of neighbouring ranks that read in one kernel config. If its cohorts read
whole paths, they are one chunk. If paths are cut at a threshold on rows, a walk has two chunks: upper cohorts read the
nodes above the cuts, and lower cohorts the nodes below.

    spans [spans]                          tokens, packed runs and full tiles of each span
      -> sums [parts, quantities, ranks]   of the spans that begin before a rank, and of those that end at or before it
      -> cohorts                           sums of begins before a cohort's end, less sums of ends before its begin

Tiles of whole cohorts are counted as `lower` makes them (treegen.schedule.pack_runs).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from treegen.ir.arrays import Floats, Longs, offsets, ragged
from treegen.ir.tree import Tree
from treegen.search.path_cuts import Cut
from treegen.search.walk_layout import WalkLayout
from treegen.target.tile_config import RUN_TOKENS


class Cohorts(NamedTuple):
    """All cohorts, chunk by chunk; some are empty.

    Attributes:
        columns: `[5, cohorts]`; tokens, rows, full tiles, and packed tiles if runs are packed in whole runs or token by
            token.
        first: `[chunks]`; the first cohort of each chunk.
        counts: `[chunks]`; the cohorts of each chunk.
        walk: `[chunks]`; the walk of each chunk.
    """

    columns: Floats
    first: Longs
    counts: Longs
    walk: Longs

    @property
    def tokens(self) -> Floats:
        """Tokens of each cohort."""
        column: Floats = self.columns[0]
        return column

    @property
    def rows(self) -> Floats:
        """Rows of each cohort."""
        column: Floats = self.columns[1]
        return column

    def of_walk(self, walk: int) -> Longs:
        """Returns the tokens of each cohort of a walk, without empty ones."""
        chunks = (self.walk == walk).nonzero()[0].tolist()
        places = [slice(self.first.item(chunk), self.first.item(chunk) + self.counts.item(chunk)) for chunk in chunks]
        tokens = np.concatenate([self.tokens[place] for place in places]).astype(np.int64)
        return tokens.compress(tokens > 0)


def cohorts_of(tree: Tree, layout: WalkLayout, cuts: list[Cut]) -> Cohorts:
    """Counts the cohorts of all walks."""
    lower = [_lower(cut, layout.rows[len(layout.walks) - len(cuts) + index]) for index, cut in enumerate(cuts)]
    begin = np.concatenate([layout.begin, *(lo for lo, _ in lower)])
    end = np.concatenate([layout.end, *(hi for _, hi in lower)])
    counts = np.array([*layout.counts, *(len(lo) for lo, _ in lower)])
    columns = np.empty((5, len(begin)))
    tokens, rows, full, by_run, by_token = columns
    np.subtract(end, begin, out=rows)
    begun, ended = _sums_by_rank(tree, layout.sizes, cuts)
    quantities, ranks = begun.shape[1:]
    place = (layout.part * (quantities * ranks)).repeat(counts)
    begin += place
    end += place
    of_size = layout.tiles.size[layout.walk] + 1  # from packed runs on
    for quantity, step in ((tokens, 0), (by_run, ranks), (full, (of_size * ranks).repeat(counts))):
        begin += step
        end += step
        begun.take(end, out=quantity, mode="clip")
        quantity -= ended.take(begin)
    tile_tokens = layout.tiles.tokens[layout.walk].repeat(counts)
    np.divide(tokens, tile_tokens, out=by_token)
    by_run *= RUN_TOKENS / tile_tokens
    for packed in (by_run, by_token):
        packed -= full
        np.ceil(packed, out=packed)
    return Cohorts(columns, offsets(counts)[:-1], counts, layout.walk)


def _lower(cut: Cut, rows: int) -> tuple[Longs, Longs]:
    """Returns the begins and the ends of the ranks of cohorts of `rows` rows below cuts."""
    below = cut.hi - cut.lo
    if int(below.max()) <= rows:
        return cut.lo, cut.hi
    fragment, step = ragged(-(-below // rows))
    lo = cut.lo[fragment] + step * rows
    return lo, np.minimum(lo + rows, cut.hi[fragment])


def _sums_by_rank(tree: Tree, sizes: tuple[int, ...], cuts: list[Cut]) -> tuple[Floats, Floats]:
    """Sums over the spans that begin before each rank, and over those that end at or before it.

    Returns:
        Two arrays `[parts, quantities, ranks + 1]`. Parts are those of WalkLayout. Quantities are tokens, packed runs,
        and full tiles of each size.
    """
    spans, ranks = tree.topology.spans, tree.num_rows + 1
    values = _quantities(tree, sizes)
    lines = (ranks * np.arange(len(values)))[:, None]
    sums = np.empty((2, 1 + 2 * len(cuts), len(values), ranks))
    places = (spans.lo + 1, spans.hi)
    for side, place in enumerate(places):
        _sum_by_rank(values, place + lines, sums[side, 0])
    for index, cut in enumerate(cuts):
        upper, lower = 1 + 2 * index, 2 + 2 * index
        above = values.take(cut.upper, axis=1)
        for side, place in enumerate(places):
            _sum_by_rank(above, place.take(cut.upper) + lines, sums[side, upper])
        np.subtract(sums[:, 0], sums[:, upper], out=sums[:, lower])
    return sums[0], sums[1]


def _sum_by_rank(values: Floats, cell: Longs, out: Floats) -> None:
    """Adds up values [quantities, spans] by their cells of `out` [quantities, ranks + 1], and then along its ranks."""
    of_ranks = np.bincount(cell.ravel(), values.ravel(), out.size).reshape(out.shape)
    np.add.accumulate(of_ranks, axis=1, out=out)


def _quantities(tree: Tree, sizes: tuple[int, ...]) -> Floats:
    """Returns tokens, packed runs, and full tiles of each size, for each span: [2 + sizes, spans].

    The KV runs of a node with several runs are assumed to have equal lengths, which are whole packed runs if they
    exceed one.
    """
    spans, kv = tree.topology.spans, tree.kv
    length = spans.lengths
    values = np.empty((2 + len(sizes), len(length)))
    values[0] = length
    values[1] = (length + (RUN_TOKENS - 1)) // RUN_TOKENS
    run: Any = length
    runs_of_node = kv.indptr[1:] - kv.indptr[:-1]
    if int(runs_of_node.max()) > 1:
        runs = np.maximum(runs_of_node[spans.node] * length // tree.tokens[spans.node], 1)
        np.maximum(values[1], runs, out=values[1])
        run = np.maximum(np.rint(length / (runs * RUN_TOKENS)) * RUN_TOKENS, 1.0)
        run = np.where(runs > 1, run, length)
    for row, size in enumerate(sizes, 2):
        np.multiply(length // run, run // size, out=values[row])
    return values
