"""The registry: strategies by name, as `compile`, `explain` and the command line take them.

A shipped strategy has one entry, in `_SHIPPED`. Facts that depend on a strategy's options are properties of Strategy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeAlias

from treegen.ir.errors import StrategyError
from treegen.strategies.baselines import cascade, medusa, query, specinfer
from treegen.strategies.cohort import cohort
from treegen.strategies.deft import deft_flatten, deft_node, deft_node_chunk
from treegen.strategies.fasttree import fasttree
from treegen.strategies.flashforge import flashforge
from treegen.strategies.strategy import Strategy

Factory: TypeAlias = Callable[[], Strategy]
ENTRY_POINTS = "treegen.strategies"
"""The entry-point group in which installed packages offer strategies: a name, and a function that makes one."""


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """Facts about a strategy that are known by its name, before one is made.

    Attributes:
        name: The name.
        factory: Makes the strategy, by default with default options. Its docstring begins with the summary.
        policy_options: The options that a measured policy may set; None if no policy names the strategy.
    """

    name: str
    factory: Callable[..., Strategy]
    policy_options: frozenset[str] | None = None

    @property
    def summary(self) -> str:
        """The first paragraph of the factory's docstring, on one line."""
        return " ".join((inspect.getdoc(self.factory) or "").split("\n\n")[0].split())

    def make(self) -> Strategy:
        """Makes the strategy with default options. Raises StrategyError if the factory fails or makes anything else."""
        try:
            made = self.factory()
        except Exception as cause:  # whatever a caller's own function raises
            reason = f"its factory raises {type(cause).__name__}: {cause}"
            raise StrategyError("strategy", self.name, reason, "correct the factory") from cause
        if not isinstance(made, Strategy):
            reason = f"its factory makes a {type(made).__name__}"
            raise StrategyError("strategy", self.name, reason, "let it return a Strategy")
        return made


_SHIPPED = (
    StrategySpec("query", query, frozenset({"split"})),
    StrategySpec("medusa", medusa, frozenset()),
    StrategySpec("specinfer", specinfer, frozenset()),
    StrategySpec("cascade", cascade, frozenset()),
    StrategySpec("deft-node", deft_node, frozenset()),
    StrategySpec("deft-node-chunk", deft_node_chunk, frozenset()),
    StrategySpec("deft-flatten", deft_flatten, frozenset()),
    StrategySpec("fasttree", fasttree, frozenset()),
    StrategySpec("flashforge", flashforge, frozenset()),
    StrategySpec(
        "cohort", cohort, frozenset({"head_rows", "split", "shares", "tile", "split_shared_rows", "apart", "merge"})
    ),
)
SPECS: dict[str, StrategySpec] = {spec.name: spec for spec in _SHIPPED}
"""Registered strategies, in the order in which they are listed."""


def auto() -> Strategy:
    """Returns the strategy `auto`, which chooses among the others by measured policies and estimates."""
    return strategy_from("auto")


def register_strategy(name: str, factory: Factory) -> None:
    """Adds a strategy under a new name. treegen verifies each plan of it on use.

    Args:
        name: The name for `compile`, `explain` and the command line.
        factory: A function that makes the strategy with default options.

    Raises:
        StrategyError: The name is taken or no text, or the factory is no function.
    """
    if not isinstance(name, str):
        raise StrategyError("name", name, "is not a text", "give the name that --strategy takes")
    if not callable(factory):
        raise StrategyError("factory", factory, "is not a function", "give one that returns a Strategy")
    if name in SPECS:
        raise StrategyError("name", name, "is taken", f"choose a name other than {', '.join(SPECS)}")
    SPECS[name] = StrategySpec(name, factory)


def strategy_names() -> tuple[str, ...]:
    """Returns the registered names in order of registration, without `auto`; names of installed packages come last."""
    installed = (name for name in installed_strategies() if name not in SPECS)
    return tuple(name for name in (*SPECS, *installed) if name != "auto")


def strategy_from(strategy: str | Strategy) -> Strategy:
    """Returns the strategy of a name, with default options.

    Args:
        strategy: A registered name, or a Strategy, which is returned as it is.

    Raises:
        StrategyError: The name is not registered, or its factory does not make a Strategy.
    """
    return strategy if isinstance(strategy, Strategy) else spec_of(strategy).make()


def spec_of(name: str) -> StrategySpec:
    """Returns the facts about the strategy of this name. Raises StrategyError if it is not registered."""
    spec = (SPECS.get(name) or installed_strategies().get(name)) if isinstance(name, str) else None
    if spec is None:
        raise StrategyError(
            "strategy", name, "is not registered", f"use one of {', '.join((*strategy_names(), 'auto'))}"
        )
    return spec


def policy_specs() -> dict[str, StrategySpec]:
    """Returns the strategies that measured policies may name, in order of registration."""
    return {name: spec for name, spec in SPECS.items() if spec.policy_options is not None}


@cache
def installed_strategies() -> dict[str, StrategySpec]:
    """Returns the strategies of installed packages, which are imported when their factories are called."""

    def factory(point: EntryPoint) -> Factory:
        return lambda: point.load()()

    return {point.name: StrategySpec(point.name, factory(point)) for point in entry_points(group=ENTRY_POINTS)}
