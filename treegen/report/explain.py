"""Explanations: a tree, the plans that strategies make of it, and their accounts, as data, text and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from treegen.cost.analytic import Times
from treegen.cost.estimate import CostModel, Estimate, assess
from treegen.ir.errors import StrategyError
from treegen.ir.json_form import FORMAT
from treegen.ir.plan import Group, Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.ir.tree import Tree
from treegen.ir.tree.tree_text import draw
from treegen.ir.verify import verify
from treegen.progress import now
from treegen.report.estimate_text import COLUMNS, account_lines, fitted, model_lines, time_lines
from treegen.report.ranking import Ranked, ranked, ranking_lines
from treegen.schedule.lower import lower
from treegen.search.size import is_too_large, most_planned
from treegen.strategies import Choice, Strategy, auto, strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import Target, target_from
from treegen.target.task_costs import source_of_costs

_MOST_PIECES = 8  # rank intervals, and segments, of a group that are listed


@dataclass(frozen=True, slots=True)
class ExplainedPlan:
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
        problem: Problem,
        model: CostModel = "analytic",
        *,
        fixed: bool = False,
    ) -> ExplainedPlan:
        """The entry of a plan that is already made and lowered. fixed: whether launches are those of a capacity."""
        return cls(strategy, reason, plan, schedule, *assess(plan, schedule, problem, model, fixed=fixed))

    @property
    def name(self) -> str:
        """The strategy's name, without its options."""
        return self.strategy.name


