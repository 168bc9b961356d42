"""Trees by request of the running requests of a LiveBatch."""

from __future__ import annotations

import numpy as np

from treegen.ir.arrays import Ints, frozen, largest, ramp
from treegen.ir.tree.requests import of_queries, of_requests
from treegen.ir.tree.tree import Tree


def tree_of_seats(table: Ints, page_size: int, *, shared: bool = True) -> Tree:
    """Makes the tree of the requests in a `LiveBatch.table`, with their rows in the order of the seats.

    shared: whether requests share the tokens that they are known to share, or none.
    """
    seats = (table[0] >= 0).nonzero()[0]
    _, epoch, above, sharing, tokens, rows = table.take(seats, 1)
    if not shared:
        above, sharing = np.full(len(seats), -1, np.int32), np.zeros(len(seats), np.int32)
    elif len(seats) and seats.item(-1) >= len(seats):  # the seats have gaps
        number = np.empty(table.shape[1] + 1, np.int32)
        number[seats], number[-1] = ramp(len(seats)), -1
        above = number.take(above)
    made = tokens, above, sharing, frozen(seats), epoch, page_size
    several = len(rows) > 0 and largest(rows) > 1
    parts, topology, requests = of_queries(frozen(rows), *made) if several else of_requests(*made)
    return Tree(*parts, topology, requests)
