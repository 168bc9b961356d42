"""Path cohorts: neighbouring rows fill a tile and read their whole paths together, in one launch without partials.

They are also treegen's policies: a few numbers say how to plan any tree. `auto` searches among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, get_args

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, int32_array, set_positive_ints
from treegen.ir.errors import StrategyError
from treegen.ir.plan import MergePlace, Plan
from treegen.ir.scalars import is_one_of
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies.context_cuts import cut_context, cut_evenly, cut_every, cut_in_tiles
from treegen.strategies.forest import Forest, ForestPlan
from treegen.strategies.groupings import by_cohort, cohorts_of_spans, fragments_of
from treegen.strategies.strategy import OnPass, Strategy, Traffic
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.tile_config import rows_per_tile

T = TypeVar("T")
_NO_NODES = frozen(np.empty(0))


@dataclass(frozen=True)
class Cohort(Strategy):
    """Groups rows that are neighbours in depth-first order; a group reads everything that any of its rows sees.

    KV that several groups share is read by each of them, after the first one from L2.

    Attributes:
        head_rows: Query head rows of a group, of one KV head. A group has at least one row.
        split: Tokens per work item; by default a group is one item.
        tile: (head rows, tokens) of a tile; by default the one that suits the groups.
        split_shared_rows: Nodes that at least this number of rows see are read by groups of their own; the results are
            merged.
        cut_nodes: The same for the nodes above these ones, which belong to one tree.
        merge: "reduce" merges in a launch of its own. "final" merges where the lowest parts of the paths are read, in a
            second launch (or in the same one, treegen.schedule.passes.fuse_merge); these parts are not split. With
            neither split_shared_rows nor cut_nodes, "final" makes the parts of `split` equal in whole tiles, and the
            last part merges.
        shares: Instead of `split`: work items for this number of thread blocks, which share all tokens evenly. It need
            not be whole: 264 blocks for 32 KV heads are 8.25 for each.
    """

    head_rows: int = 64
    split: int | None = None
    tile: tuple[int, int] | None = None
    split_shared_rows: int | None = None
    cut_nodes: tuple[int, ...] = ()
    merge: MergePlace = "reduce"
    shares: float | None = None
    name: str = "cohort"
    proven: bool = True

    def __post_init__(self) -> None:
        given = [name for name in ("split", "split_shared_rows") if getattr(self, name) is not None]
        set_positive_ints(self, ["head_rows", *given], StrategyError)
        if self.shares is not None and (type(self.shares) not in (int, float) or not 0 < self.shares < math.inf):
            raise StrategyError("shares", self.shares, "is not a positive number", "give the number of thread blocks")
        if self.tile is not None:
            rows_and_tokens = self.tile if isinstance(self.tile, tuple) and len(self.tile) == 2 else (0, 0)
            for size in rows_and_tokens:
                if not isinstance(size, int) or size < 16 or size & (size - 1):
                    raise StrategyError("tile", self.tile, "is not a tile", "give (head rows, tokens), powers of two")
        if not is_one_of(self.merge, get_args(MergePlace)):
            raise StrategyError("merge", self.merge, "is unknown", f"use {' or '.join(get_args(MergePlace))}")
        if not isinstance(self.cut_nodes, tuple):
            raise StrategyError("cut_nodes", self.cut_nodes, "is not a tuple", "give the numbers of nodes")
        if self.shares is not None and (self.split is not None or self.merge != "reduce"):
            with_it = "split" if self.split is not None else "merge"
            raise StrategyError(with_it, getattr(self, with_it), "does not go with shares", "leave one of them out")
        if self.split_shared_rows is not None and self.cut_nodes:
            raise StrategyError(
                "cut_nodes",
                self.cut_nodes,
                "cannot go with split_shared_rows, which cuts by itself",
                "give one of them",
            )

    @property
    def options(self) -> dict[str, object]:
        """See Strategy."""
        chosen = {name: getattr(self, name) for name in ("split", "shares", "tile", "split_shared_rows", "cut_nodes")}
        merge = {} if self.merge == "reduce" else {"merge": self.merge}
        return {"head_rows": self.head_rows, **{name: value for name, value in chosen.items() if value}, **merge}

    @cached_property
    def text(self) -> str:
        """The strategy as text, which plans are named by."""
        return str(self)

    @property
    def traffic(self) -> Traffic | None:
        """See Strategy."""
        options = self.split, self.shares, self.split_shared_rows
        merged = any(option is not None for option in options) or bool(self.cut_nodes)
        return Traffic("plan", "lengths" if merged else "none")

    @property
    def serves_any_tree(self) -> bool:
        """See Strategy."""
        return not self.cut_nodes

    @property
    def merges_last(self) -> bool:
        """See Strategy."""
        return self.merge == "final"

    def plan_size(self, tree: Tree, shape: Shape) -> int:
        """See Strategy."""
        cut, rows = self._cut_nodes(tree), rows_per_tile(self.head_rows, shape.group)
        listed = tree.num_rows + int((tree.topology.rank_hi - tree.topology.rank_lo)[cut].sum(dtype=np.int64))
        cohorts = cohorts_of_spans(tree, rows) + (1 if len(cut) else 0)
        size = int(cohorts.sum()) + listed
        if self.shares is not None:
            parts = math.ceil(self.shares)
        elif self.split is not None:
            parts = int((cohorts * tree.topology.spans.lengths).sum()) // self.split
        else:
            return size
        return size + parts * (1 + min(rows, tree.num_rows))

    def _cut_nodes(self, tree: Tree) -> Ints:
        """Returns the nodes at which paths are cut. Raises StrategyError when `cut_nodes` does not fit the tree."""
        if self.split_shared_rows is not None or not self.cut_nodes:
            return _NO_NODES if self.split_shared_rows is None else nodes_below(tree, self.split_shared_rows)
        cut = int32_array("cut_nodes", self.cut_nodes, low=0, high=len(tree.parent) - 1, error=StrategyError)
        if (tree.parent[cut] < 0).any() or len(set(self.cut_nodes)) < len(cut):
            raise StrategyError(
                "cut_nodes", self.cut_nodes, "names a root, or a node twice", "name nodes that have a parent"
            )
        return cut

    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        """See Strategy."""
        tree, shape = problem.tree, problem.shape
        return self.plan_of_joined(tree, None, shape, on_pass)

    def plan_of_joined(self, trees: Tree, borders: Longs | None, shape: Shape, on_pass: OnPass | None = None) -> Plan:
        """Plans trees that are joined to one, each as if it were alone.

        More than one tree works only without `cut_nodes` and `shares`, and with merge="reduce". borders: offsets of the
        trees' rows; None for one tree.
        """
        rows, cut = rows_per_tile(self.head_rows, shape.group), self._cut_nodes(trees)
        plan = by_cohort(trees, rows, cut, borders)
        round = _is_lowest(plan, trees, cut) if self.merge == "final" else plan.round
        tiles = () if self.tile is None else (self.tile,)
        plan = plan.changed(strategy=self.text, tiles=tiles, round=round, merge=self.merge)
        if on_pass:
            on_pass("by_cohort", plan)
        if self.split is not None and self.merge == "final" and self.split_shared_rows is None and not self.cut_nodes:
            group, begin, end, last = cut_in_tiles(plan, self.split)
            plan = cut_context(plan, group, begin, end).changed(round=frozen(last.astype(np.int32)))
            if on_pass:
                on_pass("split-in-tiles", plan)
        elif self.split is not None:
            length: int | Longs = self.split
            if self.merge == "final":
                length = np.where(plan.round > 0, np.maximum(plan.group_tokens, 1), self.split)
            plan = cut_every(plan, length)
            if on_pass:
                on_pass("split-context", plan)
        elif self.shares is not None:
            plan = cut_evenly(plan, self.shares)
            if on_pass:
                on_pass("even-shares", plan)
        return plan

    def plans_of_forest(self, forest: Forest, shape: Shape, target: Target) -> Iterator[ForestPlan]:
        """See Strategy: one plan for all trees, where `plan_of_joined` allows it."""
        if self.cut_nodes or self.merges_last or self.shares is not None:
            yield from super().plans_of_forest(forest, shape, target)
        else:
            yield ForestPlan.of_all(forest, self.plan_of_joined(forest.joined, forest.first_row, shape))


def cohort(
    head_rows: int = 64,
    split: int | None = None,
    tile: tuple[int, int] | None = None,
    split_shared_rows: int | None = None,
    cut_nodes: tuple[int, ...] = (),
    merge: MergePlace = "reduce",
    *,
    shares: float | None = None,
    apart: int | None = None,
    cut: tuple[int, ...] = (),
) -> Strategy:
    """Reads the whole paths of neighbouring rows that fill a tile, masked: one launch, no partials (path cohorts).

    Args:
        head_rows: Query head rows of a group, of one KV head.
        split: Tokens per work item; by default a group is one item.
        tile: (head rows, tokens) of a tile; by default the one that suits the groups.
        split_shared_rows: Nodes that at least this number of rows see are read by groups of their own.
        cut_nodes: The same for the nodes above these ones.
        merge: "reduce" in a launch of its own, or "final" in the launch of the lowest parts of the paths. Without
            split_shared_rows and cut_nodes, the last part of each split path merges, and parts are whole tiles.
        shares: Instead of `split`: work items for this number of thread blocks (of one KV head and tile of rows), which
            share all tokens evenly; it need not be whole.
        apart, cut: The earlier names of split_shared_rows and cut_nodes.

    Raises:
        StrategyError: An option is out of range, or two options contradict each other.
    """
    if apart is not None:
        split_shared_rows = _renamed("split_shared_rows", split_shared_rows, "apart", apart)
    if cut:
        cut_nodes = _renamed("cut_nodes", cut_nodes, "cut", cut)
    return Cohort(head_rows, split, tile, split_shared_rows, cut_nodes, merge, shares)


def _renamed(name: str, value: T, earlier: str, given: T) -> T:
    """Returns the value that was given by an option's earlier name. Raises StrategyError when both names are given."""
    if value:
        raise StrategyError(earlier, given, f"is the earlier name of {name}, which is given too", f"give {name} alone")
    return given


def _is_lowest(plan: Plan, tree: Tree, cut: Ints) -> Ints:
    """Returns for each group 1 if no path is cut below the nodes that it reads, else 0."""
    fragment = fragments_of(tree, cut)
    lowest = np.ones(len(cut) + 1, np.int32)
    lowest[fragment[tree.parent[cut]]] = 0
    return frozen(lowest[fragment[plan.node[plan.segment_indptr[:-1]]]])


def nodes_below(tree: Tree, rows: int) -> Ints:
    """Returns the nodes that fewer than `rows` rows see, but some, and whose parent at least `rows` rows see."""
    seen, above = seen_below_and_above(tree)
    return frozen(((above >= rows) & (seen < rows) & (seen > 0)).nonzero()[0])


def seen_below_and_above(tree: Tree) -> tuple[Ints, Ints]:
    """Returns for each node the rows at or below it, and the rows at or below its parent; 0 above roots."""
    seen = tree.topology.rank_hi - tree.topology.rank_lo
    return seen, np.where(tree.parent >= 0, seen[tree.parent], 0)
