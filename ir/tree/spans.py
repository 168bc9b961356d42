"""Spans: the parts of nodes that the same rows see.

node of 50 tokens        0 ........ 16 ........ 32 ........ 50
rank 3, sees 16          ├──────────┤                            a row of the node
rank 4, sees 32          ├──────────┼───────────┤                a row of the node
ranks 5 to 7             ├──────────┼───────────┼───────────┤    rows of its children
spans: seen by ranks         3:8         4:8         5:8
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints, Longs, frozen, stacked


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Maximal runs of one node's visible tokens that the same rows see, in depth-first order.

    Span i is the tokens `start[i]:stop[i]` of node `node[i]`. The ranks `lo[i]:hi[i]` see it, at least one. `table` [5,
    spans] has these columns, so that they can be gathered in one operation.
    """

    table: Ints

    @classmethod
    def of(
        cls,
        node: npt.NDArray[Any],
        start: npt.NDArray[Any] | int,
        stop: npt.NDArray[Any],
        lo: npt.NDArray[Any],
        hi: npt.NDArray[Any],
    ) -> Spans:
        """Makes spans of these columns."""
        return cls(stacked(node, start, stop, lo, hi))

    def until(self, stop: npt.NDArray[Any]) -> Spans:
        """Returns the same spans with other ends."""
        table = self.table.copy()
        table[2] = stop
        return Spans(frozen(table))

    def __len__(self) -> int:
        return len(self.table[0])

    @property
    def node(self) -> Ints:
        """The node of each span."""
        column: Ints = self.table[0]
        return column

    @property
    def start(self) -> Ints:
        """The first token of each span."""
        column: Ints = self.table[1]
        return column

    @property
    def stop(self) -> Ints:
        """The end of each span in its node."""
        column: Ints = self.table[2]
        return column

    @property
    def lo(self) -> Ints:
        """The first rank that sees each span."""
        column: Ints = self.table[3]
        return column

    @property
    def hi(self) -> Ints:
        """The end of the ranks that see each span."""
        column: Ints = self.table[4]
        return column

    @property
    def lengths(self) -> Longs:
        """The tokens of each span."""
        return (self.stop - self.start).astype(np.int64)


def whole_spans(tokens: Ints, preorder: Longs, rank_lo: Ints, rank_hi: Ints) -> Spans:
    """Returns the spans of nodes that no row ends inside of: one for each node with tokens and rows."""
    node = np.empty_like(preorder)
    node[preorder] = np.arange(len(tokens))
    seen = (rank_hi > rank_lo) & (tokens > 0)
    if np.count_nonzero(seen) < len(seen):
        node = node[seen[node]]
    return Spans.of(node, 0, tokens[node], rank_lo[node], rank_hi[node])


def cut_spans(
    tokens: Ints, node: Ints, sees: Ints, preorder: Ints | Longs, rank_lo: Ints, rank_own: Ints, rank_hi: Ints
) -> Spans:
    """Returns the spans of nodes that are cut at the `sees` of their own rows.

    node, sees: of each row, in rank order.
    """
    same_node = np.zeros(len(node), bool)
    same_node[1:] = node[1:] == node[:-1]
    previous = np.zeros(len(node), np.int64)
    previous[1:] = np.where(same_node[1:], sees[:-1], 0)
    cut = np.flatnonzero(sees > previous)

    own_sees = np.where(rank_own > rank_lo, sees[np.maximum(rank_own - 1, 0)] if len(sees) else 0, 0)
    rest = np.flatnonzero((tokens > own_sees) & (rank_hi > rank_own))

    span_node = np.concatenate([node[cut], rest])
    start = np.concatenate([previous[cut], own_sees[rest]])
    stop = np.concatenate([sees[cut], tokens[rest]])
    lo = np.concatenate([cut, rank_own[rest]])
    hi = np.concatenate([rank_hi[node[cut]], rank_hi[rest]])
    order = np.lexsort((start, preorder[span_node]))
    return Spans.of(span_node[order], start[order], stop[order], lo[order], hi[order])
