"""Policies as data: the part of a strategy that the cache keeps, and the strategy made of it."""

from __future__ import annotations

from collections.abc import Mapping

from treegen.autotune_cache.entry import Policy, PolicyValue
from treegen.autotune_cache.key import PolicyKey, key_for
from treegen.ir.errors import StrategyError
from treegen.search.bucket import policy_bucket
from treegen.strategies.registry import policy_specs, spec_of
from treegen.strategies.strategy import Strategy
from treegen.target.problem import Problem


def key_of(problem: Problem) -> PolicyKey:
    """Returns the cache key of a tree's bucket."""
    tree, shape, target = problem
    return key_for(policy_bucket(tree), shape, target)


def policy_of(strategy: Strategy) -> Policy:
    """Returns the name and options of a strategy that tuning proposes for any tree; `strategy_of` reads them."""
    options: dict[str, PolicyValue] = {"strategy": strategy.name}
    if _options_of(strategy.name):
        options.update(strategy.options)  # type: ignore[arg-type]
    return options


def strategy_of(policy: Mapping[str, object]) -> Strategy:
    """Makes the strategy of a policy. Raises StrategyError for data that are no policy for any tree."""
    options = {field: tuple(value) if isinstance(value, list) else value for field, value in policy.items()}
    name = options.pop("strategy", None)
    if not set(options) <= _options_of(name):
        raise StrategyError("policy", sorted(options), f"has options that {name} lacks", "tune again")
    return spec_of(str(name)).factory(**options)


def _options_of(name: object) -> frozenset[str]:
    """Returns the options of a strategy that a policy may set. Raises StrategyError for one that no policy names."""
    specs = policy_specs()
    if not isinstance(name, str) or name not in specs:
        raise StrategyError("policy.strategy", name, "is not a strategy of policies", f"use {', '.join(specs)}")
    return specs[name].policy_options or frozenset()


def accepts(policy: Mapping[str, object]) -> bool:
    """Tells whether a policy from outside can be used."""
    try:
        strategy_of(policy)
    except StrategyError:
        return False
    return True
