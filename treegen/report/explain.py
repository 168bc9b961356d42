"""Explanations: a tree, the plans that strategies make of it, and their accounts, as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from treegen.cost.account import CostModel
from treegen.cost.ranks import Division, RanksCost, cost_of_ranks
from treegen.ir.errors import PlanError, ShapeError, StrategyError
from treegen.ir.json_form import FORMAT
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.ir.tree import Tree
from treegen.ir.tree.tree_drawing import draw
from treegen.progress import now
from treegen.report.estimate_text import COLUMNS, fitted, model_lines
from treegen.report.explained_plan import LONGEST_TEXT, ExplainedPlan, entry_json, entry_lines, page_json, tree_json
from treegen.report.page.case_floor import device_object, floor_object
from treegen.report.page.group_marks import group_marks, items_object
from treegen.report.page.html_page import html_page, page_title
from treegen.report.page.search_steps import search_object
from treegen.report.page.timeline_svg import plan_svg
from treegen.report.page.tree_marks import TreeMarks
from treegen.report.ranking import Ranked, ranked, ranking_lines
from treegen.report.ranks_text import ranks_lines, ranks_object
from treegen.report.timelines import MOST_BLOCKS, Recorder
from treegen.report.verified_plans import Planned, choices_of, listed, verified
from treegen.search.size import is_too_large, most_planned
from treegen.strategies import Choice, Strategy, auto, strategy_names
from treegen.target.problem import Problem
from treegen.target.targets import Target, target_from
from treegen.target.task_costs import source_of_costs

PANELS = ("summary", "tree", "strategies", "plan", "timeline", "roofline", "search")
"""The panels of an explanation's page, from the top down."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A tree, and the plans that strategies make of it for a shape and a target.

    Args:
        tree: The tree.
        shape: The attention shape.
        shape_assumed: Whether the caller gave no shape.
        target: The target.
        entries: The plans, in the order of the strategies.
        automatic: The choice of `auto`, with its reason.
        model: The cost model that estimates times.
        left_out: Lines about strategies that were left out, each list of them below its reason.
        ranks: The cost of several ranks, if it was asked for.
    """

    tree: Tree
    shape: Shape
    shape_assumed: bool
    target: Target
    entries: tuple[ExplainedPlan, ...]
    automatic: Choice
    model: CostModel = "analytic"
    left_out: tuple[str, ...] = ()
    ranks: RanksCost | None = None

    @property
    def best(self) -> Strategy:
        """The strategy that `auto` chooses."""
        return self.automatic.strategy

    @property
    def ranking(self) -> list[Ranked]:
        """The entries in order of estimated time, each with the reason for its place."""
        return ranked([(entry.strategy.summary, entry.estimate, entry.times) for entry in self.entries])

    def text(self, most_groups: int = 0, formulas: bool = False) -> str:
        """Returns plain, stable text of at most 80 columns. Several strategies are ranked first.

        Args:
            most_groups: The most groups of every plan to list.
            formulas: Whether to print the formulas of the cost model and the values of their terms.
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
            lines += ["", *entry_lines(entry, most_groups, formulas)]
        if formulas:
            lines += ["", *model_lines(self.target, self.model)]
        elif self.model == "profiled":
            lines += ["", f"times of work items are profiled: {source_of_costs(self.target)}"]
        if len(self.entries) == 1:
            lines += [*self._left_out_lines(), "", self._best_line()]
        if self.ranks is not None:
            lines += ["", *ranks_lines(self.ranks)]
        return "\n".join(fitted(lines))

    def _left_out_lines(self) -> list[str]:
        return ["", *self.left_out] if self.left_out else []

    def _best_line(self) -> str:
        return f"auto takes {self.best.summary}"

    def __str__(self) -> str:
        return self.text()

    def to_object(self, *, all_groups: bool = True) -> dict[str, Any]:
        """Returns the explanation for JSON forms. Its fields have the names of the text.

        all_groups: whether to list all groups and work items of all plans. Otherwise they are those of `shown_groups`,
            which are few enough for a page.
        """
        problem = Problem(self.tree, self.shape, self.target)
        marks = TreeMarks.of(self.tree)
        places = {each.name: each for each in self.ranking}
        strategies, most_blocks = [], MOST_BLOCKS // max(len(self.entries), 1)
        for entry in self.entries:
            drawn = page_json(entry, places[entry.strategy.summary], marks)
            groups = None if all_groups else drawn["shown_groups"]
            items, timeline = items_object(entry.schedule, groups), entry.timeline.to_object(most_blocks)
            strategies.append({**entry_json(entry, groups), **drawn, "items": items, "timeline": timeline})
        best = [str(entry.strategy) for entry in self.entries]
        return {
            "format": FORMAT,
            "tree": tree_json(self.tree, None if all_groups else LONGEST_TEXT),
            "shape": asdict(self.shape),
            "target": self.target.name,
            "strategies": strategies,
            "best": self.best.name,
            "best_strategy": best.index(str(self.best)) if str(self.best) in best else None,
            "best_reason": self.automatic.reason,
            "left_out": list(self.left_out),
            "model": self.model,
            "shape_assumed": self.shape_assumed,
            "device": device_object(problem),
            "floor": floor_object(problem),
            "search": search_object(problem),
            "drawing": marks.to_object(self.shape),
            **({} if self.ranks is None else {"ranks": ranks_object(self.ranks)}),
        }

    def to_json(self) -> str:
        """Returns a JSON object with all groups of all plans. Its fields have the names of the text."""
        return json.dumps(self.to_object(), default=str)

    def to_html(self, title: str = "") -> str:
        """Returns a page that draws the explanation: one HTML file, which needs no other file and no network.

        title: The page's heading; by default the tree's text.
        """
        return html_page(page_title(title, self.tree), self.to_object(all_groups=False), PANELS)

    def to_svg(self) -> str:
        """Returns a drawing as SVG: the tree with the groups of the first entry in colour, and its timelines."""
        marks, entry = TreeMarks.of(self.tree).to_object(self.shape), self.entries[0]
        return plan_svg(marks, group_marks(entry.plan, self.tree), entry.timeline.to_object(MOST_BLOCKS))


