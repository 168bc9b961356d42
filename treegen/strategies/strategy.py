"""Strategy: turns a tree into a plan. Pipeline: the usual strategy, a grouping followed by passes."""

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
_MOST_SHOWN = 8  # entries of a sequence that `summary` shows


@dataclass(frozen=True, slots=True)
class Traffic:
    """The counts that the IO of a strategy's plans follows from, known without making the plans.

    Attributes:
        kv: The tokens that are read: those of all rows' paths, of the tree once, of the tree once per row, or the
            plan's.
        partials: What the rows of partial results follow from: there are "none", or they follow from nodes and rows
            alone ("nodes"), or from lengths, too ("lengths").
        mask: How masks are stored: row intervals of masked runs; one element, or one bit, per row and token of the
            tree; or a word per token.
        scores: Whether QK^T, scaling, mask addition and softmax are each written and read, as in unfused attention.
    """

    kv: Literal["paths", "tree", "tree per row", "plan"]
    partials: Literal["none", "nodes", "lengths"]
    mask: Literal["intervals", "element per row", "bit per row", "word per token"] = "intervals"
    scores: bool = False


class Strategy(ABC):
    """Turns a tree into a plan, for an attention shape and a target. Subclasses are immutable values.

    Attributes:
        name: The name.
        proven: Whether treegen's own tests hold its plans to the coverage law. Plans of any other strategy are verified
            on use.
        isolated: Whether its plans are isolated (Plan.isolated), which is checked on use.
        automatic: Whether it chooses among all strategies, as `auto` does.
        batch_invariant: Whether a row's bits follow from the row alone.
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
        """The counts that the IO of its plans follows from; None if it follows only from each plan and its schedule."""
        return None

    def plan_size(self, tree: Tree, shape: Shape) -> int:
        """Estimates the segments and rows of all groups of the plan, without making it.

        Time and memory for making a plan and its account grow with them.

        Args:
            tree: The tree.
            shape: The attention shape.

        Returns:
            The estimate, 0 if it is not known.
        """
        return 0

    @property
    def serves_any_tree(self) -> bool:
        """Whether it can plan any other tree, too: its options do not name nodes of a single tree."""
        return True

    @property
    def merges_last(self) -> bool:
        """Whether the items of the last round merge results, rather than a launch of their own (Plan.merge)."""
        return False

    def isolated_form(self) -> Strategy | None:
        """Returns the strategy with isolated plans; None if it cannot make such plans itself."""
        return self if self.isolated else None

    def choose(self, problem: Problem) -> Choice:
        """Returns the strategy that will make the plan, and the reason: itself, unless it picks among others.

        Args:
            problem: The tree, the attention shape and the target.
        """
        return Choice(self, "named by the caller")

    @abstractmethod
    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        """Makes a plan that obeys the coverage law.

        Args:
            problem: The tree, the attention shape and the target.
            on_pass: Called as `on_pass(name, plan)` after every pass.
        """

    def plans_of_forest(self, forest: Forest, shape: Shape, target: Target) -> Iterator[ForestPlan]:
        """Yields plans for all trees of a forest, to be counted together.

        Trees whose plans agree in tiles, mask, thread blocks and merge have one plan.

        Args:
            forest: The trees.
            shape: The attention shape.
            target: The target.
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
    """Returns an option's value as text, cut after the beginning of a long sequence."""
    if isinstance(value, tuple) and len(value) > _MOST_SHOWN:
        return f"({', '.join(map(str, value[:_MOST_SHOWN]))}, ... {len(value) - _MOST_SHOWN} more)"
    return str(value)


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy, and the reason why it was taken."""

    strategy: Strategy
    reason: str


@dataclass(frozen=True)
class Pipeline(Strategy):
    """A grouping followed by passes.

    Attributes:
        name: The name.
        grouping: Makes the first plan of a tree (treegen.strategies.groupings).
        passes: Rewrite it, in order (treegen.strategies.passes).
        pipeline_options: The options, as names and values.
        proven: See Strategy.
        pipeline_traffic: See Strategy.traffic.
        isolated: See Strategy.
    """

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
        """See Strategy: one plan for all trees, if every pass treats each group by itself."""
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
