"""Registers a strategy of one's own: a grouping, a new pass, and a pass of treegen.

    python examples/own_strategy.py

It cuts nodes with many rows into shorter pieces than nodes with few rows, so no thread block works much longer than the
others. Every plan of a registered strategy is checked against the coverage law.
"""

from dataclasses import dataclass

import numpy as np
import torch

import treegen
from treegen.ir.plan import Plan
from treegen.strategies import Pipeline
from treegen.strategies.groupings import by_node
from treegen.strategies.passes import DivideContext, TrimRows


@dataclass(frozen=True)
class DivideByRows:
    """Cuts a group's KV into pieces with at most `most` rows times tokens. A pass has a name and a pure `apply`."""

    most: int
    name: str = "divide-by-rows"

    def apply(self, plan: Plan, tree: treegen.Tree) -> Plan:
        """Returns a plan with other borders between groups. It obeys the coverage law if `plan` does."""
        tokens = np.bincount(plan.segment_group, plan.read_tokens, len(plan)).astype(np.int64)
        pieces = -(-tokens * plan.group_rows // self.most)
        return DivideContext(np.clip(pieces, 1, tokens)).apply(plan, tree)


def by_rows() -> treegen.strategies.Strategy:
    """Makes the strategy with its default options, for the registry."""
    return Pipeline("by-rows", by_node, (DivideByRows(most=1024), TrimRows()))


def main() -> None:
    """Registers the strategy, runs it against the oracle, and compares it with another."""
    treegen.register_strategy("by-rows", by_rows)
    tree = treegen.Tree.from_levels([1, 4, 16], [256, 64, 16])
    kernel = treegen.compile(tree, strategy="by-rows")
    q = torch.randn(tree.num_rows, 32, 128)
    k_cache, v_cache = torch.randn(2, tree.kv.last_slot + 1, 8, 128)
    report = kernel.verify(q, k_cache, v_cache)
    print(report)
    print(kernel.plan)
    print(f"{kernel.estimate.time_us:.1f} us estimated on {kernel.target.name}")
    assert report.passed


if __name__ == "__main__":
    main()
