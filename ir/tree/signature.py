"""A tree's signature: a digest of its topology, whatever the order of siblings and rows."""

from __future__ import annotations

import hashlib

import numpy as np

from treegen.ir.arrays import Ints
from treegen.ir.tree.topology import Topology

_NONE: list[bytes] = []


def signature(parent: Ints, tokens: Ints, topology: Topology, row_sees: Ints) -> str:
    """Returns a digest of 128 bits: that of a node covers its tokens, its rows' sees and its children's sorted digests.

    The order of siblings, the order of rows and KV slots do not change it.
    """
    families: list[list[bytes]] = [[] for _ in range(len(parent) + 1)]  # digests of a node's children, for -1 of roots
    order = topology.nodes_in_preorder[::-1]
    # Each node's own part: its tokens, the number of its rows, and their sees, 4 bytes each.
    begin, own = topology.rank_lo[order], (topology.rank_own - topology.rank_lo)[order]
    lengths, counts = tokens[order].astype("<i4").tobytes(), own.astype("<i4").tobytes()
    sees = row_sees[topology.row_of_rank].astype("<i4").tobytes()
    place = 0
    for node, above, first, rows in zip(
        order.tolist(), parent[order].tolist(), (4 * begin.astype(np.int64)).tolist(), own.tolist(), strict=True
    ):
        text = lengths[place : place + 4] + counts[place : place + 4] + sees[first : first + 4 * rows]
        place += 4
        below = families[node]
        if below:
            families[node] = _NONE
            below.sort()
            text += b"".join(below)
        families[above].append(hashlib.blake2b(text, digest_size=16).digest())
    return hashlib.blake2b(b"".join(sorted(families[-1])), digest_size=16).hexdigest()
