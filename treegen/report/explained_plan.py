"""One strategy's plan of a tree with its account, as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from treegen.cost.account import Account, CostModel, assess
from treegen.cost.analytic import Times
from treegen.cost.predicted_timeline import predicted_timeline
from treegen.cost.timeline import Recording
from treegen.ir.groups import SEGMENT_ARRAYS, Group
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.tree import Tree
from treegen.report.estimate_text import account_lines, time_lines
from treegen.report.page.group_marks import distinct_configs, group_marks, merged_by, shown_groups
from treegen.report.page.tree_marks import TreeMarks
from treegen.report.ranking import Ranked, bound_text
from treegen.report.timelines import PlanTimeline
from treegen.schedule.passes.fuse_merge import with_fused_merge
from treegen.strategies import Strategy
from treegen.target.problem import Problem

LONGEST_TEXT = 2_000
"""The most characters of a tree's text on a page."""
_MOST_SHOWN = 8  # rank intervals, and segments, of a group to list


@dataclass(frozen=True, slots=True)
class ExplainedPlan:
    """A strategy's plan of a tree, with its schedule and estimates.

    Args:
        strategy: The strategy.
        reason: Why this strategy was chosen.
        plan: Its plan.
        schedule: The lowered plan.
        estimate: Bytes, work and time.
        times: The parts of the estimated time.
        timeline: The timeline that the cost model predicts, and the measured one if there is one.
        fixed: Whether its launches are those of a fixed capacity.
    """

    strategy: Strategy
    reason: str
    plan: Plan
    schedule: Schedule
    estimate: Account
    times: Times
    timeline: PlanTimeline
    fixed: bool = False

    @classmethod
    def from_plan(
        cls,
        strategy: Strategy,
        reason: str,
        plan: Plan,
        schedule: Schedule,
        problem: Problem,
        model: CostModel = "analytic",
        *,
        fixed: bool = False,
    ) -> ExplainedPlan:
        """Assesses a plan that is already lowered."""
        estimate, times = assess(plan, schedule, problem, model, fixed=fixed)
        counted = schedule if fixed else with_fused_merge(schedule)
        timeline = PlanTimeline(counted, predicted_timeline(counted, problem, times))
        return cls(strategy, reason, plan, schedule, estimate, times, timeline, fixed)

    def with_recording(self, recording: Recording | None) -> ExplainedPlan:
        """Returns the same with a measured timeline."""
        return replace(self, timeline=replace(self.timeline, recording=recording))

    @property
    def name(self) -> str:
        """The strategy's name, without its options."""
        return self.strategy.name


def tree_json(tree: Tree, longest_text: int | None = None) -> dict[str, object]:
    """Returns the facts of a tree for JSON forms. longest_text: the most characters of its text, else it is None."""
    text = tree.text
    return {
        "text": text if longest_text is None or len(text or "") <= longest_text else None,
        "signature": tree.signature(),
        "nodes": len(tree.nodes),
        "rows": tree.num_rows,
        "unique_tokens": tree.unique_tokens,
        "path_tokens": tree.path_tokens,
    }


def entry_json(entry: ExplainedPlan, groups: Sequence[int] | None = None) -> dict[str, Any]:
    """Returns an entry for JSON forms. groups: the groups of its plan to list; by default all."""
    return {
        "name": entry.name,
        "options": entry.strategy.options,
        "groups": groups_json(entry.plan, groups),
        "kernel_configs": [asdict(config) for config in distinct_configs(entry.schedule)],
        "estimate": {**asdict(entry.estimate), "padding_waste": entry.estimate.padding_waste},
        "reason": entry.reason,
    }


