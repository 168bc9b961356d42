"""Pages of trees that are hard to draw: tiny nodes, nodes without tokens, long chains, and strategies that fail."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from support.browsers import Visits
from treegen import Tree, strategies
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.report.chrome_trace import MOST_LAUNCHES_TRACED, chrome_trace
from treegen.report.explain import explain
from treegen.report.page.group_marks import COLOURS
from treegen.report.timelines import MOST_LAUNCHES
from treegen.strategies import Strategy
from treegen.target.problem import Problem

DRAFTS = Tree.from_token_tree([(0,), (0, 0), (0, 1), (0, 0, 0), (1,)], 4096)


def chain(nodes: int) -> Tree:
    """A chain of nodes with rows at the end, in the middle, and near the root."""
    rows = [(nodes - 1, 3), (nodes // 2, 1), (10, 0)]
    return Tree.from_parents(list(range(-1, nodes - 1)), [3] * nodes, rows=rows)


def point(tab: Any, x: float, y: float) -> str:
    """Points at a place of the tree's canvas, and returns the tip in one line."""
    tab.locator("#tree canvas").scroll_into_view_if_needed()
    tab.hover("#tree canvas", position={"x": x, "y": y})
    return " ".join(tab.inner_text("#tip:not([hidden])").split())


def test_even_widths_show_nodes_of_few_tokens(visit: Visits) -> None:
    tab = visit(explain(DRAFTS, ["query"]).to_html())
    said = "6 nodes are smaller than a pixel here: enlarge a node, or choose even widths."
    assert tab.inner_text("#tree .unseen") == said
    assert point(tab, 900, 60).startswith("node 0 ")
    tab.select_option("#tree .widths", "even")
    assert tab.locator("#tree .unseen").is_hidden()
    assert point(tab, 700, 75).startswith("node 2 tokens 1 rows 4: 1 to 4 ")
    assert point(tab, 200, 75).startswith("node 0 tokens 4,096 ")


def test_a_pixel_says_how_many_nodes_it_holds(visit: Visits) -> None:
    tab = visit(explain(chain(4000), ["query"]).to_html())
    assert tab.inner_text("#tree .unseen").startswith("4,000 nodes are smaller than a pixel here")
    told = point(tab, 700, 130)
    assert told.endswith(("in this pixel 4 nodes", "in this pixel 5 nodes"))
    assert "read once, by 1 group: g2 " in told


def test_groups_that_read_a_node_are_named(visit: Visits) -> None:
    tab = visit(explain(Tree.from_levels([1, 16], [100, 10]), ["query"]).to_html())
    assert "read 16.00 times, by 16 groups: g0, g1, g2, g3, g4, g5 and 10 more" in point(tab, 300, 200)


def test_numbers_of_rows_have_room(visit: Visits) -> None:
    tab = visit(explain(DRAFTS, ["query"]).to_html())
    context = "document.createElement('canvas').getContext('2d')"
    widths = f"[rowMargin({context}, 9), rowMargin({context}, 1e9), {context}.measureText('1,000,000,000').width]"
    few, many, text = tab.evaluate(widths)
    assert few < text < many


def test_nodes_without_boxes_are_counted(visit: Visits) -> None:
    tree = Tree.from_parents([-1, 0, 0, 1, 1, 2], [0, 5, 0, 0, 9, 0])
    tab = visit(explain(tree, ["query"]).to_html())
    assert "4 nodes have no token that a row sees, and so no box." in tab.inner_text("#tree")


def test_marks_of_one_group_have_its_colour() -> None:
    plan = explain(chain(12_000), ["cohort"])
    marks = plan.to_object(all_groups=False)["strategies"][0]["marks"]
    assert len(marks["group"]) < len(plan.entries[0].plan.node)
    assert set(marks["count"]) == {1}
    assert max(marks["colour"]) < COLOURS


def test_many_launches_share_entries() -> None:
    told = explain(chain(600), ["cascade"])
    timeline = told.entries[0].timeline.predicted
    assert len(timeline.launches) > MOST_LAUNCHES_TRACED
    (strategy,) = told.to_object()["strategies"]
    drawn, classes = strategy["timeline"]["predicted"], strategy["timeline"]["classes"]
    assert len(drawn["launches"]) <= MOST_LAUNCHES
    assert drawn["launches"][0]["name"].startswith("launches 1 to ")
    assert drawn["launches"][0]["start_us"] == pytest.approx(timeline.launches[0].start_us, abs=1e-3)
    assert drawn["launches"][-1]["end_us"] == pytest.approx(timeline.launches[-1].end_us, abs=1e-3)
    assert max(drawn["blocks"]["launch"]) == len(drawn["launches"]) - 1
    assert sum(each["items"] for each in classes) == sum(drawn["blocks"]["items"]) == drawn["all_blocks"]
    assert len({each["name"] for each in classes}) == len(classes) < MOST_LAUNCHES
    assert len(strategy["kernel_configs"]) == len(set(told.entries[0].schedule.configs)) < MOST_LAUNCHES
    events = json.loads(chrome_trace(told.entries))["traceEvents"]
    assert len({event["pid"] for event in events}) <= MOST_LAUNCHES_TRACED


def test_legends_of_drawings_end_where_there_is_no_room() -> None:
    drawing = explain(Tree.parse("1,2,4,8,16/100,100,100,100,100"), ["cascade"]).to_svg()
    assert "more launches</text>" in drawing
    assert "more launches" not in explain(Tree.parse("1,2/100,100"), ["deft-node"]).to_svg()


def test_drawings_give_drafts_even_widths() -> None:
    drawing = ElementTree.fromstring(DRAFTS._repr_html_().partition("</div>")[2])
    texts = [each.text for each in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:5] == ["0", "4,096", "4,097", "4,098", "4,099"]
    assert "rows downward, tokens to the right, in even widths" in texts
    assert {f"n{node}, 1 token" for node in range(1, 7)} < set(texts)
    assert "even widths" not in Tree.from_levels([1, 8], [100, 50])._repr_html_()


class Refusing(Strategy):
    """Refuses every tree."""

    name = "refusing"

    def plan(self, problem: Problem, on_pass: object = None) -> Plan:
        raise StrategyError("tree", str(problem.tree), "is refused", "give another one")


class Lossy(Strategy):
    """Forgets all groups but the first."""

    name = "lossy"

    def plan(self, problem: Problem, on_pass: object = None) -> Plan:
        return Plan.from_groups("lossy", strategies.query().plan(problem).groups[:1])


def test_strategies_that_fail_are_left_out_with_the_reason(visit: Visits) -> None:
    told = explain(Tree.parse("100(10*4)"), [Refusing(), Lossy(), "query"])
    assert [entry.name for entry in told.entries] == ["query"]
    assert told.left_out[0] == "left out, because they cannot plan this tree:"
    assert "  refusing: tree = " in told.text()
    shown = visit(told.to_html()).inner_text("#summary")
    assert "Left out, because they cannot plan this tree: refusing (tree = " in shown
    assert "is refused), lossy (" in shown


def test_a_strategy_alone_raises_its_error() -> None:
    with pytest.raises(StrategyError, match="is refused"):
        explain(Tree.parse("100(10*4)"), [Refusing()])
