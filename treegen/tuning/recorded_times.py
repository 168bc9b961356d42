"""From the records of kernels to a timeline: clocks are compared across SMs, and pieces of work become spans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treegen.cost.launch_work import LaunchWork
from treegen.cost.timeline import BlockSpans, Timeline, spans_of, spans_of_launches
from treegen.ir.arrays import Floats, Longs

_COLUMNS = LaunchWork._fields[2:]
FINE_NS = 100
"""The coarsest resolution of the device's clock at which it is used as it is."""


def timeline_of(records: Sequence[Longs], works: Sequence[LaunchWork], total_us: float, sms: int) -> Timeline:
    """Makes a timeline of the records of one call.

    The call's time beyond the time from the first start to the last end is put in front of the first block: launching
    the kernels, and learning that they have ended.

    Args:
        records: An array `[pieces, RECORD_FIELDS]` for each launch (treegen.backends.recorded_program).
        works: The pieces of work of each launch.
        total_us: Microseconds of the call.
        sms: SMs of the device.
    """
    starts, ends = clock_times(np.concatenate(records))
    done = ends > 0
    first = float(starts[done].min()) if done.any() else 0.0
    before = max(total_us - float(ends.max(initial=0.0) - first) / 1e3, 0.0)
    spans, place = [], 0
    for number, (record, work) in enumerate(zip(records, works, strict=True)):
        of_launch = slice(place, place + len(record))
        place += len(record)
        start, end = (before + (times[of_launch] - first) / 1e3 for times in (starts, ends))
        # The heads of a merged row may take several thread blocks.
        repeated = np.arange(len(work.item)).repeat(len(record) // len(work.item))
        of_blocks = work._replace(**{name: getattr(work, name)[repeated] for name in _COLUMNS})
        spans.append(spans_of(of_blocks, number, record[:, 0], start, end).at(np.flatnonzero(done[of_launch])))
    blocks = BlockSpans.joined(spans)
    sms = max(sms, int(blocks.sm.max(initial=-1)) + 1)
    launches = spans_of_launches([work.name for work in works], blocks)
    return Timeline(sms, _most_at_once(blocks), total_us, launches, blocks)


def resolution_ns(records: Longs) -> float:
    """Returns the least difference of two readings of the device's clock, of all that were recorded."""
    readings = np.unique(records[records[:, 3] > 0][:, [1, 3]])
    return float(np.diff(readings).min()) if len(readings) > 1 else 0.0


def clock_times(records: Longs) -> tuple[Floats, Floats]:
    """Returns the nanoseconds at which each piece of work started and ended; 0 for pieces without work.

    Times are those of the device's clock, unless it is coarser than FINE_NS. Then they are the SMs' cycles: the rate
    of all SMs is their cycles over the nanoseconds that they span. Each SM's offset is in the middle of those for
    which no reading of the device's clock, rounded down to its resolution, contradicts the cycles.
    """
    done, resolution = records[:, 3] > 0, resolution_ns(records)
    times = np.zeros((len(records), 2))
    if resolution <= FINE_NS:
        times[done] = records[done][:, [1, 3]]
        return times[:, 0], times[:, 1]
    sm = records[done][:, 0]
    # Differences from the first readings have few digits, and stay exact.
    base = records[done][:, 1].min()
    clock = (records[done][:, [1, 3]] - base).astype(np.float64)
    _, sm = np.unique(sm, return_inverse=True)
    first_cycle = np.full(sm.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first_cycle, sm, records[done][:, 2])
    cycles = (records[done][:, [2, 4]] - first_cycle[sm][:, None]).astype(np.float64)
    first, last, most = (np.full(len(first_cycle), value) for value in (np.inf, 0.0, 0.0))
    np.minimum.at(first, sm, clock[:, 0])
    np.maximum.at(last, sm, clock[:, 1])
    np.maximum.at(most, sm, cycles[:, 1])
    own = cycles * (float((last - first).sum()) / float(most.sum()))
    low, high = np.full(len(first_cycle), -np.inf), np.full(len(first_cycle), np.inf)
    np.maximum.at(low, sm, (clock - own).max(1))
    np.minimum.at(high, sm, (clock + resolution - own).min(1))
    times[done] = own + ((low + high) / 2)[sm][:, None] + base
    return times[:, 0], times[:, 1]


def _most_at_once(blocks: BlockSpans) -> int:
    """Returns the most spans that an SM has at a time."""
    if not len(blocks.sm):
        return 1
    sm = np.concatenate([blocks.sm, blocks.sm])
    time = np.concatenate([blocks.start_us, blocks.end_us])
    step = np.repeat([1, -1], len(blocks.sm))
    return int(np.cumsum(step[np.lexsort((step, time, sm))]).max())