@dataclass(frozen=True, slots=True)
class Explanation:
    """A tree, and what strategies make of it for a shape and a target.

    automatic: what `auto` takes, and why; model: what times are estimated with; left_out: lines on the strategies
    whose plans are too large for the tree.
    """

    tree: Tree
    shape: Shape
    shape_assumed: bool
    target: Target
    entries: tuple[ExplainedPlan, ...]
    automatic: Choice
    model: CostModel = "analytic"
    left_out: tuple[str, ...] = ()

    @property
    def best(self) -> Strategy:
        """The strategy that `auto` takes."""
        return self.automatic.strategy

    @property
    def ranking(self) -> list[Ranked]:
        """The entries by rising estimated time, each with the reason for its place."""
        return ranked([(entry.strategy.summary, entry.estimate, entry.times) for entry in self.entries])

    def text(self, most_groups: int = 0, formulas: bool = False) -> str:
        """Plain, stable text of at most 80 columns; a ranking of several strategies comes first.

        most_groups: groups of every plan that are listed at most; formulas: whether those of the cost model are, and
        the values of their terms.
        """
        tree = self.tree
        assumed = " (assumed: no shape was given)" if self.shape_assumed else ""
        lines: list[str] = []
        if len(self.entries) > 1:
            lines += [*ranking_lines(self.ranking), *self._left_out_lines(), "", self._best_line(), ""]
        lines += [
            str(tree),
            f"signature {tree.signature()}",
            f"shape {self.shape}{assumed}",
            f"target {self.target.name}: {self.target.sms} SMs",
            "",
            draw(tree, width=COLUMNS),
        ]
        for entry in self.entries:
            lines += ["", *_entry_lines(entry, most_groups, formulas)]
        if formulas:
            lines += ["", *model_lines(self.target, self.model)]
        elif self.model == "profiled":
            lines += ["", f"times of work items are profiled: {source_of_costs(self.target)}"]
        if len(self.entries) == 1:
            lines += [*self._left_out_lines(), "", self._best_line()]
        return "\n".join(fitted(lines))

    def _left_out_lines(self) -> list[str]:
        return ["", *self.left_out] if self.left_out else []

    def _best_line(self) -> str:
        return f"auto takes {self.best.summary}"

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
    stands for its pick; a pick that is listed already is not repeated. Without a shape, DEFAULT_SHAPE is assumed. Of
    several strategies those are left out whose plans are too large for the tree (treegen.search.size). Raises a
    TreegenError for what is unknown or cannot be planned.
    """
    on_target, of_shape = target_from(target), shape or DEFAULT_SHAPE
    if not strategies:
        raise StrategyError("strategies", strategies, "is empty", "give at least one name")
    wanted = [strategy_from(strategy) for strategy in strategies]
    problem = Problem(tree, of_shape, on_target)
    automatic = auto().choose(problem)
    chosen = _chosen(problem, wanted, automatic)
    best = str(automatic.strategy)
    kept = [each for each in chosen if str(each.strategy) == best or not is_too_large(each.strategy, tree, of_shape)]
    sizes = [(each.strategy.summary, each.strategy.plan_size(tree, of_shape)) for each in chosen if each not in kept]
    if not kept:
        name, size = sizes[0]
        reason = f"has a plan of {size:,} segments and rows for this tree"
        raise StrategyError("strategy", name, reason, f"name one of at most {most_planned(tree):,}")
    left_out = [f"  {name}: {size:,}" for name, size in sizes]
    if left_out:
        left_out.insert(0, f"left out, as their plans have more than {most_planned(tree):,} segments and rows:")
    entries = []
    for choice, plan, schedule in _planned(kept, problem):
        now(f"accounting for {choice.strategy.name}")
        entries.append(ExplainedPlan.from_plan(choice.strategy, choice.reason, plan, schedule, problem, model))
    now("writing")
    return Explanation(tree, of_shape, shape is None, on_target, tuple(entries), automatic, model, tuple(left_out))


class Planned(NamedTuple):
    """A strategy with the reason why it was taken, its verified plan, and the schedule."""

    choice: Choice
    plan: Plan
    schedule: Schedule


def planned(problem: Problem, strategies: Sequence[str | Strategy]) -> list[Planned]:
    """What strategies make of a tree, without accounts; see `explain`."""
    if not strategies:
        raise StrategyError("strategies", strategies, "is empty", "give at least one name")
    wanted = [strategy_from(strategy) for strategy in strategies]
    return list(_planned(_chosen(problem, wanted), problem))


def _chosen(problem: Problem, strategies: Sequence[Strategy], automatic: Choice | None = None) -> list[Choice]:
    """What strategies stand for, each once; automatic: what `auto` chooses, if it is known."""
    choices: dict[str, Choice] = {}
    for strategy in strategies:
        choice = automatic if automatic and strategy.automatic else strategy.choose(problem)
        if choice.strategy is not strategy:
            choice = Choice(choice.strategy, f"chosen by {strategy.name}: {choice.reason}")
            choices[str(choice.strategy)] = choice
        choices.setdefault(str(choice.strategy), choice)
    return list(choices.values())


def _planned(choices: Sequence[Choice], problem: Problem) -> Iterator[Planned]:
    """Their plans, verified, and schedules."""
    for choice in choices:
        now(f"planning {choice.strategy.name}")
        plan = choice.strategy.plan(problem)
        now(f"verifying {choice.strategy.name}")
        verify(plan, problem.tree)
        now(f"lowering {choice.strategy.name}")
        yield Planned(choice, plan, lower(plan, problem))


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


def entry_json(entry: ExplainedPlan) -> dict[str, Any]:
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


def _entry_lines(entry: ExplainedPlan, most_groups: int, formulas: bool) -> list[str]:
    plan, schedule = entry.plan, entry.schedule
    shown = min(most_groups, len(plan))
    lines = [f"strategy {entry.strategy.summary}: {entry.reason}", f"  {len(plan)} groups, {len(plan.node)} segments"]
    lines += [f"    group {index}: {group_text(plan.groups[index])}" for index in range(shown)]
    if 0 < shown < len(plan):
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
    return [*lines, *account_lines(entry.estimate), *time_lines(entry.times, terms=formulas)]


def group_text(group: Group) -> str:
    """The group's own text, cut where it has very many rank intervals or segments."""
    rows = [f"{lo}-{hi - 1}" for lo, hi in group.rows]
    segments = str(Group(group.rows, group.segments[:_MOST_PIECES])).partition(" | ")[2]
    return f"rows {_cut(rows, ',')} | {segments}{_more(len(group.segments), ', ')}"


def _cut(pieces: Sequence[str], separator: str) -> str:
    return separator.join(pieces[:_MOST_PIECES]) + _more(len(pieces), separator)


def _more(count: int, separator: str) -> str:
    return f"{separator}... {count - _MOST_PIECES} more" if count > _MOST_PIECES else ""
