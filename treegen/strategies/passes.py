"""Passes: pure functions from a plan to a plan; each leaves the coverage law intact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from treegen.ir.arrays import (
    INT32_MAX,
    Bools,
    Longs,
    check_made,
    frozen,
    int32_ramp,
    number,
    offsets,
    positive_int,
    ragged,
    ragged_ranges,
    ramp,
    stacked,
)
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Mask, Plan
from treegen.ir.tree import Tree
from treegen.strategies.makespan import borders
from treegen.target.tile_config import BLOCK_TOKENS

_TILE_TOKENS = 64


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
        length: int | Longs = self.tokens
        if self.small_rows:
            length = np.where(plan.group_rows <= self.small_rows, self.small_tokens, self.tokens).astype(np.int64)
        return cut_every(plan, length)


def cut_every(plan: Plan, length: int | Longs) -> Plan:
    """The plan with the read tokens of group g cut every `length[g]`."""
    ends = offsets(plan.stop - plan.start)
    of_groups = ends.take(plan.segment_indptr)
    parts = (of_groups[1:] - of_groups[:-1] + (length - 1)) // length
    places = offsets(parts)
    _check_parts(places.item(-1), length)
    group = ramp(len(parts)).repeat(parts)
    step = ramp(len(group)) - places.take(group)
    of_part = length if isinstance(length, int) else length.take(group)
    begin = of_groups.take(group) + step * of_part
    return _cut_at(plan, ends, group, begin, np.minimum(begin + of_part, of_groups[1:].take(group)))


def _check_parts(parts: int, length: int | Longs) -> None:
    """Raises StrategyError where groups are cut into more parts of this length than a plan is made of."""
    shortest = length if isinstance(length, int) else int(length.min(initial=INT32_MAX))
    check_made("tokens of a part", shortest, parts, "parts", StrategyError)


def cut_in_tiles(plan: Plan, most: int) -> tuple[Longs, Longs, Longs, Bools]:
    """(group, begin, end, whether it is the last) of every part when the read tokens of each group are cut into one
    part for every `most` of them: in whole tiles but for the last one, and as evenly as that allows, the last
    part having the more.

    Tiles are of 64 tokens, and pack runs in blocks of 16 (treegen.target.tile_config): parts begin with a block, so
    that together they take no more tiles than the group as it is. Where `most` is no multiple of 16, tokens are counted
    one by one.
    """
    block = BLOCK_TOKENS if most % BLOCK_TOKENS == 0 else 1
    length = (plan.stop - plan.start).astype(np.int64)
    slots, tokens = offsets(-(-length // block) * block), offsets(length)
    first, behind = slots[plan.segment_indptr[:-1]], slots[plan.segment_indptr[1:]]
    total, tile = behind - first, min(_TILE_TOKENS, most)
    parts = -(-total // most)
    _check_parts(int(parts.sum()), most)
    group, step = ragged(parts)
    last: Bools = step + 1 == parts[group]
    tiles, parts = -(-total // tile)[group], parts[group]
    begin = step * tiles // parts * tile
    end = np.where(last, total[group], (step + 1) * tiles // parts * tile)

    def token(slot: Longs) -> Longs:
        """The tokens of its group before a slot."""
        place = first[group] + slot
        segment = np.minimum(slots.searchsorted(place, "right") - 1, plan.segment_indptr[group + 1] - 1)
        before: Longs = tokens[segment] + np.minimum(place - slots[segment], length[segment])
        return before - tokens[plan.segment_indptr[group]]

    return group, token(begin), token(end), last


def cut_context(plan: Plan, group: Longs, begin: Longs, end: Longs) -> Plan:
    """New groups with the rows of `group[i]` and its read tokens `begin[i]:end[i]`, counted through its segments."""
    ends = offsets(plan.stop - plan.start)
    first_of_group = ends.take(plan.segment_indptr).take(group)
    return _cut_at(plan, ends, group, first_of_group + begin, first_of_group + end)


def _cut_at(plan: Plan, ends: Longs, group: Longs, begin: Longs, end: Longs) -> Plan:
    """New groups with the rows of `group[i]` and the tokens `begin[i]:end[i]`, which are its own, of all that the plan
    reads one after another. ends: the `offsets` of all segments' tokens.
    """
    first = ends.searchsorted(begin, "right") - number(1)
    counts = ends.searchsorted(end) - first
    places = offsets(counts)
    segment = ragged_ranges(first, counts, places)
    segments = plan.segments.take(segment, 1)
    start, stop = segments[1], segments[2]
    moved = start - ends.take(segment)
    np.minimum(stop, end.repeat(counts) + moved, out=stop)
    np.maximum(start, begin.repeat(counts) + moved, out=start)
    indptr, copied = int32_ramp(len(group) + 1), group
    if not len(plan.row_lo) == len(plan) == np.count_nonzero(plan.group_rows):  # not one interval each
        intervals = (plan.row_indptr[1:] - plan.row_indptr[:-1]).take(group)
        indptr, copied = frozen(offsets(intervals)), ragged_ranges(plan.row_indptr.take(group), intervals)
    return Plan.trusted(
        plan.strategy,
        indptr,
        plan.row_lo.take(copied),
        plan.row_hi.take(copied),
        places,
        segments,
        plan.group_rows.take(group),
        tiles=plan.tiles,
        mask=plan.mask,
        blocks=plan.blocks,
        stage=frozen(plan.stage.take(group)),
        merge=plan.merge,
    )


@dataclass(frozen=True, slots=True, eq=False)
class DivideContext:
    """Cuts the KV of group g, taken as one run of read tokens, into `pieces[g]` parts that differ by one token at most.

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
            stage=frozen(plan.stage[alive]),
            merge=plan.merge,
        )


@dataclass(frozen=True, slots=True)
class StageLevels:
    """Launches groups level by level: a group's stage is the depth of the first node that it reads."""

    @property
    def name(self) -> str:
        """See Pass."""
        return "stage-levels"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """See Pass."""
        return plan.changed(stage=frozen(tree.topology.depth[np.append(plan.node, 0)[plan.segment_indptr[:-1]]]))


@dataclass(frozen=True, slots=True)
class MergeLast:
    """Lets the last stage's items merge their rows' partials of earlier stages; groups and stages stay as they are.

    Whoever uses it sets the stages, so that no row of an earlier stage has several groups in the last one.
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
    """Stores who sees what in another form; groups stay as they are."""

    mask: Mask

    @property
    def name(self) -> str:
        """See Pass."""
        return f"mask-{self.mask}"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        """See Pass."""
        return plan.changed(mask=self.mask)


BY_GROUP = (SplitContext, TrimRows, StageLevels, MergeLast, StoreMask)
"""Passes that treat every group by itself: plans of several trees go through them joined as through each alone."""
