"""Trees by request without the tokens that lie before every row's sliding window.

With a window of 128 tokens, the row of a request of 8,192 tokens sees positions 8,064 to 8,191:

    before      request 0   [ 0 .............................. 8000 | 8000 ......... 8192 >
                request 1                                           | [ 8000 .... 8160 >
    afterwards  request 0                                    (none) |     [ 8064 ... 8192 >
                request 1                                           |   [ 8032 .. 8160 >
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, offsets, stacked
from treegen.ir.tree.kv import KVRuns
from treegen.ir.tree.page_tables import TreeParts
from treegen.ir.tree.request_kv import RequestKV
from treegen.ir.tree.requests import Made
from treegen.ir.tree.topology import Topology, shortened


def within_windows(
    row_node: Ints, row_sees: Ints, topology: Topology, requests: RequestKV, window_left: int, unit: int
) -> Made | None:
    """Returns the tree without tokens that no row's window reaches; None where windows reach all of them.

    A node loses tokens at its beginning, in whole units, or all of them, and then it is left out. Windows of longer
    requests reach no token that is lost. `RequestKV.least` says how much shorter a request may get.

    Args:
        row_node: `[rows]`; the node of each row.
        row_sees: `[rows]`; the tokens of its node that each row sees.
        topology: The tree's topology.
        requests: The places of its tokens.
        window_left: Tokens before its own that a row sees.
        unit: Tokens that nodes lose at a time; for kernels, a multiple of the page size.
    """
    first, tokens = requests.first, topology.tokens
    if not len(row_node):
        return None
    reached = (first.take(row_node) + row_sees).astype(np.int64) - (1 + window_left)
    left = np.clip(_least(reached, topology) - first, 0, tokens)
    left = np.where(left < tokens, left - left % unit, left)
    if not np.count_nonzero(left):
        return None
    made, kept = shortened(topology, left), left < tokens
    node, sees = frozen((kept.cumsum() - 1).take(row_node)), frozen(row_sees - left.take(row_node))
    of_nodes = stacked(requests.owner, first + left, requests.of_nodes[2]).compress(kept, axis=1)
    least = _least_tokens(np.where(left > 0, first + left, 0), row_node, topology.parent, requests, window_left)
    parts = TreeParts(made.parent, made.tokens, node, sees, _stored_in_order(made.tokens))
    return parts, made, replace(requests, of_nodes=frozen(of_nodes), least=least)


def _least(values: Longs, topology: Topology) -> Longs:
    """Returns for each node the smallest value of the rows at or below it. values: `[rows]`."""
    by_rank = values.take(topology.row_of_rank)
    bounds = np.stack([topology.rank_lo, topology.rank_hi], axis=1).ravel()
    least: Longs = np.minimum.reduceat(np.append(by_rank, by_rank[-1]), bounds)[::2]
    return least


def _least_tokens(begin: Longs, row_node: Ints, parent: Ints, requests: RequestKV, window_left: int) -> Ints:
    """Returns the fewest tokens of each request with which its windows reach no token that is lost.

    begin: the position of each node's first token where it has lost tokens, else 0.
    """
    queries: Longs | int = 1
    node = row_node
    if requests.queries is not None:
        queries, node = requests.queries.astype(np.int64), row_node.take(offsets(requests.queries)[:-1])
    reached = begin.take(node)
    while np.count_nonzero(up := (reached == 0) & (node >= 0)):
        node = np.where(up, parent.take(node), -1)
        reached = np.where(node >= 0, begin.take(node), reached)
    return frozen(np.where(reached > 0, reached + (window_left + queries), 0))


def _stored_in_order(tokens: Ints) -> KVRuns:
    """Returns made-up places of nodes' tokens, a run for each node; plans only compare them."""
    ends = offsets(tokens)
    return KVRuns(frozen(np.arange(len(ends))), frozen(ends[:-1]), tokens)
