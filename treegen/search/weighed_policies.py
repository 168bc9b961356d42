"""Policies with their estimated times, however these were found."""

from __future__ import annotations

from dataclasses import replace

from treegen.cost.figures import time_text
from treegen.ir.arrays import INT32_MAX, Floats
from treegen.search.split_estimates import EVEN_ROW
from treegen.strategies.baselines import query
from treegen.strategies.cohort import Cohort
from treegen.strategies.strategy import Strategy


class WeighedPolicies:
    """Policies with their estimated times. A place is a pair: the numbers of a split and of a walk.

    walks: a policy without split for each walk. splits: `[splits, walks]`; tokens per work item, INT32_MAX where
    nothing is split. times_us: `[splits, walks]`; microseconds. Those of policies for running batches are the least
    that they may take. names_shares: whether policies name even shares, and not the tokens of one.
    """

    walks: tuple[Cohort, ...]
    splits: Floats
    times_us: Floats
    names_shares: bool

    def shares_of(self, walk: int) -> float:
        """Returns the thread blocks that even shares of a walk are for."""
        raise NotImplementedError

    def items(self, place: tuple[int, int]) -> int:
        """Counts the work items of the plan of the policy at a place."""
        raise NotImplementedError

    def time_us(self, place: tuple[int, int]) -> float:
        """Returns the estimated microseconds of the policy at a place.

        That of a policy for running batches follows from the tokens of each of its items.
        """
        raise NotImplementedError

    def best(self, most_items: int | None = None) -> tuple[int, int]:
        """Returns the place of the policy with the least time among those with at most `most_items`.

        If there is none, it is the place of one with the fewest items.
        """
        raise NotImplementedError

    def policy(self, place: tuple[int, int]) -> Cohort:
        """Returns the policy at a place."""
        walk, split = self.walks[place[1]], int(self.splits[place])
        if split == INT32_MAX:
            return walk
        if self.names_shares and place[0] == EVEN_ROW:
            shares = self.shares_of(place[1])
            return replace(walk, shares=int(shares) if shares.is_integer() else shares)
        return replace(walk, split=split)

    @property
    def query_us(self) -> float:
        """Microseconds of plain per-row decoding with its best split."""
        alone = [
            place for place, walk in enumerate(self.walks) if walk.head_rows == 1 and walk.split_shared_rows is None
        ]
        return float(self.times_us[:, alone].min())

    def reason(self, strategy: Strategy, time_us: float) -> str:
        """Returns the reason for taking a strategy with this estimated time."""
        taken, number = time_text(time_us), self.times_us.size
        if strategy.name == "query" or (isinstance(strategy, Cohort) and _is_query(strategy)):
            return f"sharing does not pay: plain per-row decoding takes least of {number} policies, {taken}"
        plain = time_text(self.query_us)
        return f"least estimated time of {number} policies, {taken}; plain per-row decoding takes {plain}"


def as_named(strategy: Strategy, *, has_rows_inside: bool) -> Strategy:
    """Returns `query` for a cohort of one row with its whole path, if both plan the tree alike.

    They do not where rows of a node see different parts of it: `query` reads each row's part uncut, and a cohort of one
    row reads it cut.
    """
    if isinstance(strategy, Cohort) and strategy.shares is None and _is_query(strategy) and not has_rows_inside:
        return query(strategy.split)
    return strategy


def _is_query(strategy: Cohort) -> bool:
    return (
        strategy.head_rows == 1
        and strategy.tile is None
        and strategy.split_shared_rows is None
        and not strategy.cut_nodes
    )
