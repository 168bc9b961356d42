"""Paths of requests in chunks of one size: requests that have a whole chunk in common read it together.

request 0   [ chunk 0 | chunk 1 | chunk 2 ..>
request 1   [ chunk 0 | chunk 1 | chunk 2 .....>     One group reads chunk 0 of both. Each request reads its own
in common   [ .............|                         chunk 1, because they share only the beginning of it.
"""

from __future__ import annotations

import numpy as np

from treegen.ir.arrays import offsets, ragged, stacked
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree
from treegen.ir.tree.request_kv import RequestKV


def by_chunk(tree: Tree, requests: RequestKV, chunk: int) -> Plan:
    """Plans a tree by request, with one row each, in groups that read one chunk of `chunk` tokens each.

    Groups of several rows come first. Each of them reads a whole chunk, which lies in the pages of one request. All
    other groups have one row.
    """
    node, _, stop, lo, hi = tree.topology.spans.table.astype(np.int64)
    owner, first = requests.owner.take(node), requests.first.take(node).astype(np.int64)
    number = first // chunk
    span, step = ragged((first + stop - 1) // chunk + 1 - number)
    number = number.take(span) + step
    node, owner, first, lo, hi = (column.take(span) for column in (node, owner, first, lo, hi))
    start = np.maximum(number * chunk, first)
    end = np.minimum((number + 1) * chunk, first + stop.take(span))

    # The parts of a chunk in the nodes of one request are neighbours. The rows that see the last one see all of them.
    begins = np.ones(len(node), bool)
    begins[1:] = (owner[1:] != owner[:-1]) | (number[1:] != number[:-1])
    begin = begins.nonzero()[0]
    counts = np.diff(np.append(begin, len(node)))
    last = begin + counts - 1
    tokens = np.add.reduceat(end - start, begin) if len(begin) else begin
    shared = (tokens == chunk) & (hi[last] - lo[last] > 1)
    of_groups = np.repeat(shared, counts).nonzero()[0]
    group_rows = (hi - lo)[last[shared]]

    # Each other row, before or after the group's rows, reads its parts by itself.
    together = shared.repeat(counts)
    group_lo = np.where(together, lo[last].repeat(counts), hi)
    group_hi = np.where(together, hi[last].repeat(counts), hi)
    (before, early), (behind, late) = ragged(group_lo - lo), ragged(hi - group_hi)
    part = np.append(before, behind)
    rank = np.append(lo[before] + early, group_hi[behind] + late)
    order = np.lexsort((start[part], number[part], rank))
    part, rank = part[order], rank[order]
    opens = np.ones(len(part), bool)
    opens[1:] = (rank[1:] != rank[:-1]) | (number[part[1:]] != number[part[:-1]])
    alone = opens.nonzero()[0]

    read = np.append(of_groups, part)
    segments = np.append(counts[shared], np.diff(np.append(alone, len(part))))
    rows = np.append(group_rows, np.ones(len(alone), np.int64))
    row_lo = np.append(lo[last[shared]], rank[alone])
    return Plan.trusted(
        "by-chunk",
        np.arange(len(rows) + 1),
        row_lo,
        row_lo + rows,
        offsets(segments),
        stacked(node[read], (start - first)[read], (end - first)[read], 0, rows.repeat(segments)),
        rows,
    )
