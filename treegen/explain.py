"""Explanations: a tree, the plans that strategies make of it, and their accounts, as data, text and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from treegen.accounts import account_lines, model_lines, time_lines
from treegen.cost import Times
from treegen.estimate import CostModel, Estimate, assess
from treegen.ir.errors import StrategyError
from treegen.ir.json_form import FORMAT
from treegen.ir.plan import Group, Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.ir.tree import Tree
from treegen.ir.tree_text import draw
from treegen.ir.verify import verify
from treegen.lower import lower
from treegen.ranking import Ranked, ranked, ranking_lines
from treegen.strategies import Choice, Strategy, auto, strategy_from
from treegen.targets import Target, target_from

DEFAULT_GROUPS = 12
_MOST_PIECES = 8  # rank intervals, and segments, of a group that are listed


@dataclass(frozen=True, slots=True)
class Entry:
    """What one strategy makes of a tree; `reason` says why this strategy was taken."""

    strategy: Strategy
    reason: str
    plan: Plan
    schedule: Schedule
    estimate: Estimate
    times: Times

    @classmethod
    def from_plan(
        cls,
        strategy: Strategy,
        reason: str,
        plan: Plan,
        schedule: Schedule,
        tree: Tree,
        shape: Shape,
        target: Target,
        model: CostModel = "analytic",
        *,
        fixed: bool = False,
    ) -> Entry:
        """The entry of a plan that is already made and lowered. fixed: whether launches are those of a capacity."""
        return cls(strategy, reason, plan, schedule, *assess(plan, schedule, tree, shape, target, model, fixed=fixed))

    @property
    def name(self) -> str:
        """The strategy's name, without its options."""
        return self.strategy.name


@dataclass(frozen=True, slots=True)
class Explanation:
    """A tree, and what strategies make of it for a shape and a target.

    best: the strategy that `auto` takes; model: what times are estimated with.
    """

    tree: Tree
    shape: Shape
    shape_assumed: bool
    target: Target
    entries: tuple[Entry, ...]
    best: Strategy
    model: CostModel = "analytic"

    @property
    def ranking(self) -> list[Ranked]:
        """The entries by rising estimated time, each with the reason for its place."""
        return ranked([(str(entry.strategy), entry.estimate, entry.times) for entry in self.entries])

    def text(self, most_groups: int = DEFAULT_GROUPS) -> str:
        """Plain, stable text; of every plan at most `most_groups` groups are listed."""
        tree, pages = self.tree, f", page_size {self.shape.page_size}" if self.shape.page_size > 1 else ""
        assumed = " (assumed: no shape was given)" if self.shape_assumed else ""
        lines = [
            str(tree),
            f"signature {tree.signature()}",
            f"shape {self.shape}{pages}{assumed}",
            f"target {self.target.name}: {self.target.sms} SMs",
            "",
            draw(tree),
        ]
        for entry in self.entries:
            lines += ["", *_entry_lines(entry, most_groups)]
        lines += ["", *model_lines(self.target, self.model)]
        if len(self.entries) > 1:
            lines += ["", *ranking_lines(self.ranking)]
        lines += ["", f"auto takes {self.best}"]
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.text()

    def to_json(self) -> str:
        """One JSON object with all groups of all plans; its parts are named as in the text."""
        return json.dumps(
            {
                "format": FORMAT,
                "tree": tree_json(self.tree),
                "shape": asdict(self.shape),
                "target": self.target.name,
                "strategies": [entry_json(entry) for entry in self.entries],
                "best": self.best.name,
            },
            default=str,
        )


def explain(
    tree: Tree,
    strategies: Sequence[str | Strategy] = ("auto",),
    shape: Shape | None = None,
    target: str | Target | None = None,
    model: CostModel = "analytic",
) -> Explanation:
    """Plans a tree with every strategy and verifies the plans; needs neither torch nor a GPU.

    model: what times are estimated with, "analytic" or "profiled". A strategy that picks another, as `auto` does,
    stands for its pick; a pick that is listed already is not repeated. Without a shape, DEFAULT_SHAPE is assumed.
    Raises a TreegenError for what is unknown or cannot be planned.
    """
    on_target, of_shape = target_from(target), shape or DEFAULT_SHAPE
    entries = []
    for choice, plan, schedule in planned(tree, strategies, of_shape, on_target):
        parts = (plan, schedule, tree, of_shape, on_target, model)
        entries.append(Entry.from_plan(choice.strategy, choice.reason, *parts))
    best = auto().choose(tree, of_shape, on_target).strategy
    return Explanation(tree, of_shape, shape is None, on_target, tuple(entries), best, model)


