"""The strategy `auto`: what was measured as the fastest for a tree's bucket, else what the search finds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from treegen.autotune_cache.policy_cache import POLICY_CACHE
from treegen.cost.figures import time_text
from treegen.ir.plan import Plan
from treegen.search.policies import accepts, key_of, strategy_of
from treegen.search.search import SearchResult, search
from treegen.strategies.isolated import as_isolated
from treegen.strategies.strategy import Choice, OnPass, Strategy
from treegen.target.problem import Problem


@dataclass(frozen=True)
class Auto(Strategy):
    """Picks the policy of the cache, where the tree's bucket has been tuned (treegen.tuning.tune), else the policy or
    named strategy with the least estimated time (treegen.search).

    isolated: only isolated plans are taken, and a policy of the cache, which was measured without isolation, where its
    plan for the tree is isolated.
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
        return searched(problem, isolated=self.isolated)

    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        """See Strategy."""
        return self.choose(problem).strategy.plan(problem, on_pass)


def searched(problem: Problem, *, for_any_tree: bool = False, isolated: bool = False) -> Choice:
    """What the search finds, whatever has been measured. for_any_tree: without cuts at single nodes. isolated: among
    isolated plans.
    """
    found = search(problem, for_any_tree=for_any_tree, isolated=isolated)
    return Choice(found.strategy, _reason(found), found.trace)


def _reason(found: SearchResult) -> str:
    if not found.time_us:
        return "nothing to do"
    best, left_out = time_text(found.time_us), ""
    if found.left_out:
        left_out = f"; the tree is too large to weigh {', '.join(found.left_out)}"
    if found.strategy.name == "query":
        return f"sharing does not pay: plain per-row decoding takes least, {best}{left_out}"
    if found.query_us is None:
        return f"least estimated time, {best}{left_out}"
    return f"least estimated time, {best}; plain per-row decoding takes {time_text(found.query_us)}{left_out}"
