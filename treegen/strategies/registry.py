"""The registry: strategies by name, as `compile`, `explain` and the command line take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from treegen.ir.errors import StrategyError
from treegen.strategies import named
from treegen.strategies.strategy import Strategy

Factory: TypeAlias = Callable[[], Strategy]

_FACTORIES: dict[str, Factory] = {
    "query": named.query,
    "medusa": named.medusa,
    "specinfer": named.specinfer,
    "cascade": named.cascade,
    "deft-node": named.deft_node,
    "deft-node-chunk": named.deft_node_chunk,
    "deft-flatten": named.deft_flatten,
    "fasttree": named.fasttree,
    "flashforge": named.flashforge,
    "auto": named.auto,
}


def register_strategy(name: str, factory: Factory) -> None:
    """Adds a strategy under a new name; `factory()` makes it with default options. Its plans are verified on use."""
    if name in _FACTORIES:
        raise StrategyError("name", name, "is taken", f"choose a name other than {', '.join(_FACTORIES)}")
    _FACTORIES[name] = factory


def strategy_names() -> tuple[str, ...]:
    """Registered names in order of registration, without `auto`."""
    return tuple(name for name in _FACTORIES if name != "auto")


def strategy_from(strategy: str | Strategy) -> Strategy:
    """The strategy of this name with default options, or the object itself. Raises StrategyError."""
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str) or strategy not in _FACTORIES:
        raise StrategyError("strategy", strategy, "is not registered", f"use one of {', '.join(_FACTORIES)}")
    return _FACTORIES[strategy]()