class Planned(NamedTuple):
    """A strategy with the reason why it was taken, its verified plan, and the schedule."""

    choice: Choice
    plan: Plan
    schedule: Schedule


def planned(tree: Tree, strategies: Sequence[str | Strategy], shape: Shape, target: Target) -> list[Planned]:
    """What strategies make of a tree, without accounts; see `explain`."""
    if not strategies:
        raise StrategyError("strategies", strategies, "is empty", "give at least one name")
    choices: dict[str, Choice] = {}
    for strategy in map(strategy_from, strategies):
        choice = strategy.choose(tree, shape, target)
        if choice.strategy is not strategy:
            choice = Choice(choice.strategy, f"chosen by {strategy.name}: {choice.reason}")
            choices[str(choice.strategy)] = choice
        choices.setdefault(str(choice.strategy), choice)
    made = []
    for choice in choices.values():
        plan = choice.strategy.plan(tree, shape, target)
        verify(plan, tree)
        made.append(Planned(choice, plan, lower(plan, tree, shape, target)))
    return made


def tree_json(tree: Tree) -> dict[str, object]:
    """The facts of a tree in JSON forms."""
    return {
        "text": tree.text,
        "signature": tree.signature(),
        "nodes": len(tree.nodes),
        "rows": tree.num_rows,
        "unique_tokens": tree.unique_tokens,
        "path_tokens": tree.path_tokens,
    }


def entry_json(entry: Entry) -> dict[str, Any]:
    """An entry in JSON forms, with all groups of its plan."""
    plan = entry.plan
    intervals = list(zip(plan.row_lo.tolist(), plan.row_hi.tolist(), strict=True))
    columns = (column.tolist() for column in (plan.node, plan.start, plan.stop, plan.seen_lo, plan.seen_hi))
    segments = [
        {"node": node, "start": start, "stop": stop, "seen": [lo, hi]}
        for node, start, stop, lo, hi in zip(*columns, strict=True)
    ]
    masked = plan.masked.tolist()
    rows, pieces = plan.row_indptr.tolist(), plan.segment_indptr.tolist()
    groups = [
        {
            "rows": intervals[rows[g] : rows[g + 1]],
            "segments": segments[pieces[g] : pieces[g + 1]],
            "mask": plan.mask if any(masked[pieces[g] : pieces[g + 1]]) else "none",
        }
        for g in range(len(plan))
    ]
    return {
        "name": entry.name,
        "options": entry.strategy.options,
        "groups": groups,
        "tile_classes": [asdict(tile) for tile in entry.schedule.classes],
        "estimate": {**asdict(entry.estimate), "padding_waste": entry.estimate.padding_waste},
        "reason": entry.reason,
    }


def _entry_lines(entry: Entry, most_groups: int) -> list[str]:
    plan, schedule = entry.plan, entry.schedule
    shown = min(most_groups, len(plan))
    lines = [f"strategy {entry.strategy}: {entry.reason}", f"  {len(plan)} groups, {len(plan.node)} segments"]
    lines += [f"    group {index}: {group_text(plan.groups[index])}" for index in range(shown)]
    if shown < len(plan):
        lines.append(f"    ... {len(plan) - shown} more groups")
    partial = int((schedule.column("slot0") >= 0).sum())
    counts = f"{len(schedule.items) - partial} final, {partial} partial"
    merges = f"{schedule.num_slots} partial rows, {len(schedule.merge_rows)} merged rows"
    lines.append(f"  {len(schedule.items)} work items ({counts}), {merges}")
    for index, tile in enumerate(schedule.classes):
        items = schedule.class_indptr[index + 1] - schedule.class_indptr[index]
        lines.append(f"    tile class {tile}: {items} work items")
    if entry.estimate.launches < schedule.launches:
        lines.append("  made in one launch, whose final items wait for the partial ones")
    return [*lines, *account_lines(entry.estimate), *time_lines(entry.times)]


def group_text(group: Group) -> str:
    """The group's own text, cut where it has very many rank intervals or segments."""
    rows = [f"{lo}-{hi - 1}" for lo, hi in group.rows]
    segments = str(Group(group.rows, group.segments[:_MOST_PIECES])).partition(" | ")[2]
    return f"rows {_cut(rows, ',')} | {segments}{_more(len(group.segments), ', ')}"


def _cut(pieces: Sequence[str], separator: str) -> str:
    return separator.join(pieces[:_MOST_PIECES]) + _more(len(pieces), separator)


def _more(count: int, separator: str) -> str:
    return f"{separator}... {count - _MOST_PIECES} more" if count > _MOST_PIECES else ""
