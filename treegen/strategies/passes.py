"""Passes: pure functions from a plan to a plan, which keep the coverage law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from treegen.ir.arrays import (
    Longs,
    frozen,
    offsets,
    set_positive_ints,
    stacked,
)
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Mask, Plan
from treegen.ir.tree import Tree
from treegen.strategies.context_cuts import cut_context, cut_every
from treegen.strategies.makespan import borders


class Pass(Protocol):
    """A rewrite of plans. Its dataclass fields are its options."""

    @property
    def name(self) -> str:
        """The name for traces and error notes."""

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """Returns a plan that obeys the coverage law if `plan` does."""


@dataclass(frozen=True, slots=True)
class SplitContext:
    """Cuts the tokens that each group reads, taken as one run, every `tokens` tokens; rows stay as they are.

    Attributes:
        tokens: Tokens of a part.
        small_rows: Groups of at most this number of rows are cut every `small_tokens` tokens instead.
        small_tokens: Tokens of a part of such a group.
    """

    tokens: int
    small_rows: int = 0
    small_tokens: int = 1

    def __post_init__(self) -> None:
        set_positive_ints(self, ("tokens", "small_tokens"), StrategyError)

    @property
    def name(self) -> str:
        """See Pass."""
        return "split-context"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """See Pass."""
        length: int | Longs = self.tokens
        if self.small_rows:
            length = np.where(plan.group_rows <= self.small_rows, self.small_tokens, self.tokens).astype(np.int64)
        return cut_every(plan, length)


@dataclass(frozen=True, slots=True, eq=False)
class DivideContext:
    """Cuts the tokens that group g reads, taken as one run, into `pieces[g]` parts that differ by one token at most.

    Rows stay as they are. Raises StrategyError when a group has fewer tokens than parts.
    """

    pieces: Longs

    @property
    def name(self) -> str:
        """See Pass."""
        return "divide-context"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """See Pass."""
        tokens = plan.group_tokens
        if len(self.pieces) != len(plan) or (self.pieces < 1).any() or (self.pieces > tokens).any():
            reason = f"does not divide the tokens of {len(plan)} groups"
            raise StrategyError("pieces", self.pieces.tolist(), reason, "give 1..tokens for every group")
        group, begin, end = borders(tokens, self.pieces)
        return cut_context(plan, group, begin, end)


@dataclass(frozen=True, slots=True)
class TrimRows:
    """Removes the rows that see none of a group's tokens, and drops groups without rows."""

    @property
    def name(self) -> str:
        """See Pass."""
        return "trim-rows"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """See Pass."""
        seeing = np.flatnonzero(plan.seen_hi > plan.seen_lo)
        owner = plan.segment_group
        # Row numbers are shifted by group into one line, so that a running maximum merges the intervals of all groups.
        stride = int(plan.group_rows.max(initial=0)) + 1
        shift = owner * stride
        order = seeing[np.argsort((shift + plan.seen_lo)[seeing], kind="stable")]
        lo, hi = (shift + plan.seen_lo)[order], np.maximum.accumulate((shift + plan.seen_hi)[order])
        first = np.flatnonzero(np.append(True, lo[1:] > hi[:-1])[: len(lo)])
        group = owner[order[first]]
        kept_lo = lo[first]
        kept_hi = hi[np.append(first[1:], len(hi)) - 1] if len(first) else kept_lo
        widths = offsets(kept_hi - kept_lo)
        before = widths[:-1] - widths[np.searchsorted(group, group)]

        component = np.maximum(np.searchsorted(kept_lo, shift + plan.seen_lo, side="right") - 1, 0)
        moved = (before - kept_lo)[component] + shift if len(first) else shift
        sees = plan.seen_hi > plan.seen_lo
        seen_lo = np.where(sees, plan.seen_lo + moved, 0)
        seen_hi = np.where(sees, plan.seen_hi + moved, 0)

        index, rank_lo, rank_hi = plan.rank_intervals(group, kept_lo - group * stride, kept_hi - group * stride)
        sees_any = np.zeros(len(plan), bool)
        sees_any[group] = True
        alive, kept = np.flatnonzero(sees_any), sees_any[owner]
        interval_group = group[index]
        row_indptr = interval_group.searchsorted(np.append(alive, len(plan)))
        ends = offsets(rank_hi - rank_lo)[row_indptr]
        return Plan.trusted(
            plan.strategy,
            row_indptr,
            rank_lo,
            rank_hi,
            owner[kept].searchsorted(np.append(alive, len(plan))),
            stacked(plan.node[kept], plan.start[kept], plan.stop[kept], seen_lo[kept], seen_hi[kept]),
            ends[1:] - ends[:-1],
            tiles=plan.tiles,
            mask=plan.mask,
            blocks=plan.blocks,
            round=frozen(plan.round[alive]),
            merge=plan.merge,
        )


@dataclass(frozen=True, slots=True)
class LevelRounds:
    """Launches groups level by level: a group's round is the depth of the first node that it reads."""

    @property
    def name(self) -> str:
        """See Pass."""
        return "level-rounds"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """See Pass."""
        return plan.changed(round=frozen(tree.topology.depth[np.append(plan.node, 0)[plan.segment_indptr[:-1]]]))


@dataclass(frozen=True, slots=True)
class MergeLast:
    """Lets the items of the last round merge their rows' partials of earlier rounds.

    Groups and rounds stay as they are. The caller sets the rounds so that no row of an earlier round has several groups
    in the last one.
    """

    @property
    def name(self) -> str:
        """See Pass."""
        return "merge-last"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """See Pass."""
        return plan.changed(merge="final")


@dataclass(frozen=True, slots=True)
class StoreMask:
    """Stores masks in another form; groups stay as they are."""

    mask: Mask

    @property
    def name(self) -> str:
        """See Pass."""
        return f"mask-{self.mask}"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """See Pass."""
        return plan.changed(mask=self.mask)


BY_GROUP = (SplitContext, TrimRows, LevelRounds, MergeLast, StoreMask)
"""Passes that treat each group by itself, so that they may take the plans of several trees joined to one."""

StageLevels = LevelRounds
"""The earlier name of LevelRounds."""
