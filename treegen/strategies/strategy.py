"""Strategy: what turns a tree into a plan; Pipeline: the usual one, a grouping followed by passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from treegen.ir.plan import Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies.passes import Pass
from treegen.targets import Target

Grouping: TypeAlias = Callable[[Tree], Plan]
OnPass: TypeAlias = Callable[[str, Plan], None]


class Strategy(ABC):
    """Turns a tree into a plan, for an attention shape and a target. Subclasses are immutable values.

    proven: whether treegen's own tests hold its plans to the coverage law; plans of any other strategy are verified
    on use.
    """

    name: str
    proven: bool = False

    @property
    def options(self) -> dict[str, object]:
        """The options by name, as `explain` prints them."""
        return {}

    def choose(self, tree: Tree, shape: Shape, target: Target) -> Choice:
        """The strategy that will make the plan, and why; itself unless the strategy picks among others."""
        return Choice(self, "named by the caller")

    @abstractmethod
    def plan(self, tree: Tree, shape: Shape, target: Target, on_pass: OnPass | None = None) -> Plan:
        """A plan that obeys the coverage law; `on_pass(name, plan)` is called after every pass."""

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy and the reason why it was taken."""

    strategy: Strategy
    reason: str


@dataclass(frozen=True)
class Pipeline(Strategy):
    """A grouping followed by passes. `pipeline_options`: what `options` reports."""

    name: str
    grouping: Grouping
    passes: tuple[Pass, ...] = ()
    pipeline_options: tuple[tuple[str, object], ...] = ()
    proven: bool = False

    @property
    def options(self) -> dict[str, object]:
        """See Strategy."""
        return dict(self.pipeline_options)

    def plan(self, tree: Tree, shape: Shape, target: Target, on_pass: OnPass | None = None) -> Plan:
        """See Strategy."""
        plan = replace(self.grouping(tree), strategy=str(self))
        if on_pass:
            on_pass(self.grouping.__name__, plan)
        for step in self.passes:
            plan = step.apply(plan, tree)
            if on_pass:
                on_pass(step.name, plan)
        return plan
