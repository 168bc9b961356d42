"""Report pages: one file that loads nothing, whatever its title and data are; and the tree's panel in a browser."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from support.browsers import Visits
from support.paths import ROOT
from treegen import Tree
from treegen.ir.shape import DEFAULT_SHAPE
from treegen.report.page.html_page import html_page
from treegen.report.page.tree_marks import TreeMarks

HOSTILE = "</title></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028<!--"
TEMPLATES = ROOT / "templates" / "report"
TREE = Tree.from_levels([1, 4, 16], [100, 20, 30])


def page_of(tree: Tree, title: str = "a tree") -> str:
    return html_page(title, {"drawing": TreeMarks.of(tree).to_object(DEFAULT_SHAPE)}, ["tree"])


class Elements(HTMLParser):
    """The elements of a page: (tag, attributes)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_drawing_library_is_unmodified() -> None:
    shipped = (TEMPLATES / "d3.min.js").read_bytes()
    assert hashlib.sha256(shipped).hexdigest() == "f2094bbf6141b359722c4fe454eb6c4b0f0e42cc10cc7af921fc158fceb86539"
    assert shipped.startswith(b"// https://d3js.org v7.9.0 Copyright 2010-2023 Mike Bostock")


def test_every_page_carries_the_librarys_license() -> None:
    assert (TEMPLATES / "d3.LICENSE").read_text("utf-8").strip() in page_of(TREE)


def test_own_scripts_are_short_and_strict() -> None:
    own = [path for path in TEMPLATES.glob("*.js") if path.name != "d3.min.js"]
    assert len(own) > 4
    for path in own:
        lines = path.read_text("utf-8").splitlines()
        assert lines[0] == '"use strict";', path.name
        assert len(lines) <= 300, path.name
        assert max(map(len, lines)) <= 120, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\.html\(|eval\(", "\n".join(lines))


def test_a_page_is_one_file() -> None:
    elements = Elements(page_of(TREE)).found
    assert not [(tag, attrs) for tag, attrs in elements if attrs.keys() & {"src", "href", "style", "onload"}]
    (policy,) = [attrs["content"] for tag, attrs in elements if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_hostile_text_is_no_markup() -> None:
    data = {"drawing": TreeMarks.of(TREE).to_object(DEFAULT_SHAPE), "name": HOSTILE}
    text = html_page(HOSTILE, data, ["tree"])
    plain = html_page("", {"drawing": TreeMarks.of(TREE).to_object(DEFAULT_SHAPE), "name": ""}, ["tree"])
    assert Elements(text).found == Elements(plain).found
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert json.loads(block[1])["name"] == HOSTILE


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        html_page("a page", {"time_us": float("nan")}, [])


def test_hostile_text_runs_no_script(visit: Visits) -> None:
    tab = visit(page_of(TREE, HOSTILE))
    assert tab.text_content("h1") == HOSTILE
    assert tab.locator("img").count() == 0


@pytest.fixture
def tree_tab(visit: Visits) -> Any:
    return visit(page_of(TREE))


def text_of_tip(tab: Any) -> str:
    return tab.inner_text("#tip").replace("\n", " ")


def test_hover_tells_about_a_node(tree_tab: Any) -> None:
    tree_tab.hover("#tree canvas", position={"x": 200, "y": 200})
    size = 100 * DEFAULT_SHAPE.kv_token_bytes // 1024
    assert text_of_tip(tree_tab) == f"node 0 tokens 100 rows 16: 0 to 15 KV {size}.0 KiB"
    tree_tab.mouse.move(5, 5)
    assert tree_tab.locator("#tip").is_hidden()


def test_keys_walk_and_enlarge_the_tree(tree_tab: Any) -> None:
    tree_tab.focus("#tree canvas")
    walked = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowUp", "ArrowLeft"):
        tree_tab.keyboard.press(key)
        walked.append(tree_tab.inner_text("#tip strong"))
    assert walked == [f"node {number}" for number in (0, 1, 2, 9, 10, 9, 8, 1)]
    tree_tab.keyboard.press("Enter")
    assert tree_tab.inner_text("#tree .where") == "enlarged: n1 and the nodes below it; tokens 100 to 150"
    tree_tab.keyboard.press("Escape")
    assert tree_tab.inner_text("#tree .where") == "whole tree; tokens 0 to 150"


def test_a_click_enlarges_and_buttons_lead_back(tree_tab: Any) -> None:
    tree_tab.click("#tree canvas", position={"x": 1080, "y": 100})
    assert "enlarged: n8" in tree_tab.inner_text("#tree .where")
    tree_tab.click("button:text('Zoom out')")
    assert tree_tab.locator("button:text('Whole tree')").is_disabled()


def test_colours_follow_the_system_and_the_button(visit: Visits) -> None:
    def background(tab: Any) -> str:
        return tab.evaluate("getComputedStyle(document.body).backgroundColor")

    def picture(tab: Any) -> str:
        return tab.evaluate("document.querySelector('#tree canvas').toDataURL()")

    light, dark = visit(page_of(TREE), color_scheme="light"), visit(page_of(TREE), color_scheme="dark")
    assert background(light) != background(dark)
    assert picture(light) != picture(dark)
    colours = background(dark), picture(dark)
    light.click("#theme")
    assert (background(light), picture(light)) == colours
    assert light.get_attribute("#theme", "aria-label") == "Use light colours"


@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_is_not_wider_than_the_screen(visit: Visits, width: int) -> None:
    tab = visit(page_of(TREE, "a_very_long_name" * 20), width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
