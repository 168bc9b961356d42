"""DeFT (Yao et al., ICLR 2025): nodes with all rows that see them, whole or in chunks, and blocks of the flat tree."""

from __future__ import annotations

from typing import Literal

from treegen.ir.arrays import positive_int
from treegen.ir.errors import StrategyError
from treegen.ir.scalars import is_one_of
from treegen.strategies.groupings import by_node, whole_tree
from treegen.strategies.passes import Pass, SplitContext, StoreMask, TrimRows
from treegen.strategies.strategy import Pipeline, Strategy, Traffic

BLOCK = 128
"""Default tokens of a chunk of deft_node_chunk, and of a block of deft_flatten."""


def deft_node() -> Strategy:
    """Reads each node with all rows that see it (DeFT-Node)."""
    return Pipeline("deft-node", by_node, proven=True, pipeline_traffic=Traffic("tree", "nodes"))


def deft_node_chunk(chunk: int = BLOCK) -> Strategy:
    """Reads each node with all rows that see it, longer nodes in chunks (DeFT-Node-Chunk).

    Args:
        chunk: The most tokens of a chunk.

    Raises:
        StrategyError: `chunk` is not a positive integer.
    """
    chunk = positive_int("chunk", chunk, StrategyError)
    passes = (SplitContext(chunk), TrimRows())
    options, traffic = (("chunk", chunk),), Traffic("tree", "lengths")
    return Pipeline("deft-node-chunk", by_node, passes, options, proven=True, pipeline_traffic=traffic)


def deft_flatten(block: int = BLOCK, mask: Literal["interval", "bits"] = "interval") -> Strategy:
    """Reads tokens in depth-first order in equal blocks, each with the rows that see any of it, masked (DeFT-Flatten).

    Args:
        block: Tokens of a block.
        mask: "interval" stores two row numbers per run of tokens, "bits" one 64-bit word per token as published code
            does.

    Raises:
        StrategyError: An option is out of range.
    """
    block = positive_int("block", block, StrategyError)
    passes: tuple[Pass, ...] = (SplitContext(block), TrimRows())
    options: tuple[tuple[str, object], ...] = (("block", block),)
    traffic = Traffic("tree", "lengths")
    if not is_one_of(mask, ("interval", "bits")):
        raise StrategyError("mask", mask, "is unknown", "use interval or bits")
    if mask == "bits":
        passes, options = (*passes, StoreMask("token-bits")), (*options, ("mask", mask))
        traffic = Traffic("tree", "lengths", "word per token")
    return Pipeline("deft-flatten", whole_tree, passes, options, proven=True, pipeline_traffic=traffic)
