"""View: a tree as its kernel sees it: without what no row's window reaches, with positions where scores need them."""

from __future__ import annotations

from dataclasses import dataclass

from treegen.ir.plan import Plan
from treegen.ir.positions import Positions, clipped, windowed
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.ir.verify import verify, verify_isolated
from treegen.scoring.options import Scoring
from treegen.strategies import Strategy
from treegen.target.targets import Target


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What plans are made of. tree: the tokens that some row may see; positions: None where nothing depends on them."""

    tree: Tree
    positions: Positions | None = None
    window_left: int = -1

    @classmethod
    def of(cls, tree: Tree, scoring: Scoring | None) -> View:
        """A tree under a scoring."""
        if scoring is None or not scoring.positions:
            return cls(tree)
        window_left = scoring.options.window_left
        if window_left < 0 or not scoring.prunes or not tree.num_rows:
            return cls(tree, Positions.of(tree))
        return cls(*windowed(tree, window_left), window_left)

    def planned(self, strategy: Strategy, shape: Shape, target: Target) -> Plan:
        """A strategy's plan, verified unless treegen's own tests hold the strategy to the law, and then without what is
        outside of the rows' windows.
        """
        plan = strategy.plan(self.tree, shape, target)
        if not strategy.proven:
            verify(plan, self.tree)
        if strategy.isolated:
            verify_isolated(plan)
        if self.window_left < 0 or self.positions is None:
            return plan
        return clipped(plan, self.tree, self.positions, self.window_left)