def groups_json(plan: Plan, numbers: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Returns groups of a plan for JSON forms. numbers: the groups, a few; by default all, in order."""
    rows, reads = plan.row_indptr.tolist(), plan.segment_indptr.tolist()
    if numbers is None:
        intervals, segments = _intervals_json(plan, slice(None)), _segments_json(plan, slice(None))
        parts = (
            (intervals[a:b], segments[c:d]) for (a, b), (c, d) in zip(pairwise(rows), pairwise(reads), strict=True)
        )
    else:
        bounds = ((slice(rows[g], rows[g + 1]), slice(reads[g], reads[g + 1])) for g in numbers)
        parts = ((_intervals_json(plan, own), _segments_json(plan, read)) for own, read in bounds)
    masked = np.bincount(plan.segment_group, plan.masked, len(plan)).astype(bool).tolist()
    chosen = range(len(plan)) if numbers is None else numbers
    return [
        {"rows": own, "segments": read, "mask": plan.mask if masked[group] else "none"}
        for group, (own, read) in zip(chosen, parts, strict=True)
    ]


def _intervals_json(plan: Plan, part: slice) -> list[tuple[int, int]]:
    return list(zip(plan.row_lo[part].tolist(), plan.row_hi[part].tolist(), strict=True))


def _segments_json(plan: Plan, part: slice) -> list[dict[str, Any]]:
    columns = (getattr(plan, name)[part].tolist() for name in SEGMENT_ARRAYS)
    return [
        {"node": node, "start": start, "stop": stop, "seen": [lo, hi]}
        for node, start, stop, lo, hi in zip(*columns, strict=True)
    ]


def page_json(entry: ExplainedPlan, ranked: Ranked, marks: TreeMarks) -> dict[str, Any]:
    """Returns what pages draw of an entry, for JSON forms.

    - summary: the strategy's name with its options;
    - rank, rank_reason: its place by estimated time, and why;
    - bound: what takes most of its time, in words;
    - times: the parts of the estimated time, in microseconds;
    - counts: groups, segments and items; partial items and the partial rows that they write; rows merged by launches;
    - merged_by: who merges partial rows, in words;
    - marks, reads: where groups lie on the tree's drawing, and how often its marks are read;
    - shown_groups: the numbers of the groups that a page lists, the largest first; a page's `groups` are these.
    """
    plan, schedule, times = entry.plan, entry.schedule, entry.times
    return {
        "summary": entry.strategy.summary,
        "rank": ranked.place,
        "rank_reason": ranked.reason,
        "bound": bound_text(entry.estimate, times),
        "times": {name: getattr(times, name) for name in ("launching", "items", "merges", "unfused")},
        "counts": {
            "groups": len(plan),
            "segments": len(plan.node),
            "items": len(schedule.items),
            "partial_items": int((schedule.column("partial0") >= 0).sum()),
            "partial_rows": schedule.num_partials,
            "merged_rows": len(schedule.merge_rows),
        },
        "merged_by": merged_by(schedule, fixed=entry.fixed),
        "marks": group_marks(plan, marks.tree),
        "reads": marks.reads_object(plan),
        "shown_groups": shown_groups(plan, schedule),
    }


def entry_lines(entry: ExplainedPlan, most_groups: int, formulas: bool) -> list[str]:
    """Returns an entry as lines of text; see Explanation.text for the options."""
    plan, schedule = entry.plan, entry.schedule
    shown = min(most_groups, len(plan))
    lines = [f"strategy {entry.strategy.summary}: {entry.reason}", f"  {len(plan)} groups, {len(plan.node)} segments"]
    lines += [f"    group {index}: {group_text(plan.groups[index])}" for index in range(shown)]
    if 0 < shown < len(plan):
        lines.append(f"    ... {len(plan) - shown} more groups")
    partial = int((schedule.column("partial0") >= 0).sum())
    counts = f"{len(schedule.items) - partial} final, {partial} partial"
    merges = f"{schedule.num_partials} partial rows, {len(schedule.merge_rows)} merged rows"
    lines.append(f"  {len(schedule.items)} work items ({counts}), {merges}")
    for index, config in enumerate(schedule.configs):
        items = schedule.config_indptr[index + 1] - schedule.config_indptr[index]
        lines.append(f"    kernel config {config}: {items} work items")
    if entry.estimate.launches < schedule.launches:
        lines.append("  one launch: final items wait for partial items")
    account = [*account_lines(entry.estimate), *time_lines(entry.times, terms=formulas)]
    return [*lines, *account, *entry.timeline.lines()]


def group_text(group: Group) -> str:
    """Returns the group's text, shortened where it has very many rank intervals or segments."""
    rows = [f"{lo}-{hi - 1}" for lo, hi in group.rows]
    segments = str(Group(group.rows, group.segments[:_MOST_SHOWN])).partition(" | ")[2]
    return f"rows {_cut(rows, ',')} | {segments}{_more(len(group.segments), ', ')}"


def _cut(parts: Sequence[str], separator: str) -> str:
    return separator.join(parts[:_MOST_SHOWN]) + _more(len(parts), separator)


def _more(count: int, separator: str) -> str:
    return f"{separator}... {count - _MOST_SHOWN} more" if count > _MOST_SHOWN else ""
