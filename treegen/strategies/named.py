"""The strategies that treegen ships, as functions of their options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from treegen.ir.arrays import positive_int
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies import groupings
from treegen.strategies.cohort import Cohort
from treegen.strategies.edge_assignment import FastTree
from treegen.strategies.flashforge import FlashForge
from treegen.strategies.passes import Pass, SplitContext, StageLevels, StoreMask, TrimRows
from treegen.strategies.strategy import Choice, OnPass, Pipeline, Strategy, Traffic
from treegen.targets import Target


def query(split: int | None = None) -> Strategy:
    """One row, its whole path: what FlashDecoding and radix attention read. `split`: tokens per work item."""
    passes: tuple[Pass, ...] = ()
    if split is not None:
        passes = (SplitContext(positive_int("split", split, StrategyError)),)
    options = () if split is None else (("split", split),)
    traffic = Traffic("paths", "none" if split is None else "lengths")
    return Pipeline("query", groupings.by_row, passes, options, proven=True, pipeline_traffic=traffic)


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
    if mask == "bits":
        passes, options = (*passes, StoreMask("token-bits")), (*options, ("mask", mask))
        traffic = Traffic("tree", "lengths", "word per token")
    elif mask != "interval":
        raise StrategyError("mask", mask, "is unknown", "use interval or bits")
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


def cohort(head_rows: int = 64, split: int | None = None) -> Strategy:
    """Neighbouring rows that fill a tile with their whole paths, masked: one launch, no partials (path cohorts).

    head_rows: query head rows of a group; split: tokens per work item.
    """
    return Cohort(head_rows, split)


_FEW_ROWS = 32
_LONG_NODE = 64
_SHORT_PATH = 512


@dataclass(frozen=True)
class Auto(Strategy):
    """Picks one of the named strategies by a fixed rule on the tree and on how many blocks the target holds.

    1. Rows share less than a quarter of what they read (path tokens < 1.25 unique tokens): `query`, its context split
       when the rows alone are too few for the target.
    2. At most 32 rows and long nodes (at least 64 visible tokens on average): `flashforge`, which divides them to fill
       the device.
    3. Otherwise `cohort`, whole if its groups give nine of ten SMs a block or none reads more than 512 tokens, else
       with the longest split of 2048, 1024, 512, 256 tokens that gives two blocks per SM.
    """

    name: str = "auto"
    proven: bool = True

    def choose(self, tree: Tree, shape: Shape, target: Target) -> Choice:
        """See Strategy."""
        unique, total, rows = tree.unique_tokens, tree.path_tokens, tree.num_rows
        blocks = 2 * target.sms
        if total < 1.25 * unique or unique == 0:
            reason = f"rows share little: {total} tokens read by paths, {unique} unique"
            if rows * shape.num_kv_heads >= blocks or unique == 0:
                return Choice(query(), reason)
            length = _longest_split(total, shape, blocks, (1024, 512, 256, 128))
            return Choice(query(length), f"{reason}; too few rows for {target.sms} SMs, so contexts are split")
        mean = unique / len(tree.topology.spans)
        if rows <= _FEW_ROWS and mean >= _LONG_NODE:
            return Choice(flashforge(), f"few rows on long nodes: {rows} rows, {mean:.0f} tokens per node on average")
        made = cohort()
        tokens = made.plan(tree, shape, target).group_tokens
        count, longest = len(tokens) * shape.num_kv_heads, int(tokens.max())
        reason = f"neighbouring rows share paths: {count} thread blocks of up to {longest} tokens"
        if 10 * count >= 9 * target.sms or longest <= _SHORT_PATH:
            return Choice(made, reason)
        length = _longest_split(int(tokens.sum()), shape, blocks, (2048, 1024, 512, 256))
        return Choice(cohort(split=length), f"{reason}, too few for {target.sms} SMs, so contexts are split")

    def plan(self, tree: Tree, shape: Shape, target: Target, on_pass: OnPass | None = None) -> Plan:
        """See Strategy."""
        return self.choose(tree, shape, target).strategy.plan(tree, shape, target, on_pass)


def _longest_split(tokens: int, shape: Shape, blocks: int, lengths: tuple[int, ...]) -> int:
    """The longest split that gives at least `blocks` thread blocks over all KV heads, else the shortest."""
    return next((n for n in lengths if tokens // n * shape.num_kv_heads >= blocks), lengths[-1])


def auto() -> Strategy:
    """The default: a fixed rule among the named strategies (see Auto)."""
    return Auto()
