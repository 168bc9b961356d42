"""The registry: strategies by name, as `compile`, `explain` and the command line take them, with what is known of each.

A shipped strategy has one entry here, in `_SHIPPED`. What depends on a strategy's options is a property of Strategy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, TypeAlias

from treegen.ir.errors import StrategyError
from treegen.strategies.baselines import cascade, medusa, query, specinfer
from treegen.strategies.cohort import cohort
from treegen.strategies.deft import deft_flatten, deft_node, deft_node_chunk
from treegen.strategies.fasttree import fasttree
from treegen.strategies.flashforge import flashforge
from treegen.strategies.strategy import Strategy

Factory: TypeAlias = Callable[[], Strategy]
GroupKind: TypeAlias = Literal[
    "any",
    "nodes",
    "pieces of nodes",
    "joined nodes",
    "blocks of the tree",
    "whole tree per row",
    "whole tree at once",
]
ENTRY_POINTS = "treegen.strategies"
"""The entry-point group in which installed packages offer strategies: a name, and a function that makes one."""


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """What is known of a strategy by its name, before one is made.

    factory: makes the strategy, with default options where it is given none. Its docstring begins with the summary.
    groups: what the groups of its plans read. The search has a lower bound for each kind; that of "any" always holds.
    search_place: the place of the strategy in the order of the search, in which the first of equals wins. The search
    leaves out a strategy without a place.
    policy_options: options that the search varies. A measured policy may set them.
    split_option: the option that limits the tokens of a work item.
    """

    name: str
    factory: Callable[..., Strategy]
    groups: GroupKind = "any"
    search_place: int | None = None
    policy_options: frozenset[str] = frozenset()
    split_option: str | None = None

    @property
    def summary(self) -> str:
        """The first paragraph of the factory's docstring, on one line."""
        return " ".join((inspect.getdoc(self.factory) or "").split("\n\n")[0].split())


_SHIPPED = (
    StrategySpec("query", query, search_place=9, policy_options=frozenset({"split"}), split_option="split"),
    StrategySpec("medusa", medusa, "whole tree at once", search_place=8),
    StrategySpec("specinfer", specinfer, "whole tree per row", search_place=7),
    StrategySpec("cascade", cascade, "nodes", search_place=6),
    StrategySpec("deft-node", deft_node, "nodes", search_place=4),
    StrategySpec("deft-node-chunk", deft_node_chunk, "pieces of nodes", search_place=5, split_option="chunk"),
    StrategySpec("deft-flatten", deft_flatten, "blocks of the tree", search_place=3, split_option="block"),
    StrategySpec("fasttree", fasttree, "joined nodes", search_place=1),
    StrategySpec("flashforge", flashforge, "pieces of nodes", search_place=2),
    StrategySpec(
        "cohort",
        cohort,
        search_place=0,
        policy_options=frozenset({"head_rows", "split", "tile", "apart", "merge"}),
        split_option="split",
    ),
)
_SPECS: dict[str, StrategySpec] = {spec.name: spec for spec in _SHIPPED}
"""Registered strategies, in the order in which they are listed."""


def auto() -> Strategy:
    """The strategy `auto`, which chooses among the others by treegen's own search."""
    return strategy_from("auto")


def register_strategy(name: str, factory: Factory) -> None:
    """Adds a strategy under a new name; `factory()` makes it with default options. Its plans are verified on use."""
    if not isinstance(name, str):
        raise StrategyError("name", name, "is not a text", "give the name that --strategy takes")
    if not callable(factory):
        raise StrategyError("factory", factory, "is not a function", "give one that returns a Strategy")
    if name in _SPECS:
        raise StrategyError("name", name, "is taken", f"choose a name other than {', '.join(_SPECS)}")
    _SPECS[name] = StrategySpec(name, factory)


def strategy_names() -> tuple[str, ...]:
    """Registered names in order of registration, without `auto`; those of installed packages last."""
    installed = (name for name in _installed() if name not in _SPECS)
    return tuple(name for name in (*_SPECS, *installed) if name != "auto")


def strategy_from(strategy: str | Strategy) -> Strategy:
    """The strategy of this name with default options, or the object itself. Raises StrategyError."""
    return strategy if isinstance(strategy, Strategy) else spec_of(strategy).factory()


def spec_of(name: str) -> StrategySpec:
    """What is known of the strategy of this name. Raises StrategyError."""
    spec = (_SPECS.get(name) or _installed().get(name)) if isinstance(name, str) else None
    if spec is None:
        raise StrategyError(
            "strategy", name, "is not registered", f"use one of {', '.join((*strategy_names(), 'auto'))}"
        )
    return spec


def searched_specs() -> list[StrategySpec]:
    """The strategies that the search compares, in its order. Each of them can become a measured policy."""
    placed = ((spec.search_place, spec) for spec in _SPECS.values() if spec.search_place is not None)
    return [spec for _, spec in sorted(placed, key=lambda entry: entry[0])]


@cache
def _installed() -> dict[str, StrategySpec]:
    """Strategies of installed packages, which are imported when their factories are called."""

    def factory(point: EntryPoint) -> Factory:
        return lambda: _made(point)

    return {point.name: StrategySpec(point.name, factory(point)) for point in entry_points(group=ENTRY_POINTS)}


def _made(point: EntryPoint) -> Strategy:
    made = point.load()()
    if not isinstance(made, Strategy):
        raise StrategyError("entry point", point.value, f"makes a {type(made).__name__}", "let it make a Strategy")
    return made
