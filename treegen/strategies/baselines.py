"""What tree attention is compared with: plain decoding row by row, and the tree attention of other systems."""

from __future__ import annotations

from treegen.ir.arrays import positive_int
from treegen.ir.errors import StrategyError
from treegen.strategies.groupings import by_node, by_row, by_row_whole_tree, whole_tree
from treegen.strategies.passes import Pass, SplitContext, StageLevels, StoreMask, TrimRows
from treegen.strategies.strategy import Pipeline, Strategy, Traffic


def query(split: int | None = None) -> Strategy:
    """One row, its whole path: what FlashDecoding and radix attention read. `split`: tokens per work item."""
    passes: tuple[Pass, ...] = ()
    if split is not None:
        passes = (SplitContext(positive_int("split", split, StrategyError)),)
    options = () if split is None else (("split", split),)
    traffic = Traffic("paths", "none" if split is None else "lengths")
    return Pipeline("query", by_row, passes, options, proven=True, pipeline_traffic=traffic, isolated=True)


def medusa() -> Strategy:
    """All rows with all KV under a dense mask, unfused: scores and their softmax pass through memory (Medusa's tree
    attention in PyTorch; DeFT, table 4).
    """
    traffic = Traffic("tree", "none", "element per row", scores=True)
    passes = (TrimRows(), StoreMask("dense"))
    return Pipeline("medusa", whole_tree, passes, proven=True, pipeline_traffic=traffic)


def specinfer() -> Strategy:
    """Each row with the whole tree under a bit mask (SpecInfer's tree attention; DeFT, table 4)."""
    traffic = Traffic("tree per row", "none", "bit per row")
    passes = (StoreMask("row-bits"),)
    return Pipeline("specinfer", by_row_whole_tree, passes, proven=True, pipeline_traffic=traffic)


def cascade() -> Strategy:
    """Tree level by tree level, each node with all rows that see it; after every level but the first, results so far
    are merged (FlashInfer's multi-level cascade).
    """
    traffic = Traffic("tree", "nodes")
    return Pipeline("cascade", by_node, (StageLevels(),), proven=True, pipeline_traffic=traffic)
