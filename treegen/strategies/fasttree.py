"""FastTree (Pan et al., MLSys 2025): greedy edge assignment over the tree, long-context split, two tile phases.

An edge from a node to its child is 1 when the node's context is concatenated to the child's, which then reads both (the
virtual tree), and 0 when the child's rows join the node's group. Costs weigh padding against partial results.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Longs, frozen
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies.groupings import path_segments
from treegen.strategies.passes import SplitContext
from treegen.strategies.strategy import OnPass, Strategy, Traffic
from treegen.target.problem import Problem

Pair = tuple[int, int]
_NODE_SIZE = 32  # segments that are made in the time of an edge's assignment, which goes node by node


@dataclass(frozen=True)
class Costs:
    """The costs of Algorithm 1, without the common factor head_dim (section 4).

    tile_rows: rows of a large and of a small tile; a term takes the small one when its own rows fit. group: query heads
    per KV head, by which the published code multiplies padding but not partial results (variant "artifact").
    """

    alpha: float
    beta: float
    gamma: float
    tile_rows: Pair
    tile_tokens: Pair
    group: int = 1

    def compute(self, rows: int, tokens: int) -> float:
        """Padding of `rows` rows reading `tokens` tokens: of query tiles along the context, of KV tiles along the
        rows.
        """
        phase = 0 if rows > self.tile_rows[1] else 1
        query, kv = self.tile_rows[phase], self.tile_tokens[phase]
        return self.group * (
            self.alpha * padding(query, rows) * tokens + self.beta * rows * padding(kv, min(tokens, kv))
        )

    def reduce(self, rows: int) -> float:
        """Partial results of `rows` rows, written and read."""
        return self.gamma * rows

    def keep(self, rows: int, tokens: int, child_rows: int, child_tokens: int) -> float:
        """SplitKVCost: the child's rows stay in the node's group."""
        return self.compute(rows, tokens) + self.compute(child_rows, child_tokens) + self.reduce(child_rows)

    def concatenate(self, rows: int, tokens: int, child_rows: int, child_tokens: int) -> float:
        """SplitQCost: the child's group reads the node's tokens as well, without the node's group."""
        return self.compute(rows - child_rows, tokens) + self.compute(child_rows, tokens + child_tokens)


def padding(tile: int, size: int) -> int:
    """What `size` lacks to a multiple of `tile`; 0 for 0."""
    return -size % tile


def assign_edges(tree: Tree, costs: Costs) -> npt.NDArray[np.bool_]:
    """For every node whether the edge from its parent is 1; Algorithm 1, breadth-first, children by index, ties
    keep 0.
    """
    topology = tree.topology
    rows = (topology.rank_hi - topology.rank_lo).tolist()
    tokens = _visible_tokens(tree).tolist()
    concatenated = np.zeros(len(rows), bool)
    children: list[list[int]] = [[] for _ in rows]
    for node, parent in enumerate(tree.parent.tolist()):
        if parent >= 0:
            children[parent].append(node)
    for node in np.argsort(topology.depth, kind="stable").tolist():
        left = rows[node]
        for child in children[node]:
            if rows[child] == 0:
                continue
            sizes = (left, tokens[node], rows[child], tokens[child])
            if costs.keep(*sizes) > costs.concatenate(*sizes):
                concatenated[child] = True
                left -= rows[child]
                tokens[child] += tokens[node]
    return concatenated


def _visible_tokens(tree: Tree) -> Longs:
    """Tokens of every node that some row sees."""
    visible = np.zeros(len(tree.tokens), np.int64)
    np.maximum.at(visible, tree.topology.spans.node, tree.topology.spans.stop)
    return visible


