"""The page of `treegen explain`: its numbers are those of the JSON, and its panels answer to pointer and keys."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

import treegen
from support.browsers import Visits
from support.toy import TOY
from treegen import Shape, Tree, cli
from treegen.cost.figures import byte_text, time_text
from treegen.ir.plan import Plan
from treegen.report.explain import PANELS, Explanation, compared, explain
from treegen.report.page.group_marks import MOST_GROUP_MARKS, MOST_SHOWN
from treegen.report.page.tree_svg import DARK, LIGHT
from treegen.report.strategy_diff import difference
from treegen.strategies import Strategy, strategy_names
from treegen.target.problem import Problem
from treegen.target.targets import target_from
from treegen.workloads.generate import few_shot, reasoning, speculative

ALL = (*strategy_names(), "auto")
TREES = {
    "levels": Tree.from_levels([1, 4, 16, 64], [1024, 256, 128, 32]),
    "few-shot": few_shot(),
    "reasoning": reasoning(),
    "speculative": speculative(),
    "rows-inside": Tree.from_parents([-1, 0, -1], [9, 0, 40], rows=[(0, 3), (0, 9), (1, 0), (2, 40), (2, 0)]),
    "nobody": Tree.from_parents([-1], [5], rows=[]),
}


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return explain(TREES["levels"], ALL, Shape(32, 8, 128))


@pytest.fixture
def tab(visit: Visits, explanation: Explanation) -> Any:
    return visit(explanation.to_html("a tree"), color_scheme="light")


def data_of(page: str) -> dict[str, Any]:
    """The block of data of a page."""
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert block
    return dict(json.loads(block[1]))


@pytest.mark.parametrize("name", TREES)
def test_the_data_of_a_page_are_those_of_the_json(name: str) -> None:
    explanation = explain(TREES[name], ALL, target=TOY)
    drawn, whole = data_of(explanation.to_html()), json.loads(explanation.to_json())
    for strategy, listed in zip(drawn["strategies"], whole["strategies"], strict=True):
        shown = strategy["shown_groups"]
        assert strategy.pop("groups") == [listed["groups"][group] for group in shown]
        kept = [group in shown for group in listed["items"]["group"]]
        for field, column in listed["items"].items():
            assert strategy["items"][field] == [value for value, keep in zip(column, kept, strict=True) if keep]
        for each in (strategy, listed):
            each.pop("items")
        listed.pop("groups")
    assert drawn == whole


@pytest.mark.parametrize("name", TREES)
def test_groups_cover_the_drawing_once(name: str) -> None:
    tree = TREES[name]
    for strategy in explain(tree, ALL, target=TOY).to_object()["strategies"]:
        marks = strategy["marks"]
        columns = (marks[field] for field in ("start", "stop", "lo", "hi"))
        covered = sum((stop - start) * (hi - lo) for start, stop, lo, hi in zip(*columns, strict=True))
        assert covered == tree.path_tokens, strategy["name"]
        assert all(0 <= colour < len(LIGHT) for colour in marks["colour"])


@pytest.mark.parametrize("name", TREES)
def test_reads_are_counted_as_the_account_counts_them(name: str) -> None:
    tree = TREES[name]
    explanation = explain(tree, ALL, target=TOY)
    drawn = explanation.to_object()
    tokens, size = drawn["drawing"]["marks"]["tokens"], drawn["drawing"]["kv_token_bytes"]
    for strategy in drawn["strategies"]:
        read = sum(often * number for often, number in zip(strategy["reads"]["times"], tokens, strict=True))
        assert read * size == pytest.approx(strategy["estimate"]["kv_hbm_bytes"], rel=2e-3), strategy["name"]


def test_items_hold_the_tokens_of_their_groups() -> None:
    for entry, drawn in zip(
        (made := explain(TREES["levels"], ALL)).entries, made.to_object()["strategies"], strict=True
    ):
        if entry.plan.mask == "dense":
            continue
        tokens, rows = [0] * len(entry.plan), drawn["items"]["rows"]
        for group, number, own in zip(drawn["items"]["group"], drawn["items"]["tokens"], rows, strict=True):
            tokens[group] += number * own
        assert tokens == (entry.plan.group_tokens * entry.plan.group_rows).tolist(), entry.name


@pytest.mark.parametrize("nodes", [[1, 100, 9900], [1, 1000, 100_000]])
def test_pages_of_large_trees_are_small(nodes: list[int]) -> None:
    explanation = explain(Tree.from_levels(nodes, [1000, 50, 20]), ("query", "medusa", "deft-node", "cohort"))
    page = explanation.to_html()
    assert len(page) < 3_000_000
    for strategy in data_of(page)["strategies"]:
        assert len(strategy["marks"]["start"]) <= MOST_GROUP_MARKS
        assert sum(strategy["marks"]["count"]) >= strategy["counts"]["groups"]
        assert len(strategy["groups"]) <= MOST_SHOWN[0]
        assert sum(len(group["segments"]) for group in strategy["groups"]) <= MOST_SHOWN[1]


def test_neighbours_on_the_tree_have_other_colours(explanation: Explanation) -> None:
    marks = next(each for each in explanation.to_object()["strategies"] if each["name"] == "deft-node")["marks"]
    columns = ("start", "lo", "hi", "group", "colour")
    boxes = sorted(zip(*(marks[name] for name in columns), strict=True))
    for (start, _, end, group, colour), (other_start, lo, _, other, other_colour) in itertools.pairwise(boxes):
        if (start, end) == (other_start, lo) and group != other:
            assert colour != other_colour


def test_colours_of_drawings_are_those_of_pages() -> None:
    style = (Path(treegen.__path__[-1]) / "templates" / "report" / "colours.css").read_text("utf-8")
    fills = re.findall(r"--fill\d: (#\w+);", style)
    assert fills == [*LIGHT, *DARK, *DARK]


def test_all_panels_are_there(tab: Any) -> None:
    assert tab.eval_on_selector_all("section", "all => all.map(each => each.id)") == list(PANELS)
    assert tab.inner_text("h1") == "a tree"


def test_figures_on_the_page(tab: Any, explanation: Explanation) -> None:
    best = explanation.ranking[0]
    figures = tab.inner_text(".figures")
    for text in (byte_text(best.estimate.kv_unique_bytes), time_text(best.estimate.time_us), "15.0", "64", "85"):
        assert text in figures
    shown = tab.eval_on_selector_all(".strategy", "all => all.map(each => each.innerText)")
    assert len(shown) == len(explanation.entries)
    for entry, text in zip(explanation.ranking, shown, strict=True):
        assert entry.name in text
        assert time_text(entry.estimate.time_us) in text
        assert entry.reason in text
        assert f"{100 * entry.estimate.padding_waste:.1f} % padding" in text


def test_selecting_a_strategy_draws_the_rest(tab: Any) -> None:
    def state() -> tuple[str, ...]:
        pictures = [
            tab.evaluate(f"document.querySelector('{place} canvas').toDataURL()") for place in ("#tree", "#plan")
        ]
        return (*pictures, tab.inner_text("#summary .words"), tab.inner_text("#roofline .words"))

    before = state()
    tab.check(".strategy:has-text('deft-node-chunk') input")
    after = state()
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert "Shown below: deft-node-chunk(chunk=128)" in after[2]
    tab.select_option("#strategy", label="query")
    assert tab.is_checked(".strategy:has-text('query') input")
    assert tab.inner_text(".strategy.chosen b") == "query"
    assert "64 groups" in tab.inner_text("#plan .note >> nth=0")


def test_radio_buttons_answer_to_arrow_keys(tab: Any) -> None:
    tab.focus(".strategy.chosen input")
    tab.keyboard.press("ArrowDown")
    assert "number 2 of" in tab.inner_text("#summary .words")


def test_groups_are_listed_and_walked(tab: Any) -> None:
    tab.select_option("#strategy", label="deft-node")
    tab.focus("#plan .groups")
    tab.keyboard.press("ArrowDown")
    assert tab.inner_text("#plan .detail h3 >> nth=0") == "Group 1"
    assert "Rows 0 to 15 read 256 tokens of 1 node; every row sees all of it" in tab.inner_text("#plan .detail")
    assert "16 rows, 4 full tiles of 64\u00d764, 100.0 % filled; writes partial rows" in tab.inner_text("#plan .items")
    tab.keyboard.press("End")
    assert tab.get_attribute("#plan .group >> nth=-1", "aria-selected") == "true"
    assert "1 row" in tab.inner_text("#plan .group >> nth=-1")


def test_reads_of_nodes_are_told(tab: Any) -> None:
    tab.select_option("#strategy", label="query")
    assert "node 0, 1,024 tokens, 64.00 times" in tab.inner_text("#plan .repeats")
    tab.hover("#tree canvas", position={"x": 300, "y": 200})
    assert "64.00 times, by 64 groups" in tab.inner_text("#tip")


def test_points_of_the_roofline_select(tab: Any, explanation: Explanation) -> None:
    assert tab.locator("#roofline .dot").count() == len(explanation.entries)
    tab.focus("#roofline .dot[aria-label='medusa']")
    assert tab.inner_text("#tip strong") == "medusa"
    tab.keyboard.press("Enter")
    assert tab.inner_text(".strategy.chosen b") == "medusa"
    assert "runs unfused in PyTorch" in tab.inner_text("#plan .detail")


def test_the_floor_is_explained(tab: Any, explanation: Explanation) -> None:
    floor = explanation.to_object()["floor"]
    assert floor["time_us"] == max(floor["memory_us"], floor["arithmetic_us"])
    text = tab.inner_text("#roofline .words")
    assert text.startswith(
        f"The floor is {time_text(floor['time_us'])}, set by memory: {byte_text(floor['bytes'])} and "
    )


def test_the_search_is_shown(tab: Any, explanation: Explanation) -> None:
    search = explanation.to_object()["search"]
    split, walk = search["best"]
    assert tab.inner_text("#search .best") == f"{search['time_us'][split][walk]:.1f}"
    assert tab.locator("#search tbody tr").count() == len(search["walks"])
    first = tab.inner_text("#search .floor >> nth=0")
    assert first.split("\n")[0] == search["candidates"][0]["policy"]
    assert time_text(search["candidates"][0]["estimated_us"]) in first


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_screens(visit: Visits, explanation: Explanation, width: int, scheme: str) -> None:
    tab = visit(explanation.to_html("a tree"), width=width, color_scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("name", ["few-shot", "speculative", "rows-inside", "nobody"])
def test_pages_of_other_trees_have_no_errors(visit: Visits, name: str) -> None:
    tab = visit(explain(TREES[name], ALL).to_html())
    for index in range(tab.locator(".strategy").count()):
        tab.check(f".strategy >> nth={index} >> input")


def test_paper_is_white_and_without_tools(tab: Any) -> None:
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.locator("#toolbar").is_hidden()
    assert tab.evaluate("getComputedStyle(document.querySelector('.piece')).printColorAdjust") == "exact"
    assert tab.pdf()[:4] == b"%PDF"


def test_differences_frame_nodes(visit: Visits) -> None:
    found = difference(TREES["levels"], "deft-node", "fasttree")
    data = found.to_object(all_groups=False)
    differs = {node for node, count in zip(data["drawing"]["marks"]["node"], data["differs"], strict=True) if count}
    assert differs == set(found.comparison.nodes.tolist())
    tab = visit(found.to_html())
    assert tab.locator("#differences canvas").count() == 2
    for line in data["words"]:
        assert line in tab.inner_text("#differences .words")
    tab.hover("#differences canvas >> nth=1", position={"x": 300, "y": 200})
    assert "read it differently" in tab.inner_text("#tip").replace("\n", " ")


def test_hostile_names_of_files_run_no_script(
    visit: Visits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "<img src=x onerror=alert(1)>'\"&.json"
    tree = tmp_path / name
    tree.write_text(Tree.parse("10(5*3)").to_json(), "utf-8")
    page = tmp_path / "page.html"
    assert cli.main(["explain", str(tree), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    tab = visit(page.read_text("utf-8"))
    assert tab.locator("img").count() == 0
    assert tab.inner_text("h1").endswith(name)


def test_hostile_names_of_strategies_run_no_script(visit: Visits) -> None:
    class Hostile(Strategy):
        name = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"

        def plan(self, problem: Problem, on_pass: object = None) -> Plan:
            return treegen.strategies.deft_node().plan(problem)

    tab = visit(explain(TREES["few-shot"], [Hostile(), "query"]).to_html())
    assert tab.locator("img").count() == 0
    assert "<img src=x" in tab.inner_text("#strategies")


def test_commands_write_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, drawing = tmp_path / "page.html", tmp_path / "tree.svg"
    assert cli.main(["explain", "1,4/100,10", "--html", str(page), "--svg", str(drawing)]) == 0
    assert capsys.readouterr().out == f"{page}\n{drawing}\n"
    assert len(data_of(page.read_text("utf-8"))["strategies"]) > 5
    assert drawing.read_text("utf-8").startswith("<svg ")
    assert cli.main(["explain", "1,4/100,10", "--diff", "query", "cohort", "--html", str(page)]) == 0
    assert "differs" in data_of(page.read_text("utf-8"))
    capsys.readouterr()
    assert cli.main(["explain", "1,4/100,10", "--json", "--html", str(page), "--strategy", "query"]) == 0
    printed = capsys.readouterr().out.partition("\n")
    assert printed[0] == str(page)
    assert [each["name"] for each in json.loads(printed[2])["strategies"]] == ["query"]


def test_drawings_exclude_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "tree.svg"
    assert cli.main(["explain", "1,4/100,10", "--diff", "query", "cohort", "--svg", str(target)]) == 2
    assert capsys.readouterr().err.endswith(
        "excludes --diff, which names two strategies itself; leave out --svg or --diff\n"
    )
    assert not target.exists()


def test_strategies_without_kernels_are_left_out() -> None:
    shape = Shape(32, 1, 512, dtype="fp32")
    explanation = explain(Tree.parse("100(10*4)"), ALL, shape)
    assert "left out, because they have no kernel for this shape on h200:" in explanation.text()
    names = {entry.name for entry in explanation.entries}
    assert "fasttree" not in names
    assert explanation.best.name in names
    with pytest.raises(treegen.TreegenError, match="shared memory"):
        explain(Tree.parse("100(10*4)"), ["fasttree"], shape)


def test_comparisons_add_all_strategies() -> None:
    explanation = explain(TREES["levels"], ["deft-node"])
    named = [entry.name for entry in compared(explanation).entries]
    assert named[0] == "deft-node"
    assert sorted(named) == sorted(entry.name for entry in explain(TREES["levels"], ALL).entries)


def test_notebooks_show_trees_and_plans(visit: Visits) -> None:
    tree = TREES["levels"]
    plan = treegen.strategies.deft_node().plan(Problem(tree, Shape(32, 8, 128), target_from(None)))
    tab = visit(f"<meta charset='utf-8'>{tree._repr_html_()}{plan._repr_html_()}")
    assert tab.locator("svg").count() == 2
    assert "n0, 1,024 tokens" in tab.text_content("svg >> nth=0")
    assert "group 0: 64 rows, 1024 tokens" in tab.text_content("svg >> nth=1")
    assert "61 more groups" in tab.inner_text("body")
