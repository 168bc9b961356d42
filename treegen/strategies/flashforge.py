"""FlashForge (Wang et al., 2025): nodes divided by a bound on the makespan, and dealt to thread blocks longest first.

A task is a node with the rows that see it; its cost is profiled. Long tasks are cut until no division shortens the work
of the longest thread block (section 5.1). The pieces are dealt to the thread blocks that a device holds, the costliest
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from treegen.ir.arrays import INT32_MAX, Ints, Longs, set_positive_ints
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies.forest import Forest, ForestPlan
from treegen.strategies.groupings import SIZES, by_node
from treegen.strategies.makespan import divide
from treegen.strategies.passes import DivideContext
from treegen.strategies.strategy import Choice, OnPass, Strategy, Traffic
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.task_costs import source_of_costs, task_costs, task_rows
from treegen.target.tile_config import kernel_config, lanes_of, resident_blocks, rows_per_tile


@dataclass(frozen=True)
class FlashForge(Strategy):
    """Divides each node with all rows that see it, and deals the pieces to thread blocks by profiled cost (section 5).

    A node with more rows than a tile is one task per row tile, which read its KV again; the paper's thread blocks take
    all rows of a node.

    Attributes:
        blocks: Thread blocks; by default the number that the target holds at a time.
    """

    blocks: int | None = None
    name: str = "flashforge"
    proven: bool = True

    def __post_init__(self) -> None:
        if self.blocks is not None:
            set_positive_ints(self, ["blocks"], StrategyError)

    @property
    def options(self) -> dict[str, object]:
        """See Strategy."""
        return {} if self.blocks is None else {"blocks": self.blocks}

    @property
    def traffic(self) -> Traffic:
        """See Strategy."""
        return Traffic("tree", "lengths")

    def plan_size(self, tree: Tree, shape: Shape) -> int:
        """See Strategy."""
        return SIZES[by_node](tree, INT32_MAX)

    def choose(self, problem: Problem) -> Choice:
        """See Strategy; the reason names the source of the costs."""
        target = problem.target
        return Choice(self, f"named by the caller; costs of tasks: {source_of_costs(target)}")

    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        """See Strategy."""
        tree, shape, target = problem
        plan = replace(by_node(tree), strategy=str(self))
        if on_pass:
            on_pass("by_node", plan)
        pieces, blocks = self.divide(plan.group_rows, plan.group_tokens, shape, target)
        plan = replace(DivideContext(pieces).apply(plan, tree), blocks=blocks)
        if on_pass:
            on_pass("divide-context", plan)
        return plan

    def plans_of_forest(self, forest: Forest, shape: Shape, target: Target) -> Iterator[ForestPlan]:
        """See Strategy: one plan for all trees. The nodes of each tree are divided by themselves."""
        nodes = by_node(forest.joined)
        rows, tokens = nodes.group_rows, nodes.group_tokens
        borders = np.searchsorted(forest.tree_of_groups(nodes), np.arange(len(forest.trees) + 1))
        divided = [
            self.divide(rows[begin:end], tokens[begin:end], shape, target) for begin, end in pairwise(borders.tolist())
        ]
        plan = DivideContext(np.concatenate([pieces for pieces, _ in divided])).apply(nodes, forest.joined)
        yield ForestPlan.of_all(forest, replace(plan, blocks=max(blocks for _, blocks in divided)))

    def divide(self, rows: Ints, tokens: Longs, shape: Shape, target: Target) -> tuple[Longs, int]:
        """Returns the number of pieces of each node, and the thread blocks that they are dealt to.

        rows, tokens: of each node.
        """
        config = kernel_config(shape, target, int(rows.max(initial=1)))
        blocks = self.blocks or resident_blocks(config, shape, target) * target.sms
        height = rows_per_tile(config.rows, shape.group)
        head_rows = task_rows(np.minimum(rows, height), config, shape)
        count = -(-rows // height) * lanes_of(config, shape)
        return divide(head_rows, tokens, count, blocks, task_costs(shape, target)), blocks


def flashforge(blocks: int | None = None) -> Strategy:
    """Reads nodes with all rows that see them, divided and dealt to thread blocks by profiled cost (FlashForge).

    Long nodes are divided by a bound on the makespan. The costliest pieces are dealt first.

    Args:
        blocks: Thread blocks; by default the number that the target holds at a time.

    Raises:
        StrategyError: `blocks` is not a positive integer.
    """
    return FlashForge(blocks)
