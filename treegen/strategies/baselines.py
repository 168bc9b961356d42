"""Baselines for tree attention: plain decoding row by row, and the tree attention of other systems."""

from __future__ import annotations

from treegen.ir.arrays import positive_int
from treegen.ir.errors import StrategyError
from treegen.strategies.groupings import by_node, by_row, by_row_whole_tree, whole_tree
from treegen.strategies.passes import LevelRounds, Pass, SplitContext, StoreMask, TrimRows
from treegen.strategies.strategy import Pipeline, Strategy, Traffic


def query(split: int | None = None) -> Strategy:
    """Reads the whole path of each row by itself, as FlashDecoding and radix attention do.

    Args:
        split: Tokens per work item; by default a path is one item.

    Raises:
        StrategyError: `split` is not a positive integer.
    """
    passes: tuple[Pass, ...] = ()
    if split is not None:
        split = positive_int("split", split, StrategyError)
        passes = (SplitContext(split),)
    options = () if split is None else (("split", split),)
    traffic = Traffic("paths", "none" if split is None else "lengths")
    return Pipeline("query", by_row, passes, options, proven=True, pipeline_traffic=traffic, isolated=True)


def medusa() -> Strategy:
    """Reads all KV with all rows under a dense mask, unfused (Medusa's tree attention in PyTorch; DeFT, table 4).

    Scores and their softmax pass through memory.
    """
    traffic = Traffic("tree", "none", "element per row", scores=True)
    passes = (TrimRows(), StoreMask("dense"))
    return Pipeline("medusa", whole_tree, passes, proven=True, pipeline_traffic=traffic)


def specinfer() -> Strategy:
    """Reads the whole tree with each row under a bit mask (SpecInfer's tree attention; DeFT, table 4)."""
    traffic = Traffic("tree per row", "none", "bit per row")
    passes = (StoreMask("row-bits"),)
    return Pipeline("specinfer", by_row_whole_tree, passes, proven=True, pipeline_traffic=traffic)


def cascade() -> Strategy:
    """Reads one tree level after another, each node with all rows that see it (FlashInfer's multi-level cascade).

    Results are merged after every level but the first.
    """
    traffic = Traffic("tree", "nodes")
    return Pipeline("cascade", by_node, (LevelRounds(),), proven=True, pipeline_traffic=traffic)
