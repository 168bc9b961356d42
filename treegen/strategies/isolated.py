"""Isolation: plans in which all rows of a group see everything that the group reads.

A kernel multiplies weights and values tile by tile, and a weight of 0 times infinity or NaN is NaN. Under a mask, such
a value would reach rows that do not see it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from treegen.ir.arrays import frozen, offsets, stacked
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies.strategy import OnPass, Strategy, Traffic
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.tile_config import SMALL_ROWS, kernel_config


@dataclass(frozen=True, slots=True)
class SeparateRows:
    """Divides each group into one group for each set of its rows that see the same segments, with these segments alone.

    Segments that no row of a group sees are left out. A row then has several groups in the last round, so results of
    divided groups are merged in a launch of their own ("reduce").
    """

    @property
    def name(self) -> str:
        """See Pass."""
        return "separate-rows"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """See Pass."""
        plan = plan.changed(mask="interval")  # the form of masks does not matter where there are none
        if plan.isolated:
            return plan
        owner, lo, hi = plan.segment_group, plan.seen_lo, plan.seen_hi
        seen = np.flatnonzero(hi > lo)
        order = seen[np.lexsort((hi[seen], lo[seen], owner[seen]))]  # stable: segments keep their order within a group
        owner, lo, hi = owner[order], lo[order], hi[order]
        opens = np.append(True, (owner[1:] != owner[:-1]) | (lo[1:] != lo[:-1]) | (hi[1:] != hi[:-1]))[: len(order)]
        first = np.flatnonzero(opens)
        group, rows = owner[first], (hi - lo)[first]
        index, rank_lo, rank_hi = plan.rank_intervals(group, lo[first], hi[first])
        reduce = plan.merge == "reduce"
        return Plan.trusted(
            plan.strategy,
            offsets(np.bincount(index, minlength=len(group))),
            rank_lo,
            rank_hi,
            np.append(first, len(order)),
            stacked(plan.node[order], plan.start[order], plan.stop[order], 0, hi - lo),
            rows,
            tiles=plan.tiles,
            mask=plan.mask,
            blocks=plan.blocks,
            round=frozen(plan.round[group] if reduce else np.zeros(len(group))),
        )


@dataclass(frozen=True)
class Isolated(Strategy):
    """Another strategy's groups, divided by SeparateRows where some of their rows do not see everything.

    Attributes:
        strategy: The other strategy.
        two_tiles: Whether groups with few rows run in small tiles and others in large ones, with a launch for each
            size, where the strategy names no tiles. Divided groups differ more in rows than others.
    """

    strategy: Strategy
    two_tiles: bool = False
    name: str = "isolated"
    isolated: bool = True
    proven: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "proven", self.strategy.proven)

    @property
    def options(self) -> dict[str, object]:
        """See Strategy."""
        return {"strategy": str(self.strategy), **({"two_tiles": True} if self.two_tiles else {})}

    @property
    def traffic(self) -> Traffic:
        """See Strategy."""
        return Traffic("plan", "lengths")

    def plan_size(self, tree: Tree, shape: Shape) -> int:
        """See Strategy."""
        return self.strategy.plan_size(tree, shape)

    @property
    def serves_any_tree(self) -> bool:
        """See Strategy."""
        return self.strategy.serves_any_tree

    @property
    def merges_last(self) -> bool:
        """See Strategy."""
        return self.strategy.merges_last

    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        """See Strategy."""
        tree, shape, target = problem
        step = SeparateRows()
        plan = step.apply(self.strategy.plan(problem, on_pass), tree).changed(strategy=str(self))
        if self.two_tiles and not plan.tiles:
            plan = plan.changed(tiles=_two_tiles(shape, target))
        if on_pass:
            on_pass(step.name, plan)
        return plan


@cache
def _two_tiles(shape: Shape, target: Target) -> tuple[tuple[int, int], ...]:
    """Returns the (head rows, tokens) of the tiles for many and for few rows, larger rows first."""
    configs = [kernel_config(shape, target, rows) for rows in (SMALL_ROWS + 1, 1)]
    tiles = {config.rows: config.tokens for config in configs}
    return tuple(tiles.items())


def as_isolated(strategy: Strategy) -> Strategy:
    """Returns the strategy with isolated plans: its own form with such plans, or one that divides its groups."""
    own = strategy.isolated_form()
    return Isolated(strategy) if own is None else own


def isolated_strategy(strategy: Strategy, autotune: bool) -> Strategy:
    """Returns the strategy that plans in isolated mode for a caller's strategy. Raises StrategyError for `autotune`."""
    if autotune:
        reason = "would measure plans that are not isolated"
        raise StrategyError("autotune", True, reason, "leave it or isolated out")
    return as_isolated(strategy)
