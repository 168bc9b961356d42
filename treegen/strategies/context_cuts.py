"""Cuts of the tokens that groups read, taken as one run through their segments; rows stay as they are."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from treegen.ir.arrays import (
    INT32_MAX,
    Bools,
    Floats,
    Longs,
    check_made,
    frozen,
    int32_ramp,
    largest,
    number,
    offsets,
    ragged,
    ragged_ranges,
    ramp,
)
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.target.tile_config import RUN_TOKENS

T = TypeVar("T", float, Floats)

_TILE_TOKENS = 64
SHARE_ROOM = 1.04
"""A share over the mean: with this room the parts that are left fit into the thread blocks. With shares of 0.9 times
the mean, batches of the suite take up to 1.36 times as long on an H200.
"""
MOST_PARTS = 5
"""The most parts that a thread block takes where even shares cut the last ones further."""
LATE, LATE_TOKENS = 1 / 8, 128
"""The fraction of a share, and the tokens, by which parts may end later, rather than be cut further."""
SPLIT_STEP = 64
"""The tokens of an item that choices make are a multiple of this number."""


def even_share(tokens: T, blocks: T) -> T:
    """Returns the tokens of an item if thread blocks share all tokens evenly."""
    share: T = -(-tokens * SHARE_ROOM // (blocks * SPLIT_STEP)) * SPLIT_STEP
    return share


def cut_every(plan: Plan, length: int | Longs) -> Plan:
    """Returns the plan with the read tokens of group g cut every `length[g]`."""
    ends = offsets(plan.stop - plan.start)
    return _cut_at(plan, ends, *parts_of(ends.take(plan.segment_indptr), length))


def cut_evenly(plan: Plan, blocks: float) -> Plan:
    """Returns the plan with read tokens cut so that a number of thread blocks share them evenly.

    Groups are cut into even shares. The parts that are left of them follow in the blocks that end first. Where these do
    not end early enough for a whole part, it is cut further, into parts that fill several blocks:

        block 0   [ 1088              ]
        block 1   [ 1088              ]
        block 2   [ 960          ][128]     of two parts of 960 tokens
        block 3   [ 960          ][128]     that would follow whole

    Args:
        plan: A plan of groups.
        blocks: The number of thread blocks; it need not be whole.
    """
    ends = offsets(plan.stop - plan.start)
    of_groups = ends.take(plan.segment_indptr)
    begin = even_parts(of_groups, blocks)
    if len(begin) == len(plan):
        return plan
    group = of_groups.searchsorted(begin, "right") - number(1)
    return _cut_at(plan, ends, group, begin, np.append(begin[1:], of_groups[-1]))


def even_parts(of_groups: Longs, blocks: float) -> Longs:
    """Returns where each part of `cut_evenly` begins. of_groups: offsets of the groups' tokens."""
    share = max(int(even_share(float(of_groups.item(-1)), blocks)), 1)
    _, begin, end = parts_of(of_groups, share)
    cuts = _late_cuts(begin, end - begin, share, int(blocks))
    return np.sort(np.append(begin, cuts)) if len(cuts) else begin


def parts_of(of_groups: Longs, length: int | Longs) -> tuple[Longs, Longs, Longs]:
    """Cuts groups every `length` tokens: returns the group of each part, its begin and its end.

    of_groups: offsets of the groups' tokens. Begins and ends count the tokens of all groups.
    """
    parts = (of_groups[1:] - of_groups[:-1] + (length - 1)) // length
    places = offsets(parts)
    _check_parts(places.item(-1), length)
    group = ramp(len(parts)).repeat(parts)
    step = ramp(len(group)) - places.take(group)
    of_part = length if isinstance(length, int) else length.take(group)
    begin = of_groups.take(group) + step * of_part
    return group, begin, np.minimum(begin + of_part, of_groups[1:].take(group))


