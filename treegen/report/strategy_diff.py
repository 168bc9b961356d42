"""Differences between two strategies on one tree, by group and by node, as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from treegen.cost.account import Account
from treegen.cost.figures import byte_text, count_text
from treegen.ir.arrays import Longs
from treegen.ir.json_form import FORMAT
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.ir.tree.tree_drawing import draw
from treegen.report.estimate_text import COLUMNS, fitted
from treegen.report.explain import explain
from treegen.report.explained_plan import (
    LONGEST_TEXT,
    ExplainedPlan,
    entry_json,
    group_text,
    groups_json,
    page_json,
    tree_json,
)
from treegen.report.page.group_marks import items_object
from treegen.report.page.html_page import html_page, page_title
from treegen.report.page.tree_marks import TreeMarks
from treegen.report.plan_diff import Comparison, compare
from treegen.report.plan_diff_text import reading_lines
from treegen.report.ranking import ranked
from treegen.strategies import Strategy
from treegen.target.targets import Target

DEFAULT_GROUPS = 12
"""Default of the most lines on nodes, and of the most groups of each plan, to list."""
DIFFERENCE_PANELS = ("differences", "strategies", "plan")
"""The panels of a difference's page, from the top down."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The plans of two strategies for one tree, shape and target, and their comparison."""

    tree: Tree
    shape: Shape
    shape_assumed: bool
    target: Target
    entries: tuple[ExplainedPlan, ExplainedPlan]
    comparison: Comparison

    @property
    def names(self) -> tuple[str, str]:
        """The strategies' names, with options where the names are equal."""
        one, two = self.entries
        return (one.name, two.name) if one.name != two.name else (one.strategy.summary, two.strategy.summary)

    @property
    def none(self) -> bool:
        """Whether both plans are the same: the same groups, in tiles of the same configs."""
        one, two = self.entries
        return not any(map(len, self.comparison.only)) and one.schedule.configs == two.schedule.configs

    def text(self, most_groups: int = DEFAULT_GROUPS) -> str:
        """Returns plain, stable text. most_groups: the most lines on nodes, and the most groups per plan, to list."""
        tree, compared = self.tree, self.comparison
        assumed = " (assumed: no shape was given)" if self.shape_assumed else ""
        lines = [
            str(tree),
            f"shape {self.shape}{assumed}",
            f"target {self.target.name}: {self.target.sms} SMs",
            "",
            draw(tree, width=COLUMNS),
            "",
        ]
        for entry in self.entries:
            lines += _entry_lines(entry)
        lines += ["", self._groups_text()]
        if len(compared.nodes):
            plans = self.entries[0].plan, self.entries[1].plan
            beside = int(compared.same_rows.sum())
            others = len(compared.nodes) - beside
            apart = f"{others} with other rows or in other pieces, {beside} only together with other nodes"
            lines += ["", f"nodes read differently: {len(compared.nodes)} ({apart})"]
            lines += [f"  {line}" for line in reading_lines(plans, self.names, compared, tree, most_groups)]
        for name, entry, only in zip(self.names, self.entries, compared.only, strict=True):
            if len(only):
                lines += ["", *_group_lines(name, entry, only, most_groups)]
        if not self.none:
            lines += ["", *_estimate_lines(self.names, self.entries)]
        return "\n".join(fitted(lines))

    def __str__(self) -> str:
        return self.text()

    def to_object(self, *, all_groups: bool = True) -> dict[str, Any]:
        """Returns the difference for JSON forms.

        Its field `only` has the groups that only one plan has, for each plan. `nodes` has the nodes that are read
        differently, with the positions in `only` of the groups that read them. The other fields are few enough for a
        page: `only_groups` has the numbers of such groups, `differs` the nodes that are read differently in each mark
        of the tree's drawing, and `words` describes them.

        all_groups: whether to list all groups and nodes that differ. Otherwise strategies have the groups that a page
            shows.
        """
        compared, marks = self.comparison, TreeMarks.of(self.tree)
        ranking = ranked([(entry.strategy.summary, entry.estimate, entry.times) for entry in self.entries])
        places = {each.name: each for each in ranking}
        drawn = [page_json(entry, places[entry.strategy.summary], marks) for entry in self.entries]
        listed: dict[str, Any] = {}
        strategies = []
        for entry, own in zip(self.entries, drawn, strict=True):
            shown = own["shown_groups"]
            strategies.append({**entry_json(entry, shown), **own, "items": items_object(entry.schedule, shown)})
        if all_groups:
            only = [groups_json(e.plan, only.tolist()) for e, only in zip(self.entries, compared.only, strict=True)]
            listed = {"only": only, "nodes": self._nodes_json()}
            for strategy in strategies:
                del strategy["groups"]
        plans = self.entries[0].plan, self.entries[1].plan
        return {
            "format": FORMAT,
            "tree": tree_json(self.tree, None if all_groups else LONGEST_TEXT),
            "shape": asdict(self.shape),
            "target": self.target.name,
            "strategies": strategies,
            "same_groups": len(compared.same),
            **listed,
            "only_groups": [len(only) for only in compared.only],
            "different_nodes": len(compared.nodes),
            "differs": marks.counts_of(compared.nodes),
            "words": [self._groups_text(), *reading_lines(plans, self.names, compared, self.tree, DEFAULT_GROUPS)],
            "drawing": marks.to_object(self.shape),
        }

    def to_json(self) -> str:
        """Returns a JSON object with all groups and nodes that differ (see `to_object`)."""
        return json.dumps(self.to_object(), default=str)

    def to_html(self, title: str = "") -> str:
        """Returns a page that draws both plans: one HTML file, which needs no other file and no network.

        title: The page's heading; by default the tree's text.
        """
        return html_page(page_title(title, self.tree), self.to_object(all_groups=False), DIFFERENCE_PANELS)

    def _nodes_json(self) -> list[dict[str, object]]:
        compared, depth = self.comparison, self.tree.topology.depth
        readers = [
            (readings.indptr.tolist(), only.searchsorted(readings.group).tolist())
            for readings, only in zip(compared.readings, compared.only, strict=True)
        ]
        return [
            {
                "node": node,
                "depth": int(depth[node]),
                "tokens": int(self.tree.tokens[node]),
                "same_rows": same_rows,
                "groups": [positions[indptr[i] : indptr[i + 1]] for indptr, positions in readers],
            }
            for i, (node, same_rows) in enumerate(
                zip(compared.nodes.tolist(), compared.same_rows.tolist(), strict=True)
            )
        ]

    def _groups_text(self) -> str:
        """Counts the groups that both plans have, and those that only one of them has."""
        one, two = self.names
        same, only = len(self.comparison.same), [len(groups) for groups in self.comparison.only]
        if self.none:
            return f"the plans are the same: all {same} groups are in both, with the same rows, segments and tiles"
        if not any(only):
            return f"all {same} groups are in both, with the same rows and segments; their tiles differ"
        both = f"groups in both, with the same rows and segments: {same}"
        return f"{both}; only in {one}: {only[0]}; only in {two}: {only[1]}"


