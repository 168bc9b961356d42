"""Timelines: when each thread block runs, and on which SM; predicted (treegen.cost.predicted_timeline) or measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from treegen.cost.launch_work import LaunchWork
from treegen.ir.arrays import Floats, Longs, offsets


class LaunchSpan(NamedTuple):
    """A launch on a timeline.

    Attributes:
        name: What it runs: `work items, 64x64 tiles`, or `merge`.
        start_us: Microseconds at which its first thread block starts.
        end_us: Microseconds at which its last thread block ends.
    """

    name: str
    start_us: float
    end_us: float


class BlockSpans(NamedTuple):
    """Thread blocks on a timeline, as columns. A thread block that works off a list has a span for each entry.

    Attributes:
        launch: `[blocks]`; the number of the launch.
        sm: `[blocks]`; the number of the SM.
        start_us: `[blocks]`; microseconds.
        end_us: `[blocks]`; microseconds.
        first_item: `[blocks]`; the work item, or in a merge the merged row's place in `merge_rows`. Of several items it
            is the one that starts first.
        items: `[blocks]`; the number of items: 1, except for spans that `folded` joined.
        group: `[blocks]`; the group of the first item, -1 in a merge.
        rows: `[blocks]`; query rows of the first item.
        tokens: `[blocks]`; KV tokens loaded, 0 in a merge.
        kv_bytes: `[blocks]`; bytes of KV loaded, whether or not L2 serves them.
    """

    launch: Longs
    sm: Longs
    start_us: Floats
    end_us: Floats
    first_item: Longs
    items: Longs
    group: Longs
    rows: Longs
    tokens: Longs
    kv_bytes: Longs

    def at(self, places: Longs) -> BlockSpans:
        """Picks the spans at these places, in this order."""
        return BlockSpans._make(column[places] for column in self)

    def slots(self) -> Longs:
        """Returns a slot of its SM for each span, such that spans of one slot do not overlap: the lowest that is free.

        Times within a nanosecond of each other count as equal.
        """
        found = np.zeros(len(self.sm), np.int64)
        order = np.lexsort((self.start_us, self.sm))
        last, ends = -1, [0.0]
        columns = (column[order].tolist() for column in (self.sm, self.start_us, self.end_us))
        for place, sm, start, end in zip(order.tolist(), *columns, strict=True):
            if sm != last:
                last, ends = sm, []
            slot = next((slot for slot, free in enumerate(ends) if free <= start + 1e-3), len(ends))
            ends[slot : slot + 1] = [end]
            found[place] = slot
        return found

    @classmethod
    def joined(cls, parts: list[BlockSpans]) -> BlockSpans:
        """Puts the spans of several launches one after another."""
        if not parts:
            return cls._make(np.zeros(0, np.float64 if name.endswith("_us") else np.int64) for name in cls._fields)
        return cls._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


@dataclass(frozen=True)
class Timeline:
    """The thread blocks of one call on the SMs of a device.

    Microseconds count from the start of the call; the time of starting the first launch lies before the first block.

    Args:
        sms: SMs of the device.
        slots: Thread blocks that an SM holds at a time, in the launch that holds the most.
        total_us: Microseconds from the start of the call to its end.
        launches: The launches, in order.
        blocks: The thread blocks.
    """

    sms: int
    slots: int
    total_us: float
    launches: tuple[LaunchSpan, ...]
    blocks: BlockSpans

    @cached_property
    def busy_us(self) -> Floats:
        """Microseconds in which each SM has at least one thread block, `[sms]`."""
        order = np.lexsort((self.blocks.start_us, self.blocks.sm))
        sm, start, end = (column[order] for column in self.blocks[1:4])
        if not len(sm):
            return np.zeros(self.sms)
        # The latest end so far on the same SM: SMs are set apart by more than the whole timeline.
        apart = sm * (float(end.max()) + 1.0)
        reached = np.append(-np.inf, np.maximum.accumulate(end + apart)[:-1])
        lasting = np.maximum(end + apart - np.maximum(start + apart, reached), 0.0)
        return np.bincount(sm, lasting, self.sms).astype(np.float64)

    @property
    def tail_us(self) -> float:
        """Microseconds from the time at which the first SM has run its last thread block to the end of all of them.

        An SM without any thread block has been idle since the first one started.
        """
        if not len(self.blocks.sm):
            return 0.0
        last = np.full(self.sms, self.blocks.start_us.min())
        np.maximum.at(last, self.blocks.sm, self.blocks.end_us)
        return float(last.max() - last.min())

    @property
    def imbalance(self) -> float:
        """The largest busy time of an SM over the mean of all SMs; 1 without thread blocks."""
        mean = float(self.busy_us.mean())
        return float(self.busy_us.max()) / mean if mean else 1.0

    @property
    def idle_sms(self) -> int:
        """SMs without any thread block."""
        return self.sms - int(np.count_nonzero(np.bincount(self.blocks.sm)))

    def with_fewer_launches(self, most: int) -> Timeline:
        """Joins launches that follow one another, in equal numbers, until there are at most `most`."""
        count = len(self.launches)
        if count <= most:
            return self
        each = -(-count // most)
        launches = []
        for first in range(0, count, each):
            part = self.launches[first : first + each]
            name = f"launches {first + 1} to {first + len(part)}" if len(part) > 1 else f"launch {first + 1}"
            start_us, end_us = min(span.start_us for span in part), max(span.end_us for span in part)
            launches.append(LaunchSpan(name, start_us, end_us))
        return replace(self, launches=tuple(launches), blocks=self.blocks._replace(launch=self.blocks.launch // each))

    def folded(self, most: int) -> Timeline:
        """Joins neighbours on an SM, within a launch, into one span each, until there are at most `most` of them.

        A joined span reaches from the first start to the last end and adds up items, tokens and bytes. There is at
        least one span for each SM and launch.
        """
        blocks = self.blocks
        if len(blocks.sm) <= most:
            return self
        order = np.lexsort((blocks.start_us, blocks.sm, blocks.launch))
        sorted_blocks = blocks.at(order)
        place = sorted_blocks.launch * self.sms + sorted_blocks.sm
        first = np.flatnonzero(np.diff(place, prepend=-1))
        count = np.diff(first, append=len(place))
        joined = -(-len(place) // max(most - len(first), 1))
        within = np.arange(len(place)) - first.repeat(count)
        begin = np.flatnonzero(within % joined == 0)
        added = {name: np.add.reduceat(getattr(sorted_blocks, name), begin) for name in ("items", "tokens", "kv_bytes")}
        ends = np.maximum.reduceat(sorted_blocks.end_us, begin)
        spans = sorted_blocks.at(begin)._replace(end_us=ends, **added)
        return replace(self, blocks=spans)


class Recording(NamedTuple):
    """A timeline that was measured, by kernels that record when they ran.

    Attributes:
        timeline: The thread blocks of the run with the median time.
        plain_us: Microseconds of the usual kernels: the median on a cold L2.
        recorded_us: Microseconds of those that record, measured in the same way.
        resolution_ns: Nanoseconds between two readings of the device's clock that differ.
    """

    timeline: Timeline
    plain_us: float
    recorded_us: float
    resolution_ns: float


def spans_of(work: LaunchWork, number: int, sm: Longs, start_us: Floats, end_us: Floats) -> BlockSpans:
    """Makes the spans of launch `number`, in the order of its pieces of work."""
    one = np.ones(len(sm), np.int64)
    own = work.item, one, work.group, work.rows, work.tokens, work.kv_bytes
    return BlockSpans(number * one, sm, start_us, end_us, *own)


def spans_of_launches(names: list[str], blocks: BlockSpans) -> tuple[LaunchSpan, ...]:
    """Lists the launches of these names, from the first start to the last end of each one's thread blocks.

    Every launch has at least one block, and blocks are sorted by launch.
    """
    if not names:
        return ()
    first = offsets(np.bincount(blocks.launch, minlength=len(names)))[:-1]
    starts, ends = np.minimum.reduceat(blocks.start_us, first), np.maximum.reduceat(blocks.end_us, first)
    return tuple(LaunchSpan(*each) for each in zip(names, starts.tolist(), ends.tolist(), strict=True))
