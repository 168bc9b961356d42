"""Passes: pure functions from a plan to a plan; each leaves the coverage law intact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from treegen.ir.arrays import frozen, offsets, positive_int, ragged
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree


class Pass(Protocol):
    """A plan transformation whose dataclass fields are its options."""

    @property
    def name(self) -> str:
        """The name that traces and error notes print."""

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """A plan that obeys the coverage law whenever `plan` does."""


@dataclass(frozen=True, slots=True)
class SplitContext:
    """Cuts every group's KV, taken as one run of read tokens, every `tokens` tokens; rows stay as they are.

    Groups of at most `small_rows` rows are cut every `small_tokens` tokens.
    """

    tokens: int
    small_rows: int = 0
    small_tokens: int = 1

    def __post_init__(self) -> None:
        positive_int("tokens", self.tokens, StrategyError)
        positive_int("small_tokens", self.small_tokens, StrategyError)

    @property
    def name(self) -> str:
        """See Pass."""
        return "split-context"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """See Pass."""
        owner = plan.segment_group
        ends = offsets(plan.read_tokens)
        begin = ends[:-1] - ends[plan.segment_indptr[owner]]
        end = begin + plan.read_tokens
        length = np.where(plan.group_rows <= self.small_rows, self.small_tokens, self.tokens).astype(np.int64)[owner]
        first_chunk = begin // length
        segment, step = ragged((end - 1) // length - first_chunk + 1)
        chunk = first_chunk[segment] + step
        length = length[segment]
        start = plan.start[segment] + np.maximum(chunk * length - begin[segment], 0)
        stop = plan.start[segment] + np.minimum((chunk + 1) * length, end[segment]) - begin[segment]

        group = owner[segment]
        new = np.append(True, (group[1:] != group[:-1]) | (chunk[1:] != chunk[:-1]))[: len(group)]
        first = np.flatnonzero(new)
        source = group[first]
        intervals = np.diff(plan.row_indptr)[source]
        copied, position = ragged(intervals)
        interval = plan.row_indptr[source][copied] + position
        return Plan(
            plan.strategy,
            frozen(offsets(intervals)),
            frozen(plan.row_lo[interval]),
            frozen(plan.row_hi[interval]),
            frozen(np.append(first, len(group))),
            frozen(plan.node[segment]),
            frozen(start),
            frozen(stop),
            frozen(plan.seen_lo[segment]),
            frozen(plan.seen_hi[segment]),
            plan.tiles,
        )


@dataclass(frozen=True, slots=True)
class TrimRows:
    """Takes out of every group the rows that see none of its tokens, and drops groups left without rows."""

    @property
    def name(self) -> str:
        """See Pass."""
        return "trim-rows"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """See Pass."""
        seeing = np.flatnonzero(plan.seen_hi > plan.seen_lo)
        owner = plan.segment_group
        # Row numbers shifted by group into one line, so that one running maximum merges the intervals of all groups.
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
        return Plan(
            plan.strategy,
            frozen(np.searchsorted(interval_group, np.append(alive, len(plan)))),
            frozen(rank_lo),
            frozen(rank_hi),
            frozen(np.searchsorted(owner[kept], np.append(alive, len(plan)))),
            frozen(plan.node[kept]),
            frozen(plan.start[kept]),
            frozen(plan.stop[kept]),
            frozen(seen_lo[kept]),
            frozen(seen_hi[kept]),
            plan.tiles,
        )


BY_GROUP = (SplitContext, TrimRows)
"""Passes that treat every group by itself: plans of several trees go through them joined as through each alone."""
