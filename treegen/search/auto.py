"""The strategy `auto`: the measured policy of a tree's bucket, or else the policy with the least estimated time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

from treegen.autotune_cache.policy_cache import POLICY_CACHE
from treegen.cost.account import account
from treegen.cost.figures import time_text
from treegen.ir.errors import ShapeError
from treegen.ir.plan import Plan
from treegen.progress import now
from treegen.schedule.lower import lower
from treegen.search.halves import best_halves
from treegen.search.policies import accepts, key_of, strategy_of
from treegen.search.size import fits_whole_paths, is_too_large
from treegen.search.weigh import candidates, weighed, weights_of
from treegen.search.weighed_policies import as_named
from treegen.strategies.cohort import cohort
from treegen.strategies.deft import deft_flatten, deft_node, deft_node_chunk
from treegen.strategies.fasttree import fasttree
from treegen.strategies.flashforge import flashforge
from treegen.strategies.isolated import Isolated, as_isolated
from treegen.strategies.strategy import Choice, OnPass, Strategy
from treegen.target.problem import Problem

_SMALL = 32, 1 << 14  # the most nodes and tokens of trees for which plans of _OF_SMALL are made, too
_OF_SMALL = (deft_node_chunk(), deft_flatten())
_CLEARLY_LESS = 0.99  # the cost of waiting is less certain than other costs
_PART_TOKENS = (128, 256, 512, 1024, 2048)
"""Tokens of the parts of nodes and paths that isolated plans are compared with."""


@dataclass(frozen=True)
class Auto(Strategy):
    """Picks the measured policy of the tree's bucket (treegen.tuning.tune), or else the best policy by estimates.

    Attributes:
        isolated: Takes only isolated plans. Policies of the cache were measured without isolation; one is taken only if
            its plan for the tree is isolated.
    """

    name: str = "auto"
    proven: bool = True
    isolated: bool = False
    automatic: ClassVar[bool] = True

    def isolated_form(self) -> Auto:
        """See Strategy."""
        return replace(self, isolated=True)

    def choose(self, problem: Problem) -> Choice:
        """See Strategy."""
        cached = POLICY_CACHE.lookup(key_of(problem), accepts)
        if cached.entry is not None:
            reason = f"measured as the fastest for such trees: {cached.entry.source}"
            strategy = strategy_of(cached.entry.policy)
            if not self.isolated:
                return Choice(strategy, reason)
            if strategy.plan(problem).isolated:
                return Choice(as_isolated(strategy), reason)
        return by_estimate(problem, isolated=self.isolated)

    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        """See Strategy."""
        return self.choose(problem).strategy.plan(problem, on_pass)


def by_estimate(problem: Problem, *, for_any_tree: bool = False, isolated: bool = False) -> Choice:
    """Chooses the strategy with the least estimated time, whatever has been measured.

    Args:
        problem: A tree, the attention shape of its rows, and the target.
        for_any_tree: Takes only policies of `weighed`. Otherwise the choice includes whole paths in halves that one
            launch merges, and for trees with few nodes plans of chunks of nodes and of the flat tree.
        isolated: Takes only isolated plans, of a few strategies that are all planned.

    Raises:
        ShapeError: No kernel config fits the shape.
    """
    if isolated:
        return _isolated(problem)
    weights = None if for_any_tree else weights_of(problem)
    if weights is None:
        return weighed(problem)
    place = weights.best_planned(problem)
    best: Strategy = as_named(weights.policy(place), has_rows_inside=problem.tree.topology.has_rows_inside)
    time_us = float(weights.times_us[place])
    halves = best_halves(weights, problem, time_us * _CLEARLY_LESS)
    if halves is not None:
        best, time_us = halves
    if len(problem.tree.parent) <= _SMALL[0] and problem.tree.unique_tokens <= _SMALL[1]:
        of_small, named = min((time_of(each, problem), place) for place, each in enumerate(_OF_SMALL))
        if of_small < time_us:
            best, time_us = _OF_SMALL[named], of_small
    return Choice(best, weights.reason(best, time_us))


def time_of(strategy: Strategy, problem: Problem) -> float:
    """Makes a strategy's plan and returns its estimated time in microseconds."""
    plan = strategy.plan(problem)
    return account(plan, lower(plan, problem), problem).time_us


def _isolated(problem: Problem) -> Choice:
    """Returns the strategy whose isolated plan has the least time by its account.

    If all plans are too large, it returns the one with the smallest plan.
    """
    policies = [policy for policy, _ in candidates(problem)]
    if not policies:
        return weighed(problem)
    tree, shape, _ = problem
    forms = _isolated_forms(policies, fits_whole_paths(tree))
    found: list[tuple[float, Strategy]] = []
    for strategy in forms:
        if not is_too_large(strategy, tree, shape):
            now(f"weighing {strategy.name}")
            with suppress(ShapeError):  # FastTree's tiles do not fit every shape
                found.append((time_of(strategy, problem), strategy))
    if not found:
        return Choice(min(forms, key=lambda form: form.plan_size(tree, shape)), "the smallest isolated plan")
    time_us, best = min(found, key=lambda entry: entry[0])
    return Choice(best, f"least estimated time of {len(found)} isolated plans, {time_text(time_us)}")


def _isolated_forms(policies: Sequence[Strategy], whole_paths: bool) -> list[Strategy]:
    """Returns the isolated strategies to compare.

    They are those of the best of these policies, of strategies that read nodes in parts, and, where there is room for
    whole paths, of strategies that read these, row by row or together.
    """
    paths = [cohort(split=split) for split in (None, *_PART_TOKENS)] if whole_paths else []
    plain = next((policy for policy in policies if policy.isolated and whole_paths), policies[0])
    made = (policies[0], plain, deft_node(), fasttree(), flashforge(), *map(deft_node_chunk, _PART_TOKENS), *paths)
    return list(dict.fromkeys((*map(as_isolated, made), *(Isolated(each, two_tiles=True) for each in paths))))
