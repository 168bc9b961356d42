"""Thresholds on rows at which paths are cut, and the ranks and spans above and below the cuts.

node 0, 8 rows ─┬─ node 1, 5 rows ── 5 leaves of 1 row     threshold 8 cuts below node 0,
                └─ 3 leaves of 1 row                       threshold 5 below node 0 and below node 1
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Longs
from treegen.ir.tree import Tree

MOST_CUTS = 2
"""The most thresholds at which paths are cut."""


class Cut(NamedTuple):
    """Paths cut at a threshold on rows.

    Attributes:
        rows: The threshold: nodes that at least this number of rows see are above the cuts.
        lo: `[cuts]`; the first rank below each cut.
        hi: `[cuts]`; the end of the ranks below each cut.
        upper: The spans above all cuts.
    """

    rows: int
    lo: Longs
    hi: Longs
    upper: Longs


def thresholds_of(tree: Tree) -> list[int]:
    """Returns all thresholds on rows that cut a path: the rows of nodes that have a child with fewer rows."""
    seen, parent = tree.topology.rank_hi - tree.topology.rank_lo, tree.parent
    above = np.where(parent >= 0, seen[parent], 0)
    found: list[int] = np.unique(above[(seen < above) & (seen > 0)]).tolist()
    return found


def cuts_of(tree: Tree) -> list[Cut]:
    """Cuts paths at the lowest and at the highest threshold that cuts any; only once if both cut the same paths."""
    topology, spans, parent = tree.topology, tree.topology.spans, tree.parent
    seen = topology.rank_hi - topology.rank_lo
    above = np.where(parent >= 0, seen[parent], 0)
    nodes = ((seen < above) & (seen > 0)).nonzero()[0]
    if not len(nodes):
        return []
    # A tree with fewer rows than the threshold is not cut. The rows of each tree have neighbouring ranks.
    roots = parent < 0
    ends, of_root = topology.rank_hi[roots], seen[roots]
    of_tree = of_root[ends.searchsorted(spans.lo, "right")]
    seen_below, seen_above, of_span = seen[nodes], above[nodes], seen[spans.node]
    cuts: list[Cut] = []
    for rows in sorted({int(seen_below.min()) + 1, int(seen_above.max())}):
        node = nodes[(seen_above >= rows) & (seen_below < rows)]
        lo, hi = (ranks[node].astype(np.int64) for ranks in (topology.rank_lo, topology.rank_hi))
        if not cuts or not (np.array_equal(lo, cuts[-1].lo) and np.array_equal(hi, cuts[-1].hi)):
            cuts.append(Cut(rows, lo, hi, ((of_span >= rows) | (of_tree < rows)).nonzero()[0]))
    return cuts
