"""Timelines of plans for people and programs: lines of text, JSON, and the model's error by class of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from treegen.cost.figures import time_text
from treegen.cost.timeline import Recording, Timeline
from treegen.ir.arrays import Longs
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.target.problem import Problem

MOST_BLOCKS = 20_000
"""The most thread blocks of a timeline in JSON, unless its launches and SMs are more."""
MOST_LAUNCHES = 24
"""The most launches of a timeline in JSON. In longer timelines, launches that follow one another share an entry."""
_MOST_CLASSES = 6
"""The most classes of a launch that differ by exact numbers of tiles."""

Recorder: TypeAlias = Callable[[Plan, Problem], Recording | None]
"""Measures the timeline of a plan (treegen.tuning.measured_timeline.record)."""


class WorkClass(NamedTuple):
    """Pieces of work that are alike: of one launch, and with as many tiles, or partials in a merge.

    In timelines of more than MOST_LAUNCHES launches, all launches of one name count as one.

    Attributes:
        name: The launch and the numbers: `work items, 64x64 tiles: 12 full + 1 packed`.
        items: The number of pieces.
        predicted_us: Mean microseconds of a thread block on the predicted timeline.
        measured_us: The same on the measured one; None without one.
        merges: Whether the launch merges partials.
    """

    name: str
    items: int
    predicted_us: float
    measured_us: float | None
    merges: bool

    @property
    def error(self) -> float | None:
        """The predicted time over the measured one, less 1; None for merges, whose rows may take several blocks."""
        return self.predicted_us / self.measured_us - 1 if self.measured_us and not self.merges else None


@dataclass(frozen=True)
class PlanTimeline:
    """The timelines of a plan.

    Args:
        schedule: The schedule that the account counts.
        predicted: The timeline that the cost model predicts.
        recording: The measured timeline; None where nothing was measured.
    """

    schedule: Schedule
    predicted: Timeline
    recording: Recording | None = None

    @cached_property
    def classes(self) -> tuple[WorkClass, ...]:
        """Classes of work with their predicted and measured times, in launch order."""
        return tuple(_classes(self.schedule, self.predicted, self.recording and self.recording.timeline))

    def lines(self) -> Iterator[str]:
        """Yields a line on the predicted timeline, and with a recording what was measured, also by class."""
        if not len(self.predicted.blocks.sm):
            return
        yield f"  timeline: {timeline_text(self.predicted)}"
        if self.recording is None:
            return
        plain, recorded = self.recording.plain_us, self.recording.recorded_us
        yield f"    measured: {timeline_text(self.recording.timeline)}"
        yield (
            f"    kernels that record take {time_text(recorded)}, the usual ones {time_text(plain)} "
            f"({100 * (recorded / plain - 1):+.1f} %)"
        )
        for each in self.classes:
            if each.measured_us is not None:
                error = "" if each.error is None else f" ({100 * each.error:+.0f} %)"
                times = f"predicted {time_text(each.predicted_us)}, measured {time_text(each.measured_us)}{error}"
                yield f"    {each.name}: {each.items} blocks, {times}"

    def to_object(self, most_blocks: int = MOST_BLOCKS) -> dict[str, Any]:
        """Returns the timelines and classes for JSON forms. most_blocks: the most blocks of each timeline."""
        recording = self.recording
        return {
            "predicted": _timeline_object(self.predicted, most_blocks),
            "measured": recording
            and {
                **_timeline_object(recording.timeline, most_blocks),
                "plain_us": _rounded(recording.plain_us),
                "recorded_us": _rounded(recording.recorded_us),
                "resolution_ns": recording.resolution_ns,
            },
            "classes": [
                {
                    "name": each.name,
                    "items": each.items,
                    "predicted_us": _rounded(each.predicted_us),
                    "measured_us": each.measured_us and _rounded(each.measured_us),
                    "error": each.error,
                }
                for each in self.classes
            ],
        }


def timeline_text(timeline: Timeline) -> str:
    """Describes a timeline in words: its end, its tail, and how evenly SMs are used."""
    idle = f", {timeline.idle_sms} of {timeline.sms} SMs without work" if timeline.idle_sms else ""
    return (
        f"ends at {time_text(timeline.total_us)}; tail {time_text(timeline.tail_us)} from the first idle SM to the "
        f"end; the busiest SM works {timeline.imbalance:.2f} times the mean{idle}"
    )


def _timeline_object(timeline: Timeline, most_blocks: int) -> dict[str, Any]:
    """Returns a timeline for JSON forms. Times are in microseconds, rounded to nanoseconds."""
    folded = timeline.with_fewer_launches(MOST_LAUNCHES).folded(most_blocks)
    columns, slots = folded.blocks._asdict(), folded.blocks.slots()
    return {
        "sms": timeline.sms,
        "slots": timeline.slots,
        "total_us": _rounded(timeline.total_us),
        "tail_us": _rounded(timeline.tail_us),
        "imbalance": timeline.imbalance,
        "idle_sms": timeline.idle_sms,
        "all_blocks": len(timeline.blocks.sm),
        "launches": [
            {"name": each.name, "start_us": _rounded(each.start_us), "end_us": _rounded(each.end_us)}
            for each in folded.launches
        ],
        "blocks": {**{name: column.round(3).tolist() for name, column in columns.items()}, "slot": slots.tolist()},
    }


def _rounded(microseconds: float) -> float:
    return round(microseconds, 3)


def _classes(schedule: Schedule, predicted: Timeline, measured: Timeline | None) -> Iterator[WorkClass]:
    """Yields the classes of all launches."""
    names, alike = _alike(predicted)
    for number, launch in enumerate(names):
        of_launch = alike[predicted.blocks.launch] == number
        items = predicted.blocks.first_item[of_launch]
        lasting = (predicted.blocks.end_us - predicted.blocks.start_us)[of_launch]
        counts = _counts(schedule, merges=launch == "merge")
        kind_of_item = np.full(len(counts), -1)
        kind_of_item[items] = 0
        own_items = np.flatnonzero(kind_of_item == 0)  # each once: its blocks are many
        kind_of_item[own_items], kinds = _kinds(counts[own_items], "partials" if launch == "merge" else "")
        kind = kind_of_item[items]
        sizes, sums = np.bincount(kind), np.bincount(kind, lasting)
        found = None
        if measured is not None and len(measured.launches) == len(alike):
            of_measured = alike[measured.blocks.launch] == number
            found = kind_of_item[measured.blocks.first_item[of_measured]]
            took = (measured.blocks.end_us - measured.blocks.start_us)[of_measured]
        for index, name in enumerate(kinds):
            own = None if found is None or not (found == index).any() else float(took[found == index].mean())
            mean = float(sums[index] / sizes[index])
            yield WorkClass(f"{launch}: {name}", int(sizes[index]), mean, own, launch == "merge")


def _alike(timeline: Timeline) -> tuple[list[str], Longs]:
    """Returns the names of launches whose work is compared, and the place of each launch among them."""
    names = [launch.name for launch in timeline.launches]
    if len(names) <= MOST_LAUNCHES:
        return names, np.arange(len(names))
    once = list(dict.fromkeys(names))
    places = {name: place for place, name in enumerate(once)}
    return once, np.array([places[name] for name in names])


def _counts(schedule: Schedule, *, merges: bool) -> Longs:
    """Returns full and packed tiles of each item, or the partials of each merged row and 0."""
    if merges:
        partials = np.diff(schedule.merge_indptr).astype(np.int64)
        return np.stack([partials, 0 * partials], axis=1)
    return np.stack([schedule.column("tiles"), schedule.column("packed_tiles")], axis=1).astype(np.int64)


def _kinds(counts: Longs, unit: str) -> tuple[Longs, list[str]]:
    """Returns the kind of each piece of work, and the kinds' names."""
    radix = int(counts[:, 1].max()) + 1
    pairs, kind = np.unique(counts[:, 0] * radix + counts[:, 1], return_inverse=True)
    if len(pairs) <= _MOST_CLASSES:
        split = (divmod(pair, radix) for pair in pairs.tolist())
        tiles = [f"{full} {unit}" if unit else f"{full} full + {packed} packed tiles" for full, packed in split]
        return kind.reshape(-1), tiles
    powers = np.floor(np.log2(np.maximum(counts.sum(1), 1))).astype(np.int64)
    found, kind = np.unique(powers, return_inverse=True)
    return kind.reshape(-1), [f"{1 << power} to {(2 << power) - 1} {unit or 'tiles'}" for power in found.tolist()]