def _late_cuts(begin: Longs, lengths: Longs, share: int, blocks: int) -> Longs:
    """Finds where to cut the parts that would end late behind others, so that they end with a share.

    Nothing is cut where parts fit in whole behind others, or where blocks take more than MOST_PARTS, as the last ones
    are then short beside the others.

    Args:
        begin: Where each part begins.
        lengths: Its tokens.
        share: Tokens of a share.
        blocks: The number of thread blocks.
    """
    if not blocks < len(lengths) <= MOST_PARTS * blocks:
        return begin[:0]
    order, limit = (-lengths).argsort(kind="stable"), share + max(int(LATE * share), LATE_TOKENS)
    falling = lengths.take(order)
    loads, place = falling[:blocks][::-1].copy(), blocks  # loads are ascending
    while place < len(order):
        behind = falling[place : place + blocks]
        if largest(behind + loads[: len(behind)]) > limit:
            break
        loads[: len(behind)] += behind
        loads.sort()
        place += blocks
    else:
        return begin[:0]
    behind, most = falling[place:], share
    ends = behind.cumsum()
    while int((rooms := np.maximum(most - loads, 0) // SPLIT_STEP * SPLIT_STEP).sum()) < ends.item(-1):
        most += SPLIT_STEP
    cuts = rooms.cumsum()
    cuts = cuts.compress((rooms > 0) & (cuts < ends.item(-1)))
    part = ends.searchsorted(cuts, "right")
    before = cuts - (ends - behind).take(part)
    kept = (before >= SPLIT_STEP) & (behind.take(part) - before >= SPLIT_STEP)
    found: Longs = (begin.take(order[place:]).take(part) + before).compress(kept)
    return found


def _check_parts(parts: int, length: int | Longs) -> None:
    """Raises StrategyError where a plan would get too many parts."""
    shortest = length if isinstance(length, int) else int(length.min(initial=INT32_MAX))
    check_made("tokens of a part", shortest, parts, "parts", StrategyError)


def cut_in_tiles(plan: Plan, most: int) -> tuple[Longs, Longs, Longs, Bools]:
    """Cuts the read tokens of each group into parts of whole tiles, one part for every `most` tokens.

    The parts are as even as whole tiles allow; the last one takes the rest, and no part has more tiles. Tiles have 64
    tokens, and pack runs of 16 tokens (treegen.target.tile_config). Parts begin with a packed run, so that together
    they take no more tiles than the group as it is. Where `most` is no multiple of 16, tokens are counted one by one.
    With `most` = 80:

        slots       0            48   64                   128         160
        segments    │ 40 tokens   │       70 tokens         │ 30 tokens │     padded to runs of 16
        parts       │ tokens 0:56     │ tokens 56:140                   │     one tile, and two tiles

    Returns:
        The group of each part, its begin and its end in the group's read tokens, and whether it is the last part.
    """
    run_tokens = RUN_TOKENS if most % RUN_TOKENS == 0 else 1
    length = (plan.stop - plan.start).astype(np.int64)
    slots, tokens = offsets(-(-length // run_tokens) * run_tokens), offsets(length)
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
        """Returns the tokens of the group before a slot of its packed runs."""
        place = first[group] + slot
        segment = np.minimum(slots.searchsorted(place, "right") - 1, plan.segment_indptr[group + 1] - 1)
        before: Longs = tokens[segment] + np.minimum(place - slots[segment], length[segment])
        return before - tokens[plan.segment_indptr[group]]

    return group, token(begin), token(end), last


def cut_context(plan: Plan, group: Longs, begin: Longs, end: Longs) -> Plan:
    """Returns a plan of new groups, with the rows of `group[i]` and its read tokens `begin[i]:end[i]`.

    Tokens are counted through the group's segments:

        segments of a group      [ node 0: 0 .. 100 ][ node 3: 0 .. 40 ]
        read tokens               0 ................ 100 ............ 140
        begin = 60, end = 120               [ node 0: 60 .. 100 ][ node 3: 0 .. 20 ]
    """
    ends = offsets(plan.stop - plan.start)
    first_of_group = ends.take(plan.segment_indptr).take(group)
    return _cut_at(plan, ends, group, first_of_group + begin, first_of_group + end)


def _cut_at(plan: Plan, ends: Longs, group: Longs, begin: Longs, end: Longs) -> Plan:
    """Returns new groups with the rows of `group[i]` and the tokens `begin[i]:end[i]` of all that the plan reads.

    ends: the `offsets` of all segments' tokens.
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
    if not len(plan.row_lo) == len(plan) == np.count_nonzero(plan.group_rows):  # some group has not one interval
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
        round=frozen(plan.round.take(group)),
        merge=plan.merge,
    )
