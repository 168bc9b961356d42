"""Trees by request in which requests share less than they could, so that a plan of them fits more batches.

A node that few requests share, and few tokens of, saves little. A plan that relies on it fails as soon as another
request comes into the seat of one of them:

    request 0   [ 0 ......... 4096 | 4096 . 4128 | 4128 ..>
    request 1                      |             [ 4128 ..>     shares 4096 tokens if 32 may be read twice
    request 2                      [ 4096 ..>
"""

from __future__ import annotations

import numpy as np

from treegen.ir.arrays import Ints, number, ramp
from treegen.ir.tree.request_kv import RequestKV
from treegen.ir.tree.requests import Made, nearest_owners, of_queries, of_requests
from treegen.ir.tree.topology import Topology


def shallow(requests: RequestKV, most: int) -> Made:
    """Returns the tree in which each request shares the pages of at most `most` other requests, its first ones.

    Further shared pages count as its own. In a chain of forks each request would otherwise share pages of all earlier
    ones.
    """
    indptr, owner, _, end = requests.claims()
    place = np.zeros(requests.seat.max(initial=-1) + 1, np.int64)
    place[requests.seat] = ramp(len(requests.seat))
    above = requests.above.astype(np.int64)
    shared = requests.shared_tokens.astype(np.int64)
    deep = (indptr[1:] - indptr[:-1] > most).nonzero()[0]
    last = indptr[deep] + most - 1
    above[deep], shared[deep] = place[owner[last]], end[last].astype(np.int64) * requests.page_size
    made = requests.length, above, shared, requests.seat, requests.epoch, requests.page_size
    return of_requests(*made) if requests.queries is None else of_queries(requests.queries, *made)


def without_sharing(requests: RequestKV) -> Made | None:
    """Returns the tree in which requests share nothing; None where it is the same. Each request has one row."""
    if not np.count_nonzero(requests.shared_tokens):
        return None
    count = len(requests.seat)
    alone, nothing = np.full(count, -1, np.int32), np.zeros(count, np.int32)
    return of_requests(requests.length, alone, nothing, requests.seat, requests.epoch, requests.page_size)


def without_small_shares(row_node: Ints, topology: Topology, requests: RequestKV, most: int) -> Made | None:
    """Returns the tree in which requests read by themselves what sharing saves least on; None where it is the same.

    Args:
        row_node: `[rows]`; the node of each request's row.
        topology: The tree's topology.
        requests: The places of its tokens. Each request has one row.
        most: The most tokens that are read in addition.
    """
    others = topology.rank_hi - topology.rank_lo - number(1)
    shared = (others > 0).nonzero()[0]
    saved = others.take(shared) * topology.tokens.take(shared)
    by_saved = saved.argsort(kind="stable")
    small = shared.take(by_saved[: saved.take(by_saved).cumsum().searchsorted(most, "right")])
    is_small = np.zeros(len(others) + 1, bool)  # the last entry is for no node
    is_small[small] = True
    node = topology.parent.take(row_node)
    while np.count_nonzero(up := is_small.take(node)):
        node = np.where(up, topology.parent.take(node), node)
    kept = np.where(node >= 0, requests.of_nodes[2].take(node), 0)
    tokens = np.minimum(requests.shared_tokens, kept).astype(np.int64)
    if not np.count_nonzero(tokens != requests.shared_tokens):
        return None
    owners = nearest_owners(np.where(tokens > 0, requests.above, -1).astype(np.int64), tokens)
    return of_requests(requests.length, owners, tokens, requests.seat, requests.epoch, requests.page_size)
