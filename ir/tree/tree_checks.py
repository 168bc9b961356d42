"""Checks of the rows and KV slots that callers give for the nodes of a tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from treegen.ir.arrays import Ints, IntsLike, check_total, int32_array, listed
from treegen.ir.errors import TreeError
from treegen.ir.tree.kv import KVRuns


def checked_kv(kv: KVRuns | Sequence[IntsLike], tokens: Ints) -> KVRuns:
    """Returns the runs of nodes with these tokens. Raises TreeError unless each node has one slot per token."""
    check_total(tokens)
    if not isinstance(kv, KVRuns):
        return KVRuns.from_slots(tokens, kv)
    kv.check_fits(tokens)
    return kv


def checked_rows(rows: Iterable[tuple[int, int]], tokens: Ints) -> tuple[Ints, Ints]:
    """Returns the node of each row, and its sees. Raises TreeError for a row that is outside of its node."""
    reason, fix = "is not a (node, sees) pair", "give node and sees for every row"
    pairs = listed("rows", rows, fix)
    for index, pair in enumerate(pairs):
        if type(pair) is not tuple:
            pairs[index] = listed(f"rows[{index}]", pair, fix, reason)
        if len(pairs[index]) != 2:
            raise TreeError(f"rows[{index}]", pair, reason, fix)
    node = int32_array("rows' node", [pair[0] for pair in pairs], low=0, high=len(tokens) - 1)
    sees = int32_array("rows' sees", [pair[1] for pair in pairs], low=0)
    beyond = np.flatnonzero(sees > tokens[node])
    if len(beyond):
        row = int(beyond[0])
        reason = f"sees beyond node {node[row]}, which has {tokens[node[row]]} tokens"
        raise TreeError(f"rows[{row}]", (int(node[row]), int(sees[row])), reason, "lower sees")
    return node, sees
