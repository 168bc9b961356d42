"""View: a tree without the tokens that no row's window reaches, and with positions where scores need them."""

from __future__ import annotations

from dataclasses import dataclass

from treegen.ir.plan import Plan
from treegen.ir.positions import Positions, clipped, windowed
from treegen.ir.tree import Tree
from treegen.ir.verify import verify, verify_isolated
from treegen.scoring.options import Scoring
from treegen.strategies import Strategy
from treegen.target.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class WindowedTree:
    """The problem that plans are made for.

    problem: the problem, whose tree has only tokens that some row may see. positions: the positions of rows and tokens,
    None where scores do not depend on them. window_left: tokens before its own that a row sees, -1 for all.
    """

    problem: Problem
    positions: Positions | None = None
    window_left: int = -1

    @classmethod
    def of(cls, problem: Problem, scoring: Scoring | None) -> WindowedTree:
        """Views a problem under score options."""
        if scoring is None or not scoring.positions:
            return cls(problem)
        tree, window_left = problem.tree, scoring.options.window_left
        if window_left < 0 or not scoring.prunes or not tree.num_rows:
            return cls(problem, Positions.of(tree))
        seen, positions = windowed(tree, window_left)
        return cls(problem.with_tree(seen), positions, window_left)

    @property
    def tree(self) -> Tree:
        """The tree with only tokens that some row may see."""
        return self.problem.tree

    def planned(self, strategy: Strategy) -> Plan:
        """Plans with a strategy, and drops tokens outside of the rows' windows.

        Plans are verified first, unless treegen's own tests verify the strategy.
        """
        plan = strategy.plan(self.problem)
        if not strategy.proven:
            verify(plan, self.tree)
        if strategy.isolated:
            verify_isolated(plan)
        if self.window_left < 0 or self.positions is None:
            return plan
        return clipped(plan, self.tree, self.positions, self.window_left)
