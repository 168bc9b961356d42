"""Shards: the tokens of a tree that one of several ranks holds, and the tree that the rank sees of them.

Positions along each path are dealt to the ranks in turn, in blocks, so all ranks hold equal parts of long nodes:

    position   0 1 2 3 4 5 6 7 8 9       two ranks, blocks of two
    rank 0     0 1     2 3     4 5       its own numbers of the tokens that it holds
    rank 1         0 1     2 3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from treegen.ir.arrays import INT32_MAX, Ints, frozen, ragged_ranges, set_positive_ints
from treegen.ir.errors import TreeError
from treegen.ir.tree.kv import KVRuns
from treegen.ir.tree.page_tables import TreeParts
from treegen.ir.tree.topology import Topology, derive

if TYPE_CHECKING:
    from treegen.ir.tree import Tree

Number = TypeVar("Number", bound=Any)
"""An int, an array or a tensor of ints, or a symbol for one."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's share of the positions of every path, as in context parallelism.

    The methods take and return whole numbers of any kind: ints, NumPy arrays, tensors, and the arguments of a
    `score_mod` or `mask_mod`.

    Args:
        rank: The rank, from 0.
        size: The number of ranks.
        interleave: Neighbouring positions that are dealt to one rank.

    Raises:
        TreeError: A number is out of range.
    """

    rank: int
    size: int
    interleave: int = 1

    def __post_init__(self) -> None:
        set_positive_ints(self, ("size", "interleave"), TreeError)
        if type(self.rank) is not int or not 0 <= self.rank < self.size:
            raise TreeError("rank", self.rank, f"is not one of {self.size} ranks", f"give 0..{self.size - 1}")
        if self.period > INT32_MAX:
            raise TreeError("interleave", self.interleave, f"is too large for {self.size} ranks", "give fewer tokens")

    @property
    def period(self) -> int:
        """Positions after which the ranks' turns begin again."""
        return self.size * self.interleave

    def count(self, tokens: Number) -> Number:
        """Returns how many of the first `tokens` positions the rank holds."""
        last = tokens % self.period - self.rank * self.interleave
        last = last * (last > 0)
        last = last - (last - self.interleave) * (last > self.interleave)
        count: Number = tokens // self.period * self.interleave + last
        return count

    def position(self, number: Number) -> Number:
        """Returns the position of the rank's token `number` on a path."""
        within = self.rank * self.interleave
        place: Number = number * self.size  # without a division, where blocks are single positions
        if self.interleave > 1:
            place = number + number // self.interleave * (self.period - self.interleave)
        moved: Number = place + within
        return moved

    def holds(self, position: Number) -> Number:
        """Says whether the rank holds a position."""
        held: Number = position // self.interleave % self.size == self.rank
        return held

    def window(self, window_left: int) -> int:
        """Returns the most tokens of the rank among any `window_left` neighbouring positions; -1 stays -1."""
        if window_left < 0:
            return window_left
        return (window_left // self.period + 1) * self.interleave


def sharded(tree: Tree, shard: Shard) -> tuple[TreeParts, Topology]:
    """See Tree.shard."""
    above = tree.topology.prefix
    first = shard.count(above)
    tokens = frozen(shard.count(above + tree.tokens) - first)
    before = above.take(tree.row_node)
    sees = frozen(shard.count(before + tree.row_sees) - first.take(tree.row_node))
    parts = TreeParts(tree.parent, tokens, tree.row_node, sees, KVRuns.contiguous(tokens))
    return parts, derive(tree.parent, tokens, tree.row_node, sees)


def shard_slots(tree: Tree, shard: Shard) -> Ints:
    """See Tree.shard_slots."""
    above = tree.topology.prefix
    first, end = shard.count(above), shard.count(above + tree.tokens)
    node = np.arange(len(above)).repeat(end - first)
    if not len(node):
        return frozen(node)
    token = shard.position(ragged_ranges(first, end - first)) - above.take(node)
    return frozen(tree.kv.slots_at(node, token))


def row_positions(tree: Tree) -> Ints:
    """Returns the position on its path of the last token that each row sees; -1 for a row that sees none."""
    return frozen(tree.topology.prefix.take(tree.row_node) + tree.row_sees - 1)