def explain(
    tree: Tree,
    strategies: Sequence[str | Strategy] = ("auto",),
    shape: Shape | None = None,
    target: str | Target | None = None,
    model: CostModel = "analytic",
    recorder: Recorder | None = None,
    division: Division | None = None,
) -> Explanation:
    """Plans a tree with every strategy, verifies the plans and accounts for them, without torch or a GPU.

    A strategy that chooses another one, as `auto` does, is replaced by its choice. Each plan is listed once. Of several
    strategies, those are left out whose plans are too large for the tree (treegen.search.size), that have no kernel for
    the shape on the target, or that fail.

    Args:
        tree: The tree.
        strategies: Names of strategies, or strategies.
        shape: The attention shape; by default DEFAULT_SHAPE.
        target: The target, by name or as an object; by default h200.
        model: The cost model that estimates times: "analytic" or "profiled".
        recorder: Measures the timelines of plans; by default they are predicted alone.
        division: How attention is divided among ranks. Their cost is that of the one strategy, or of `auto`.

    Raises:
        TreegenError: A name is unknown, or a plan cannot be made.
    """
    on_target, of_shape = target_from(target), shape or DEFAULT_SHAPE
    wanted = listed(strategies)
    problem = Problem(tree, of_shape, on_target)
    automatic = auto().choose(problem)
    chosen = choices_of(problem, wanted, automatic)
    best = str(automatic.strategy)
    kept = [each for each in chosen if str(each.strategy) == best or not is_too_large(each.strategy, tree, of_shape)]
    sizes = [(each.strategy.summary, each.strategy.plan_size(tree, of_shape)) for each in chosen if each not in kept]
    if not kept:
        name, size = sizes[0]
        reason = f"has a plan of {size:,} segments and rows for this tree"
        raise StrategyError("strategy", name, reason, f"name one of at most {most_planned(tree):,}")
    left_out = [f"  {name}: {size:,}" for name, size in sizes]
    if left_out:
        left_out.insert(0, f"left out, because their plans have more than {most_planned(tree):,} segments and rows:")
    made, failed = _planned_that_fit(kept, problem, best)
    left_out += failed
    entries = []
    for choice, plan, schedule in made:
        now(f"accounting for {choice.strategy.name}")
        entry = ExplainedPlan.from_plan(choice.strategy, choice.reason, plan, schedule, problem, model)
        if recorder is not None:
            now(f"measuring {choice.strategy.name}")
            entry = entry.with_recording(recorder(plan, problem))
        entries.append(entry)
    ranks = None
    if division is not None:
        ranks = cost_of_ranks(problem, division, wanted[0] if len(wanted) == 1 else auto(), model)
    now("writing")
    told = Explanation(tree, of_shape, shape is None, on_target, tuple(entries), automatic, model, tuple(left_out))
    return replace(told, ranks=ranks)


def compared(explanation: Explanation) -> Explanation:
    """Returns an explanation whose entries are followed by those of all other strategies that fit the tree."""
    given = explanation.entries
    others = explain(explanation.tree, (*strategy_names(), "auto"), explanation.shape, explanation.target)
    known = {str(entry.strategy) for entry in given}
    further = [entry for entry in others.entries if str(entry.strategy) not in known]
    return replace(explanation, entries=(*given, *further), left_out=others.left_out)


def _planned_that_fit(choices: Sequence[Choice], problem: Problem, best: str) -> tuple[list[Planned], list[str]]:
    """Plans with all choices, and returns lines about those that fail: their names, below the reason.

    Raises TreegenError if a single choice, or the best one, fails.
    """
    made: list[Planned] = []
    unfit: list[str] = []
    failed: list[str] = []
    for choice in choices:
        try:
            made += verified([choice], problem)
        except (ShapeError, StrategyError, PlanError) as error:
            if len(choices) == 1 or str(choice.strategy) == best:
                raise
            line = f"  {choice.strategy.summary}: {error.argument} = {error.value} {error.reason}"
            (unfit if isinstance(error, ShapeError) else failed).append(line)
    if unfit:
        unfit.insert(0, f"left out, because they have no kernel for this shape on {problem.target.name}:")
    if failed:
        failed.insert(0, "left out, because they cannot plan this tree:")
    return made, [*unfit, *failed]
