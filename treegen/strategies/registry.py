"""The registry: strategies by name, as `compile`, `explain` and the command line take them."""

from __future__ import annotations

from collections.abc import Callable
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

_FACTORIES: dict[str, Factory] = {
    "query": query,
    "medusa": medusa,
    "specinfer": specinfer,
    "cascade": cascade,
    "deft-node": deft_node,
    "deft-node-chunk": deft_node_chunk,
    "deft-flatten": deft_flatten,
    "fasttree": fasttree,
    "flashforge": flashforge,
    "cohort": cohort,
}


def auto() -> Strategy:
    """What treegen's own search finds: the least estimated time of all policies and of the strategies above."""
    return strategy_from("auto")


def register_strategy(name: str, factory: Factory) -> None:
    """Adds a strategy under a new name; `factory()` makes it with default options. Its plans are verified on use."""
    if not isinstance(name, str):
        raise StrategyError("name", name, "is not a text", "give the name that --strategy takes")
    if not callable(factory):
        raise StrategyError("factory", factory, "is not a function", "give one that returns a Strategy")
    if name in _FACTORIES:
        raise StrategyError("name", name, "is taken", f"choose a name other than {', '.join(_FACTORIES)}")
    _FACTORIES[name] = factory


def strategy_names() -> tuple[str, ...]:
    """Registered names in order of registration, without `auto`; those of installed packages last."""
    installed = (name for name in _installed() if name not in _FACTORIES)
    return tuple(name for name in (*_FACTORIES, *installed) if name != "auto")


def strategy_from(strategy: str | Strategy) -> Strategy:
    """The strategy of this name with default options, or the object itself. Raises StrategyError."""
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, str):
        factory = _FACTORIES.get(strategy) or _installed().get(strategy)
        if factory:
            return factory()
    raise StrategyError(
        "strategy", strategy, "is not registered", f"use one of {', '.join((*strategy_names(), 'auto'))}"
    )


@cache
def _installed() -> dict[str, Factory]:
    """Factories of installed packages, which are imported when they are called."""

    def factory(point: EntryPoint) -> Factory:
        return lambda: _made(point)

    return {point.name: factory(point) for point in entry_points(group=ENTRY_POINTS)}


def _made(point: EntryPoint) -> Strategy:
    made = point.load()()
    if not isinstance(made, Strategy):
        raise StrategyError("entry point", point.value, f"makes a {type(made).__name__}", "let it make a Strategy")
    return made
