"""Predicted timelines: the thread blocks of a schedule on SMs, by list scheduling with the costs of the estimate.

A launch has as many slots as its thread blocks fit on all SMs. Blocks are placed in launch order, each into the slot
that is free first:

    SM 0, slot 0   [ block 0        ][ block 4 ]
    SM 1, slot 0   [ block 1   ][ block 5  ]
    SM 0, slot 1   [ block 2     ][ block 6      ]
    SM 1, slot 1   [ block 3 ]

A block takes the time that it has alone on an SM, or its share of a full SM times the blocks beside it, whichever is
longer. The times of a launch are then stretched so that it lasts as long as the estimate says: the soft maximum of the
estimate, its traffic with memory and its waiting are in this factor.

The first block starts after STARTING of the time that the estimate has for launching. The rest of this time belongs to
the first launch, whose blocks wait for code and tables to come from memory.

A launch starts when the one before has ended. Where the target allows it, the blocks of a launch that merges partials
in its items start as soon as slots are free, and wait for the launch before only where they join its partials. Such a
timeline ends before the estimate, which adds the times of launches.
"""

from __future__ import annotations

from heapq import heapreplace

import numpy as np

from treegen.cost.analytic import Times
from treegen.cost.piece_costs import CostedWork, costed_work
from treegen.cost.timeline import BlockSpans, Timeline, spans_of, spans_of_launches
from treegen.ir.arrays import Floats, Longs, offsets
from treegen.ir.schedule import Schedule
from treegen.target.problem import Problem

STARTING = 0.51
"""The part of the time for launching that passes before the first block starts.

Measured on an H200 (fp16, head dim 128, cold L2): 2.9 to 3.5 us of 6.17 in the six plans of benchmarks/timelines.py.
"""
_FEWEST_AT_ONCE = 16
"""`in_order` places blocks one by one where fewer than this number can be placed at once."""


def predicted_timeline(schedule: Schedule, problem: Problem, times: Times) -> Timeline:
    """Predicts when each thread block of a schedule runs.

    Args:
        schedule: The schedule that the account counts: with fused merges, unless its capacity is fixed.
        problem: The tree, the attention shape and the target.
        times: The parts of its estimated time (treegen.cost.account.assess).

    Returns:
        The timeline. Without launches of kernels it has no blocks, and takes the estimated time.
    """
    constants, sms = problem.target.constants, problem.target.sms
    names: list[str] = []
    spans: list[BlockSpans] = []
    slots = 1
    now = begun = STARTING * constants.launch_us
    free = np.full((1, sms), now)
    for number, costed in enumerate(costed_work(schedule, problem, times)):
        if number == 0:
            costed = costed._replace(launch_us=costed.launch_us + (1 - STARTING) * constants.launch_us)
        early = costed.starts_early and number > 0
        ready = np.maximum(_slots(free, costed.resident), begun) if early else np.full((costed.resident, sms), now)
        placed, free = _placed(costed, ready, now, number)
        begun, now = float(placed.start_us.max()), float(placed.end_us.max()) + constants.next_launch_us
        names.append(costed.work.name)
        spans.append(placed)
        slots = max(slots, costed.resident)
    blocks = BlockSpans.joined(spans)
    end = now - constants.next_launch_us if spans else times.total
    return Timeline(sms, slots, end, spans_of_launches(names, blocks), blocks)


def in_order(costs: Floats, free: Floats) -> tuple[Longs, Floats]:
    """Places blocks in order, each into the slot that is free first, and of several the one with the lowest number.

    Args:
        costs: `[blocks]`; microseconds.
        free: `[slots]`; when each slot is free.

    Returns:
        The slot and the start of each block.
    """
    slot, start = np.empty(len(costs), np.int64), np.empty(len(costs))
    order = np.lexsort((np.arange(len(free)), free))
    times, done = free[order], 0
    while done < len(costs):
        # Slots are sorted by time: the next blocks take them in turn, until one that has just ended is free earlier.
        ends = times[: len(costs) - done] + costs[done : done + len(times)]
        again = np.minimum.accumulate(ends)[:-1] <= times[1 : len(ends)]
        taken = int(again.argmax()) + 1 if again.any() else len(ends)
        if taken == len(ends) or taken >= _FEWEST_AT_ONCE:
            slot[done : done + taken], start[done : done + taken] = order[:taken], times[:taken]
            times[:taken] = ends[:taken]
        else:
            taken = len(ends)
            heap = list(zip(times.tolist(), order.tolist(), strict=True))
            placed = []
            for cost in costs[done : done + taken].tolist():
                placed.append(heap[0])
                heapreplace(heap, (heap[0][0] + cost, heap[0][1]))
            start[done : done + taken], slot[done : done + taken] = zip(*placed, strict=True)
            times, order = np.array([time for time, _ in heap]), np.array([number for _, number in heap])
        rank = np.lexsort((order, times))
        times, order, done = times[rank], order[rank], done + taken
    return slot, start


def _placed(costed: CostedWork, ready: Floats, now: float, number: int) -> tuple[BlockSpans, Floats]:
    """Places a launch on slots that are `ready` `[resident, sms]`, and returns its spans, and when slots are free.

    now: when the launch before has ended, and its results are there.
    """
    work, sms = costed.work, ready.shape[1]
    blocks = int(work.block[-1]) + 1
    # Blocks beside each other on an SM: where not all slots are taken, block b is on SM b % sms.
    beside = np.clip(-(-(blocks - np.arange(blocks) % sms) // sms), 1, costed.resident)[work.block]
    own = np.maximum(costed.lone_us, beside * costed.full_us)
    whole, indptr = own + costed.join_us, offsets(np.bincount(work.block))
    cost = np.add.reduceat(whole, indptr[:-1])
    slot, start = in_order(cost, np.zeros(ready.size))
    stretch = costed.launch_us / float((start + cost).max())
    if bool((ready == ready.flat[0]).all()):
        start = float(ready.flat[0]) + start * stretch
    else:
        slot, start = in_order(cost * stretch, ready.ravel())
    before = np.append(0.0, np.cumsum(whole))
    begin = start[work.block] + stretch * (before[:-1] - before[indptr[:-1]][work.block])
    end, joining = begin + stretch * own, stretch * costed.join_us
    end = np.where(joining > 0, np.maximum(end, now) + joining, end)
    free, on_slot = ready.ravel().copy(), slot[work.block]
    np.maximum.at(free, on_slot, end)
    return spans_of(work, number, on_slot % sms, begin, end), free.reshape(ready.shape)


def _slots(free: Floats, resident: int) -> Floats:
    """Returns when the slots of a launch with `resident` blocks an SM are free, of those of the launch before.

    A slot is free when the part of the SM that it takes is.
    """
    have = len(free)
    taken = -(-np.arange(1, resident + 1) * have // resident)
    picked: Floats = np.sort(free, axis=0)[taken - 1]
    return picked
