"""View: a tree as its kernel sees it: without what no row's window reaches, with positions where scores need them."""

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
class View:
    """What plans are made of. problem: its tree has the tokens that some row may see; positions: None where nothing
    depends on them.
    """

    problem: Problem
    positions: Positions | None = None
    window_left: int = -1

    @classmethod
    def of(cls, problem: Problem, scoring: Scoring | None) -> View:
        """A problem under a scoring."""
        if scoring is None or not scoring.positions:
            return cls(problem)
        tree, window_left = problem.tree, scoring.options.window_left
        if window_left < 0 or not scoring.prunes or not tree.num_rows:
            return cls(problem, Positions.of(tree))
        seen, positions = windowed(tree, window_left)
        return cls(problem.with_tree(seen), positions, window_left)

    @property
    def tree(self) -> Tree:
        """The tokens that some row may see."""
        return self.problem.tree

    def planned(self, strategy: Strategy) -> Plan:
        """A strategy's plan, verified unless treegen's own tests hold the strategy to the law, and then without what is
        outside of the rows' windows.
        """
        plan = strategy.plan(self.problem)
        if not strategy.proven:
            verify(plan, self.tree)
        if strategy.isolated:
            verify_isolated(plan)
        if self.window_left < 0 or self.positions is None:
            return plan
        return clipped(plan, self.tree, self.positions, self.window_left)
