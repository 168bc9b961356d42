"""The strategies that treegen ships, as functions of their options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from treegen.ir.arrays import positive_int
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Merge
from treegen.ir.scalars import is_one_of
from treegen.strategies import groupings
from treegen.strategies.batch_invariant import CHUNK, BatchInvariant
from treegen.strategies.cohort import Cohort
from treegen.strategies.fasttree import FastTree
from treegen.strategies.flashforge import FlashForge
from treegen.strategies.passes import Pass, SplitContext, StageLevels, StoreMask, TrimRows
from treegen.strategies.strategy import Pipeline, Strategy, Traffic


def query(split: int | None = None) -> Strategy:
    """One row, its whole path: what FlashDecoding and radix attention read. `split`: tokens per work item."""
    passes: tuple[Pass, ...] = ()
    if split is not None:
        passes = (SplitContext(positive_int("split", split, StrategyError)),)
    options = () if split is None else (("split", split),)
    traffic = Traffic("paths", "none" if split is None else "lengths")
    return Pipeline("query", groupings.by_row, passes, options, proven=True, pipeline_traffic=traffic, isolated=True)


def deft_node() -> Strategy:
    """Each node with all rows that see it (DeFT-Node)."""
    return Pipeline("deft-node", groupings.by_node, proven=True, pipeline_traffic=Traffic("tree", "nodes"))


def deft_node_chunk(chunk: int = 128) -> Strategy:
    """As deft-node, with nodes longer than `chunk` tokens cut into chunks (DeFT-Node-Chunk)."""
    passes = (SplitContext(positive_int("chunk", chunk, StrategyError)), TrimRows())
    options, traffic = (("chunk", chunk),), Traffic("tree", "lengths")
    return Pipeline("deft-node-chunk", groupings.by_node, passes, options, proven=True, pipeline_traffic=traffic)


def deft_flatten(block: int = 128, mask: Literal["interval", "bits"] = "interval") -> Strategy:
    """Tokens in depth-first order cut into equal blocks, each with the rows that see any of it, masked
    (DeFT-Flatten).

    mask: "interval" stores two row numbers per run of tokens, "bits" one 64-bit word per token as published code does.
    """
    passes: tuple[Pass, ...] = (SplitContext(positive_int("block", block, StrategyError)), TrimRows())
    options: tuple[tuple[str, object], ...] = (("block", block),)
    traffic = Traffic("tree", "lengths")
    if not is_one_of(mask, ("interval", "bits")):
        raise StrategyError("mask", mask, "is unknown", "use interval or bits")
    if mask == "bits":
        passes, options = (*passes, StoreMask("token-bits")), (*options, ("mask", mask))
        traffic = Traffic("tree", "lengths", "word per token")
    return Pipeline("deft-flatten", groupings.whole_tree, passes, options, proven=True, pipeline_traffic=traffic)


def medusa() -> Strategy:
    """All rows with all KV under a dense mask, unfused: scores and their softmax pass through memory (Medusa's tree
    attention in PyTorch; DeFT, table 4).
    """
    traffic = Traffic("tree", "none", "element per row", scores=True)
    passes = (TrimRows(), StoreMask("dense"))
    return Pipeline("medusa", groupings.whole_tree, passes, proven=True, pipeline_traffic=traffic)


def specinfer() -> Strategy:
    """Each row with the whole tree under a bit mask (SpecInfer's tree attention; DeFT, table 4)."""
    traffic = Traffic("tree per row", "none", "bit per row")
    passes = (StoreMask("row-bits"),)
    return Pipeline("specinfer", groupings.by_row_whole_tree, passes, proven=True, pipeline_traffic=traffic)


def cascade() -> Strategy:
    """Tree level by tree level, each node with all rows that see it; after every level but the first, results so far
    are merged (FlashInfer's multi-level cascade).
    """
    traffic = Traffic("tree", "nodes")
    return Pipeline("cascade", groupings.by_node, (StageLevels(),), proven=True, pipeline_traffic=traffic)


def fasttree(**options: Any) -> Strategy:
    """Greedy edge assignment, long-context split and two tile phases (FastTree); options are the fields of FastTree."""
    try:
        return FastTree(**options)
    except TypeError as cause:
        known = ", ".join(field.name for field in fields(FastTree) if field.name not in ("name", "proven"))
        raise StrategyError("fasttree", options, str(cause).partition(") ")[2], f"use {known}") from cause


def flashforge(blocks: int | None = None) -> Strategy:
    """Each node with all rows that see it, long ones divided by a bound on the makespan, and the pieces dealt to thread
    blocks by profiled cost, longest first (FlashForge). `blocks`: by default what the target holds.
    """
    return FlashForge(blocks)


def cohort(
    head_rows: int = 64,
    split: int | None = None,
    tile: tuple[int, int] | None = None,
    apart: int | None = None,
    cut: tuple[int, ...] = (),
    merge: Merge = "reduce",
) -> Strategy:
    """Neighbouring rows that fill a tile with their whole paths, masked: one launch, no partials (path cohorts).

    head_rows: query head rows of a group; split: tokens per work item; tile: (head rows, tokens) of a tile; apart:
    nodes that at least so many rows see are walked apart; cut: the same for what lies above these nodes; merge:
    "reduce" in a launch of its own, or "final" in that of the lowest parts of the paths (of whole paths that are split,
    by the last of parts of whole tiles).
    """
    return Cohort(head_rows, split, tile, apart, cut, merge)


def batch_invariant(chunk: int = CHUNK, block: int = 1) -> Strategy:
    """Rows whose bits follow from their own queries, keys and values alone, whatever the batch (batch invariance).

    chunk: tokens of a path that a work item reads, a multiple of 128; block: 1, or 16 where nodes and their pieces in
    the cache begin at multiples of 16 tokens of the path.
    """
    return BatchInvariant(chunk, block)
