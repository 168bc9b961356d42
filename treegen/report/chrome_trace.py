"""Timelines in the trace event format, for chrome://tracing, Perfetto and other trace viewers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from treegen.cost.timeline import Timeline
from treegen.report.explained_plan import ExplainedPlan

MOST_BLOCKS_TRACED = 200_000
"""The most thread blocks of a timeline in a trace."""
MOST_LAUNCHES_TRACED = 500
"""The most launches of a timeline in a trace. In longer timelines, launches that follow one another share a process."""


def chrome_trace(entries: Sequence[ExplainedPlan]) -> str:
    """Returns the timelines of plans as a JSON object of the trace event format.

    Every launch is a process, and every slot of an SM is a thread of it. Times are in microseconds.
    """
    events: list[dict[str, Any]] = []
    for entry in entries:
        recording = entry.timeline.recording
        for kind, timeline in (("predicted", entry.timeline.predicted), ("measured", recording and recording.timeline)):
            if timeline is not None:
                processes = sum(event["name"] == "process_name" for event in events)
                events += _events(timeline, f"{entry.strategy.name}, {kind}", processes)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def _events(timeline: Timeline, title: str, first: int) -> Iterator[dict[str, Any]]:
    """Yields the events of a timeline, whose launches are the processes from number `first` on."""
    timeline = timeline.with_fewer_launches(MOST_LAUNCHES_TRACED).folded(MOST_BLOCKS_TRACED)
    blocks = timeline.blocks
    slots = blocks.slots()
    lanes = int(slots.max(initial=0)) + 1
    for number, launch in enumerate(timeline.launches):
        name = f"{title}: {launch.name}"
        yield {"ph": "M", "pid": first + number, "name": "process_name", "args": {"name": name}}
        used = blocks.launch == number
        for thread in sorted(set((blocks.sm * lanes + slots)[used].tolist())):
            text = f"SM {thread // lanes}, slot {thread % lanes}"
            yield {"ph": "M", "pid": first + number, "tid": thread, "name": "thread_name", "args": {"name": text}}
    columns = [column.tolist() for column in blocks]
    for launch, sm, start, end, item, items, group, rows, tokens, kv_bytes, slot in zip(
        *columns, slots.tolist(), strict=True
    ):
        what = "row" if group < 0 else "item"
        yield {
            "ph": "X",
            "pid": first + launch,
            "tid": sm * lanes + slot,
            "name": f"{what} {item}" + (f" and {items - 1} more" if items > 1 else ""),
            "ts": round(start, 3),
            "dur": round(end - start, 3),
            "args": {"group": group, "rows": rows, "tokens": tokens, "kv_bytes": kv_bytes},
        }
