"""FastTree (Pan et al., MLSys 2025): greedy edge assignment over the tree, long-context split, two tile phases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Longs
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies.edge_assignment import EdgeCosts, Pair, assign_edges, virtual_tree
from treegen.strategies.forest import Forest, ForestPlan
from treegen.strategies.groupings import path_segments
from treegen.strategies.passes import SplitContext
from treegen.strategies.strategy import OnPass, Strategy, Traffic
from treegen.target.problem import Problem
from treegen.target.targets import Target

_NODE_SIZE = 32  # segments made in the time that assigning an edge takes; edges are assigned node by node


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """FastTree's decision for a tree: edges; context split lengths and tiles, for a large and a small phase."""

    concatenated: npt.NDArray[np.bool_]
    split: Pair
    tile_q: Pair
    tile_kv: Pair


@dataclass(frozen=True)
class FastTree(Strategy):
    """Assigns edges greedily, then splits contexts and takes tiles by the number of thread blocks.

    The source is section 4 of the paper, and the published code.

    Attributes:
        alpha: The weight of padded query rows.
        beta: The weight of padded KV tokens.
        gamma: The weight of partial results.
        tile_q: Query head rows of a large and a small tile.
        tile_kv: KV tokens of a large and a small tile.
        split: The usual and the short length of a context.
        min_blocks: The thread blocks that the large and the small phase need for the usual split, and to exist at all.
        variant: "paper" weighs all costs per row; "artifact" multiplies padding by the heads per KV head, as published
            code does.
    """

    alpha: float = 0.66
    beta: float = 0.33
    gamma: float = 0.1
    tile_q: Pair = (64, 16)
    tile_kv: Pair = (32, 32)
    split: Pair = (1024, 128)
    min_blocks: tuple[Pair, Pair] = ((132, 528), (132, 132))
    variant: Literal["paper", "artifact"] = "paper"
    name: str = "fasttree"
    proven: bool = True

    def __post_init__(self) -> None:
        for option in ("alpha", "beta", "gamma"):
            if not getattr(self, option) >= 0:
                raise StrategyError(option, getattr(self, option), "is not a weight", "give a number of at least 0")
        for option in ("tile_q", "tile_kv", "split"):
            pair = getattr(self, option)
            if len(pair) != 2 or not all(type(size) is int and size > 0 for size in pair):
                raise StrategyError(option, pair, "is not a pair of positive integers", "give (large, small)")
            if option != "split" and any(size < 16 or size & (size - 1) for size in pair):
                raise StrategyError(option, pair, "has a size that is no power of two from 16", "give powers of two")
        if self.tile_q[0] < self.tile_q[1] or self.split[0] < self.split[1]:
            raise StrategyError("tile_q, split", (self.tile_q, self.split), "has a small above a large", "swap them")
        if self.variant not in ("paper", "artifact"):
            raise StrategyError("variant", self.variant, "is unknown", "use paper or artifact")

    @property
    def options(self) -> dict[str, object]:
        """See Strategy: the options that differ from the default."""
        listed = (field for field in fields(self) if field.name not in ("name", "proven"))
        return {f.name: getattr(self, f.name) for f in listed if getattr(self, f.name) != f.default}

    @property
    def traffic(self) -> Traffic:
        """See Strategy."""
        return Traffic("plan", "lengths")

    def plan_size(self, tree: Tree, shape: Shape) -> int:
        """See Strategy."""
        return path_segments(tree) + _NODE_SIZE * len(tree.parent)

    def costs(self, tile_q: Pair, tile_kv: Pair, group: int) -> EdgeCosts:
        """Returns the costs for tiles of these head rows."""
        rows = max(1, tile_q[0] // group), max(1, tile_q[1] // group)
        factor = group if self.variant == "artifact" else 1
        return EdgeCosts(self.alpha, self.beta, self.gamma, rows, tile_kv, factor)

    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        """See Strategy. The plan's tiles are those of the last round of the assignment."""
        tree, shape = problem.tree, problem.shape
        decision = self.decide(tree, shape)
        plan = virtual_tree(tree, decision.concatenated)
        if on_pass:
            on_pass("assign-edges", plan)
        plan = self.split_and_tile(plan, tree, decision, shape)
        if on_pass:
            on_pass("split-context", plan)
        return plan

    def plans_of_forest(self, forest: Forest, shape: Shape, target: Target) -> Iterator[ForestPlan]:
        """See Strategy: one plan for all trees with the same split lengths and tiles."""
        decisions = [self.decide(tree, shape) for tree in forest.trees]
        for chosen, part in forest.parts((made.split, made.tile_q, made.tile_kv) for made in decisions):
            plan = virtual_tree(part.joined, np.concatenate([decisions[index].concatenated for index in chosen]))
            plan = self.split_and_tile(plan, part.joined, decisions[chosen[0]], shape)
            yield ForestPlan(chosen, part, plan)

    def decide(self, tree: Tree, shape: Shape) -> Decision:
        """Returns edges, split lengths and tiles, after two rounds of the greedy assignment at most."""
        tile_q, tile_kv = self.tile_q, self.tile_kv
        costs = self.costs(tile_q, tile_kv, shape.group)
        concatenated = assign_edges(tree, costs)
        sizes = _group_sizes(tree, concatenated)
        split = (self.split[0], self.split[0])
        blocks = _blocks(*sizes, costs, split, shape)
        wanted = self.min_blocks[0]
        split = self.split[0 < blocks[0] < wanted[0]], self.split[0 < blocks[1] < wanted[1]]
        if split != (self.split[0], self.split[0]):
            # Contexts are shorter now. If a phase still has too few thread blocks to fill the device, one tile size
            # serves both.
            blocks = _blocks(*sizes, costs, split, shape)
            few = [0 < n < least for n, least in zip(blocks, self.min_blocks[1], strict=True)]
            if any(few):
                phase = 1 if few[0] else 0
                tile_q, tile_kv = (tile_q[phase], tile_q[phase]), (tile_kv[phase], tile_kv[phase])
                concatenated = assign_edges(tree, self.costs(tile_q, tile_kv, shape.group))
        return Decision(concatenated, split, tile_q, tile_kv)

    def split_and_tile(self, plan: Plan, tree: Tree, decision: Decision, shape: Shape) -> Plan:
        """Splits the contexts of a virtual tree's plan, and names its tiles."""
        small_rows = self.costs(decision.tile_q, decision.tile_kv, shape.group).tile_rows[1]
        plan = SplitContext(decision.split[0], small_rows, decision.split[1]).apply(plan, tree)
        tiles = dict(zip(decision.tile_q, decision.tile_kv, strict=True))
        return replace(plan, strategy=str(self), tiles=tuple(sorted(tiles.items(), reverse=True)))


def fasttree(**options: Any) -> Strategy:
    """Assigns edges greedily, splits long contexts and has two tile phases (FastTree).

    Args:
        options: Fields of treegen.strategies.fasttree.FastTree: alpha, beta, gamma, tile_q, tile_kv, split, min_blocks,
            variant.

    Raises:
        StrategyError: An option is unknown or out of range.
    """
    try:
        return FastTree(**options)
    except TypeError as cause:
        known = ", ".join(field.name for field in fields(FastTree) if field.name not in ("name", "proven"))
        raise StrategyError("fasttree", options, str(cause).partition(") ")[2], f"use {known}") from cause


def _group_sizes(tree: Tree, concatenated: npt.NDArray[np.bool_]) -> tuple[Longs, Longs]:
    """Returns rows and context tokens of each node's group in the virtual tree."""
    topology, spans, parent = tree.topology, tree.topology.spans, tree.parent
    below = (topology.rank_hi - topology.rank_lo).astype(np.int64)
    joining = np.flatnonzero((parent >= 0) & ~concatenated)
    rows = (topology.rank_own - topology.rank_lo).astype(np.int64)
    np.add.at(rows, parent[joining], below[joining])
    own = spans.lo - topology.rank_lo[spans.node] < rows[spans.node]
    context = np.bincount(spans.node[own], spans.lengths[own], len(rows)).astype(np.int64)
    above = np.zeros(len(rows), np.int64)
    extended = np.flatnonzero(concatenated & (parent >= 0))
    for node in extended[np.argsort(topology.depth[extended], kind="stable")].tolist():
        above[node] = above[parent[node]] + tree.tokens[parent[node]]
    return rows, context + above


def _blocks(rows: Longs, context: Longs, costs: EdgeCosts, split: Pair, shape: Shape) -> Pair:
    """Returns the thread blocks of the large and of the small phase."""
    phase = (rows <= costs.tile_rows[1]).astype(np.int64)
    per_group = -(-rows // np.array(costs.tile_rows)[phase]) * -(-context // np.array(split)[phase])
    counts = np.bincount(phase, per_group, 2) * shape.num_kv_heads
    return int(counts[0]), int(counts[1])
