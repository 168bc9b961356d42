"""Batch-invariant mode: a fixed grid of tiles and chunks over each row's path, whatever other rows there are.

A row's bits follow from the division of its tokens among tiles and work items, and from the merge of its partial
results. Here both are functions of the places of tokens along the row's own path, and of the row's length. He et al.,
"Defeating Nondeterminism in LLM Inference" (2025), propose splits of a fixed size for decoding. Rows may share work
items in any way: a tile that a row does not see leaves the row's sums as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from treegen.ir.arrays import set_positive_ints
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies.chunk_paths import by_chunk
from treegen.strategies.strategy import Choice, OnPass, Strategy
from treegen.strategies.tile_paths import Machine, by_tile_path
from treegen.target.problem import Problem
from treegen.target.tile_config import RUN_TOKENS, invariant_config, lanes_of, rows_per_tile

CHUNK = 512
"""Default tokens of a path that a work item reads."""
_MOST_TILE_TOKENS = 128
_MOST_CHUNKS = 32
"""The most chunks of the longest request, where a batch kernel chooses their size.

Each request keeps a partial result for each of its chunks.
"""


@dataclass(frozen=True)
class BatchInvariant(Strategy):
    """Divides each row's path into chunks of `chunk` tokens from its beginning, and these into tiles.

    Rows that share tiles of a chunk share work items, which read each distinct tile once. A tile holds the tokens of a
    path from one multiple of the tile's tokens to the next. Where paths part within a tile, each of them has its own
    tile:

        path of row 0    [ tile 0 | tile 1 | tile 2  ][ tile 3 ..>      chunk 0 and chunk 1
        path of row 1    [ tile 0 | tile 1 | tile 2' ][ tile 3'..>      tile 0 and tile 1 are read once for both rows
        paths part here                        ^

    Rows that end in the first chunk, with final results, have other work items than longer rows, with partial results.

    In trees by request, rows share work items only for whole chunks, in the pages of one request
    (treegen.strategies.chunk_paths). A step kernel divides everything else, so `block` has no meaning there.

    Attributes:
        chunk: Tokens of a chunk.
        block: Tokens of the blocks that tiles are packed from. With 1, every token is looked up, wherever it lies. 16
            takes less time, and needs trees in which nodes, and their runs in the cache, begin at multiples of 16
            tokens of the path, such as pages of 16 that are shared as a whole.
        isolated: Whether rows share the work items of a chunk only where they see the same tokens of it. Bits are the
            same.
    """

    chunk: int = CHUNK
    block: int = 1
    isolated: bool = False
    name: str = "batch-invariant"
    proven: bool = True
    batch_invariant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        set_positive_ints(self, ["chunk"], StrategyError)
        if self.chunk % _MOST_TILE_TOKENS:
            reason = f"is no multiple of {_MOST_TILE_TOKENS}"
            raise StrategyError("chunk", self.chunk, reason, "give whole tiles")
        if type(self.block) is not int or self.block not in (1, RUN_TOKENS):
            raise StrategyError("block", self.block, "is unknown", f"use 1, or {RUN_TOKENS} for paged caches")

    @property
    def options(self) -> dict[str, object]:
        """See Strategy."""
        return {"chunk": self.chunk, "block": self.block, **({"isolated": True} if self.isolated else {})}

    def plan_size(self, tree: Tree, shape: Shape) -> int:
        """See Strategy."""
        return len(tree.topology.spans) + tree.num_rows + tree.path_tokens // self.chunk

    def isolated_form(self) -> BatchInvariant:
        """See Strategy."""
        return replace(self, isolated=True)

    def choose(self, problem: Problem) -> Choice:
        """See Strategy."""
        return Choice(self, "a row's bits follow from its own query, keys and values alone, whatever the batch")

    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        """See Strategy."""
        tree, shape, target = problem
        if tree.requests is not None:
            return by_chunk(tree, tree.requests, self.chunk).changed(strategy=str(self))
        config = invariant_config(shape, target, self.block)
        lanes = lanes_of(config, shape)
        machine = Machine(rows_per_tile(config.rows, shape.group), target.sms / lanes)
        plan = by_tile_path(tree, self.chunk, config.tokens, self.block, machine, isolated=self.isolated)
        plan = plan.changed(strategy=str(self), invariant_block=self.block)
        if on_pass:
            on_pass("by_tile_path", plan)
        return plan


def batch_invariant(chunk: int = CHUNK, block: int = 1) -> Strategy:
    """Makes a row's bits follow from its own query, keys and values alone, whatever the batch (batch invariance).

    Args:
        chunk: Tokens of a path that a work item reads, a multiple of 128.
        block: 1, or 16 where nodes and their runs in the cache begin at multiples of 16 tokens of the path.

    Raises:
        StrategyError: An option is out of range.
    """
    return BatchInvariant(chunk, block)


def chunk_for(max_tokens: int) -> int:
    """Returns the tokens of a chunk for requests of up to `max_tokens`: a power of two, at least 512."""
    return max(CHUNK, 1 << (-(-max_tokens // _MOST_CHUNKS) - 1).bit_length())


def invariant_strategy(strategy: Strategy, autotune: bool) -> Strategy:
    """Returns the strategy of batch-invariant mode for a caller's strategy: itself, or for `auto` the default one.

    Raises StrategyError for any other strategy, and for `autotune`.
    """
    if autotune:
        reason = "would let measurements decide what bits follow from"
        raise StrategyError("autotune", True, reason, "leave it or batch_invariant out")
    if strategy.batch_invariant:
        return strategy
    if not strategy.automatic:
        reason = "divides rows' work by the batch that they are in"
        raise StrategyError("strategy", str(strategy), reason, "use auto, or leave batch_invariant out")
    return BatchInvariant()