def virtual_tree(tree: Tree, concatenated: npt.NDArray[np.bool_]) -> Plan:
    """One group per node: its own rows and those below its children of edge 0, reading its context.

    The context is the node's tokens behind those of its ancestors, upwards as long as edges are 1.
    """
    topology, spans = tree.topology, tree.topology.spans
    nodes = np.arange(len(tree.parent))
    joining = np.flatnonzero((tree.parent >= 0) & ~concatenated)
    owner = np.concatenate([nodes, tree.parent[joining]])
    lo = np.concatenate([topology.rank_lo, topology.rank_lo[joining]])
    hi = np.concatenate([topology.rank_own, topology.rank_hi[joining]])
    filled = np.flatnonzero(hi > lo)
    order = filled[np.lexsort((lo[filled], owner[filled]))]
    owner, lo, hi = owner[order], lo[order], hi[order]
    first = np.flatnonzero(np.append(True, (owner[1:] != owner[:-1]) | (lo[1:] != hi[:-1]))[: len(owner)])
    last = np.append(first[1:], len(owner)) - 1 if len(first) else first
    owner, lo, hi = owner[first], lo[first], hi[last]
    rows = np.bincount(owner, hi - lo, len(nodes)).astype(np.int64)

    # A node's own rows come first in its group, and its spans begin to be seen among them.
    seen_from = spans.lo - topology.rank_lo[spans.node]
    own = np.flatnonzero(seen_from < rows[spans.node])
    columns: list[tuple[npt.NDArray[Any], ...]] = [
        (spans.node[own], np.zeros(len(own)), spans.node[own], spans.start[own], spans.stop[own], seen_from[own])
    ]
    reader = np.flatnonzero(concatenated & (tree.parent >= 0) & (rows > 0))
    above, distance = tree.parent[reader], 0
    while len(reader):
        distance += 1
        with_tokens = tree.tokens[above] > 0
        zeros = np.zeros(int(with_tokens.sum()))
        node = above[with_tokens]
        columns.append((reader[with_tokens], zeros + distance, node, zeros, tree.tokens[node], zeros))
        further = concatenated[above] & (tree.parent[above] >= 0)
        reader, above = reader[further], tree.parent[above[further]]
    group, far, node, start, stop, seen_lo = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.lexsort((start, -far, group))
    group, node, start, stop, seen_lo = (column[order] for column in (group, node, start, stop, seen_lo))
    reads_any = np.zeros(len(nodes), bool)
    reads_any[group.astype(np.int64)] = True  # a group that reads nothing vanishes: its rows see nothing here
    alive, kept = np.flatnonzero(reads_any), reads_any[owner]
    return Plan(
        "fasttree",
        frozen(np.searchsorted(owner[kept], np.append(alive, len(nodes)))),
        frozen(lo[kept]),
        frozen(hi[kept]),
        frozen(np.searchsorted(group, np.append(alive, len(nodes)))),
        frozen(node),
        frozen(start),
        frozen(stop),
        frozen(seen_lo),
        frozen(rows[group.astype(np.int64)]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What FastTree settles on for a tree: edges, context split lengths and tiles, each for the large and the small
    phase.
    """

    concatenated: npt.NDArray[np.bool_]
    split: Pair
    tile_q: Pair
    tile_kv: Pair


@dataclass(frozen=True)
class FastTree(Strategy):
    """Greedy edge assignment, then context splits and tiles by the number of thread blocks (section 4; published code).

    tile_q: query head rows of a large and a small tile; tile_kv: their KV tokens. split: the usual and the short
    length of a context. min_blocks: thread blocks that the large and the small phase need for the usual split, and to
    exist at all. variant: "paper" weighs all costs per row; "artifact" multiplies padding by the heads per KV head,
    as published code does.
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
        """See Strategy: those that differ from the default."""
        listed = (field for field in fields(self) if field.name not in ("name", "proven"))
        return {f.name: getattr(self, f.name) for f in listed if getattr(self, f.name) != f.default}

    @property
    def traffic(self) -> Traffic:
        """See Strategy."""
        return Traffic("plan", "lengths")

    def plan_size(self, tree: Tree, shape: Shape) -> int:
        """See Strategy."""
        return path_segments(tree) + _NODE_SIZE * len(tree.parent)

    def costs(self, tile_q: Pair, tile_kv: Pair, group: int) -> Costs:
        """The costs for tiles of these head rows."""
        rows = max(1, tile_q[0] // group), max(1, tile_q[1] // group)
        factor = group if self.variant == "artifact" else 1
        return Costs(self.alpha, self.beta, self.gamma, rows, tile_kv, factor)

    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        """See Strategy. The tiles that the last round settles on are the plan's tiles."""
        tree, shape = problem.tree, problem.shape
        decision = self.decide(tree, shape)
        plan = virtual_tree(tree, decision.concatenated)
        if on_pass:
            on_pass("assign-edges", plan)
        plan = self.split_and_tile(plan, tree, decision, shape)
        if on_pass:
            on_pass("split-context", plan)
        return plan

    def decide(self, tree: Tree, shape: Shape) -> Decision:
        """Edges, split lengths and tiles, in two rounds of the greedy assignment at most."""
        tile_q, tile_kv = self.tile_q, self.tile_kv
        costs = self.costs(tile_q, tile_kv, shape.group)
        concatenated = assign_edges(tree, costs)
        sizes = _group_sizes(tree, concatenated)
        split = (self.split[0], self.split[0])
        blocks = _blocks(*sizes, costs, split, shape)
        wanted = self.min_blocks[0]
        split = self.split[0 < blocks[0] < wanted[0]], self.split[0 < blocks[1] < wanted[1]]
        if split != (self.split[0], self.split[0]):
            # Shorter contexts: if a phase still has too few blocks to fill the device, one tile size serves both.
            blocks = _blocks(*sizes, costs, split, shape)
            few = [0 < n < least for n, least in zip(blocks, self.min_blocks[1], strict=True)]
            if any(few):
                phase = 1 if few[0] else 0
                tile_q, tile_kv = (tile_q[phase], tile_q[phase]), (tile_kv[phase], tile_kv[phase])
                concatenated = assign_edges(tree, self.costs(tile_q, tile_kv, shape.group))
        return Decision(concatenated, split, tile_q, tile_kv)

    def split_and_tile(self, plan: Plan, tree: Tree, decision: Decision, shape: Shape) -> Plan:
        """A virtual tree's plan with contexts split and tiles named."""
        small_rows = self.costs(decision.tile_q, decision.tile_kv, shape.group).tile_rows[1]
        plan = SplitContext(decision.split[0], small_rows, decision.split[1]).apply(plan, tree)
        tiles = dict(zip(decision.tile_q, decision.tile_kv, strict=True))
        return replace(plan, strategy=str(self), tiles=tuple(sorted(tiles.items(), reverse=True)))


def fasttree(**options: Any) -> Strategy:
    """Greedy edge assignment, long-context split and two tile phases (FastTree); options are the fields of FastTree."""
    try:
        return FastTree(**options)
    except TypeError as cause:
        known = ", ".join(field.name for field in fields(FastTree) if field.name not in ("name", "proven"))
        raise StrategyError("fasttree", options, str(cause).partition(") ")[2], f"use {known}") from cause


def _group_sizes(tree: Tree, concatenated: npt.NDArray[np.bool_]) -> tuple[Longs, Longs]:
    """Rows and context tokens of every node's group in the virtual tree."""
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


def _blocks(rows: Longs, context: Longs, costs: Costs, split: Pair, shape: Shape) -> Pair:
    """Thread blocks of the large and of the small phase."""
    phase = (rows <= costs.tile_rows[1]).astype(np.int64)
    per_group = -(-rows // np.array(costs.tile_rows)[phase]) * -(-context // np.array(split)[phase])
    counts = np.bincount(phase, per_group, 2) * shape.num_kv_heads
    return int(counts[0]), int(counts[1])