def difference(
    tree: Tree,
    first: str | Strategy,
    second: str | Strategy,
    shape: Shape | None = None,
    target: str | Target | None = None,
) -> Difference:
    """Plans a tree with two strategies, verifies the plans and compares them, without torch or a GPU.

    A strategy that chooses another one, as `auto` does, is replaced by its choice.

    Args:
        tree: The tree.
        first, second: The strategies, by name or as objects.
        shape: The attention shape; by default DEFAULT_SHAPE.
        target: The target, by name or as an object; by default h200.

    Raises:
        TreegenError: A name is unknown, or a plan cannot be made.
    """
    explanation = explain(tree, (first, second), shape, target)
    if explanation.left_out:  # one of the two: alone, it raises its reason
        for strategy in (first, second):
            explain(tree, (strategy,), shape, target)
    one, two = explanation.entries[0], explanation.entries[-1]  # equal strategies share one entry
    compared = compare(one.plan, two.plan, tree)
    return Difference(tree, explanation.shape, shape is None, explanation.target, (one, two), compared)


def _entry_lines(entry: ExplainedPlan) -> Iterable[str]:
    plan, schedule = entry.plan, entry.schedule
    yield f"strategy {entry.strategy.summary}: {entry.reason}"
    yield f"  {len(plan)} groups, {len(plan.node)} segments, {len(schedule.items)} work items"
    for index, config in enumerate(schedule.configs):
        items = schedule.config_indptr[index + 1] - schedule.config_indptr[index]
        yield f"    kernel config {config}: {items} work items"


def _group_lines(name: str, entry: ExplainedPlan, only: Longs, most_groups: int) -> Iterable[str]:
    yield f"groups only in {name}: {len(only)}"
    for group in only[:most_groups].tolist():
        yield f"  group {group}: {group_text(entry.plan.groups[group])}"
    if len(only) > most_groups:
        yield f"  ... {len(only) - most_groups} more groups"


def _estimate_lines(names: tuple[str, str], entries: tuple[ExplainedPlan, ExplainedPlan]) -> Iterable[str]:
    """Yields the fields of both estimates, and the ratio of the second to the first."""
    one, two = (entry.estimate for entry in entries)
    rows = [("estimate", *names, "second/first")]
    for name in (*(field.name for field in fields(Account)), "padding_waste"):
        amounts = getattr(one, name), getattr(two, name)
        ratio = "=" if amounts[0] == amounts[1] else f"{amounts[1] / amounts[0]:.2f}" if amounts[0] else "-"
        rows.append((name, amount_text(name, amounts[0]), amount_text(name, amounts[1]), ratio))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join((row[0].ljust(widths[0]), *cells))


def amount_text(field: str, amount: float) -> str:
    """Formats an amount in the unit at the end of its field's name in Account."""
    if field.endswith("_bytes"):
        return byte_text(int(amount))
    if field.endswith("_flops"):
        return f"{count_text(int(amount))}FLOP"
    if field.endswith("_us"):
        return f"{amount:.1f} us"
    if field == "padding_waste":
        return f"{100 * amount:.1f} %"
    return str(amount) if isinstance(amount, int) else f"{amount:.2f}"
