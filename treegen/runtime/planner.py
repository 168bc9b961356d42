"""The planner: makes a kernel's choices by name, by measurement, from the cache, or by estimates."""

from __future__ import annotations

from collections.abc import Callable

from treegen.ir.tree import Tree
from treegen.search.auto import by_estimate
from treegen.search.bucket import policy_bucket
from treegen.strategies import Choice, Strategy
from treegen.target.problem import Problem
from treegen.timed import phase
from treegen.tuning.tune import tuned

_KEPT = "kept from an earlier tree of the same bucket: "


class Planner:
    """Chooses strategies for one problem after another. Use it from one thread at a time.

    Args:
        strategy: The caller's strategy.
        autotune: Whether buckets of trees that the cache does not know are measured first.
    """

    def __init__(self, strategy: Strategy, *, autotune: bool = False) -> None:
        self.strategy = strategy
        self.autotune = autotune
        self._bucket: tuple[Tree, str] | None = None

    def __reduce__(self) -> tuple[Callable[..., Planner], tuple[Strategy, bool]]:
        return _planner, (self.strategy, self.autotune)

    def choose(self, problem: Problem, *, shape_is_assumed: bool = False) -> Choice:
        """Returns the choice for a problem. With an assumed shape nothing is measured."""
        if self.autotune and not shape_is_assumed and problem.tree.num_rows:
            with phase("tune"):
                tuned(problem)
        with phase("choose"):
            return self.strategy.choose(problem)

    def choose_fixed(self, problem: Problem, *, shape_is_assumed: bool = False) -> Choice:
        """Returns the choice for a problem and for all later trees in its launches."""
        choice = self.choose(problem, shape_is_assumed=shape_is_assumed)
        chosen = choice.strategy
        # A strategy that merges last may be fast because of its single launch, which kernels of fixed capacity lack.
        if chosen == self.strategy or (chosen.serves_any_tree and not chosen.merges_last):
            return choice
        return by_estimate(problem, for_any_tree=True, isolated=self.strategy.isolated)

    def keep(self, choice: Choice, before: Tree, tree: Tree) -> Choice | None:
        """Returns the choice made for the tree `before` if it also holds for `tree`; None if a new one is needed."""
        chosen = choice.strategy
        if chosen == self.strategy or not chosen.serves_any_tree:
            return None
        known = self._bucket
        bucket_before = known[1] if known is not None and known[0] is before else policy_bucket(before)
        self._bucket = tree, policy_bucket(tree)
        if self._bucket[1] != bucket_before:
            return None
        return Choice(chosen, f"{_KEPT}{choice.reason.removeprefix(_KEPT)}")


def _planner(strategy: Strategy, autotune: bool) -> Planner:
    return Planner(strategy, autotune=autotune)
