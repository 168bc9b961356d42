"""Strategy: what turns a tree into a plan; Pipeline: the usual one, a grouping followed by passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from treegen.ir.arrays import INT32_MAX
from treegen.ir.plan import Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies.forest import Forest, ForestPlan
from treegen.strategies.groupings import BY_TREE, SIZES
from treegen.strategies.passes import BY_GROUP, Pass, SplitContext
from treegen.target.problem import Problem
from treegen.target.targets import Target

Grouping: TypeAlias = Callable[[Tree], Plan]
OnPass: TypeAlias = Callable[[str, Plan], None]
_MOST_SHOWN = 8  # entries of an option that is a sequence


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the IO of a strategy's plans follows from, so that it can be told for many trees without planning them all.

    kv: tokens read are those of all rows' paths, of the tree once, of the tree once per row, or the plan's.
    partials: rows of partial results are none; follow from nodes and rows alone; or depend on lengths as well.
    mask: row intervals of masked runs; one element, or one bit, per row and token of the tree; or a word per token.
    scores: whether QK^T, scaling, mask addition and softmax are each written and read, as unfused attention does.
    """

    kv: Literal["paths", "tree", "tree per row", "plan"]
    partials: Literal["none", "nodes", "lengths"]
    mask: Literal["intervals", "element per row", "bit per row", "word per token"] = "intervals"
    scores: bool = False


class Strategy(ABC):
    """Turns a tree into a plan, for an attention shape and a target. Subclasses are immutable values.

    proven: whether treegen's own tests hold its plans to the coverage law; plans of any other strategy are verified
    on use. isolated: whether its plans are isolated (Plan.isolated), which is checked on use. automatic: whether it
    chooses among all strategies, as `auto` does. batch_invariant: whether a row's bits follow from the row alone.
    """

    name: str
    proven: bool = False
    isolated: bool = False
    automatic: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = False

    @property
    def options(self) -> dict[str, object]:
        """The options by name, as `explain` prints them."""
        return {}

    @property
    def traffic(self) -> Traffic | None:
        """What the IO of its plans follows from; None: from plan, schedule and account of every single tree."""
        return None

    def plan_size(self, tree: Tree, shape: Shape) -> int:
        """Segments and rows of all groups of the plan, about, counted without a plan: time and memory that it takes to
        make and account for grow with them. 0 where this is not known.
        """
        return 0

    @property
    def serves_any_tree(self) -> bool:
        """Whether it can plan any other tree, too: its options name no nodes of a single tree."""
        return True

    @property
    def merges_last(self) -> bool:
        """Whether the items of the last stage merge results, rather than a launch of their own (Plan.merge)."""
        return False

    def isolated_form(self) -> Strategy | None:
        """The strategy with isolated plans, where it can make such plans itself."""
        return self if self.isolated else None

    def choose(self, problem: Problem) -> Choice:
        """The strategy that will make the plan, and why; itself unless the strategy picks among others."""
        return Choice(self, "named by the caller")

    @abstractmethod
    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        """A plan that obeys the coverage law; `on_pass(name, plan)` is called after every pass."""

    def plans_of_forest(self, forest: Forest, shape: Shape, target: Target) -> Iterator[ForestPlan]:
        """The plans of all trees of a forest, to be counted together. Joined plans have tiles, mask, thread blocks and
        merge in common.
        """
        plans = [self.plan(Problem(tree, shape, target)) for tree in forest.trees]
        for chosen, part in forest.parts((plan.tiles, plan.mask, plan.blocks, plan.merge) for plan in plans):
            yield ForestPlan(chosen, part, part.join([plans[index] for index in chosen]))

    def __str__(self) -> str:
        return self._with_options(str)

    @property
    def summary(self) -> str:
        """The strategy as text, with long options cut short."""
        return self._with_options(_summary)

    def _with_options(self, text: Callable[[object], str]) -> str:
        options = ", ".join(f"{name}={text(value)}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name


def _summary(value: object) -> str:
    """An option's value, of a long sequence its beginning."""
    if isinstance(value, tuple) and len(value) > _MOST_SHOWN:
        return f"({', '.join(map(str, value[:_MOST_SHOWN]))}, ... {len(value) - _MOST_SHOWN} more)"
    return str(value)


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy and the reason why it was taken."""

    strategy: Strategy
    reason: str


@dataclass(frozen=True)
class Pipeline(Strategy):
    """A grouping followed by passes. `pipeline_options`, `pipeline_traffic`: what `options` and `traffic` report."""

    name: str
    grouping: Grouping
    passes: tuple[Pass, ...] = ()
    pipeline_options: tuple[tuple[str, object], ...] = ()
    proven: bool = False
    pipeline_traffic: Traffic | None = None
    isolated: bool = False

    @property
    def options(self) -> dict[str, object]:
        """See Strategy."""
        return dict(self.pipeline_options)

    @property
    def traffic(self) -> Traffic | None:
        """See Strategy."""
        return self.pipeline_traffic

    def plan_size(self, tree: Tree, shape: Shape) -> int:
        """See Strategy."""
        if self.grouping not in SIZES:
            return 0
        lengths = [step.tokens for step in self.passes if isinstance(step, SplitContext)]
        return SIZES[self.grouping](tree, min(lengths, default=INT32_MAX))

    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        """See Strategy."""
        tree = problem.tree
        plan = self.grouping(tree).changed(strategy=str(self))
        if on_pass:
            on_pass(self.grouping.__name__, plan)
        for step in self.passes:
            plan = step.apply(plan, tree)
            if on_pass:
                on_pass(step.name, plan)
        return plan

    def plans_of_forest(self, forest: Forest, shape: Shape, target: Target) -> Iterator[ForestPlan]:
        """See Strategy: one plan for all trees, where every pass treats each group by itself."""
        if not all(isinstance(step, BY_GROUP) for step in self.passes):
            yield from super().plans_of_forest(forest, shape, target)
            return
        if self.grouping in BY_TREE:
            plan = self.grouping(forest.joined)
        else:
            plan = forest.join([self.grouping(tree) for tree in forest.trees])
        for step in self.passes:
            plan = step.apply(plan, forest.joined)
        yield ForestPlan.of_all(forest, plan)
