"""Path cohorts: neighbouring rows fill a tile and walk their whole paths together, in one launch, without partials."""

from __future__ import annotations

from dataclasses import dataclass, replace

from treegen.ir.arrays import positive_int
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies.groupings import by_cohort
from treegen.strategies.passes import SplitContext
from treegen.strategies.strategy import OnPass, Strategy, Traffic
from treegen.targets import Target
from treegen.tiles import rows_per_tile


@dataclass(frozen=True)
class Cohort(Strategy):
    """Groups of rows that lie next to one another in depth-first order, with all that any of them sees.

    head_rows: query head rows of a group; a row's heads per KV head count as one each. split: tokens per work item; by
    default a group is one item. KV that several groups share is read by each of them, after the first from L2.
    """

    head_rows: int = 64
    split: int | None = None
    name: str = "cohort"
    proven: bool = True

    def __post_init__(self) -> None:
        positive_int("head_rows", self.head_rows, StrategyError)
        if self.split is not None:
            positive_int("split", self.split, StrategyError)

    @property
    def options(self) -> dict[str, object]:
        """See Strategy."""
        return {"head_rows": self.head_rows, **({} if self.split is None else {"split": self.split})}

    @property
    def traffic(self) -> Traffic | None:
        """See Strategy."""
        return Traffic("plan", "none" if self.split is None else "lengths")

    def plan(self, tree: Tree, shape: Shape, target: Target, on_pass: OnPass | None = None) -> Plan:
        """See Strategy."""
        plan = replace(by_cohort(tree, rows_per_tile(self.head_rows, shape.group)), strategy=str(self))
        if on_pass:
            on_pass("by_cohort", plan)
        if self.split is not None:
            plan = SplitContext(self.split).apply(plan, tree)
            if on_pass:
                on_pass("split-context", plan)
        return plan
