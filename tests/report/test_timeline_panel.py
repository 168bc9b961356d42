"""The timeline's panel in a browser: its numbers, hover, keyboard, another strategy, and a measured timeline below."""

from __future__ import annotations

from typing import Any

import pytest

from support.browsers import Visits
from support.made_up_recordings import explained
from treegen import Shape, Tree
from treegen.report.explain import Explanation, explain


def opened(visit: Visits, told: Explanation, **options: Any) -> Any:
    return visit(told.to_html(), **options)


def words(tab: Any) -> list[str]:
    return tab.locator("#timeline .words p").all_inner_texts()


def cells(tab: Any, table: int) -> list[list[str]]:
    rows = tab.locator("#timeline table").nth(table).locator("tr")
    return [row.locator("th, td").all_inner_texts() for row in rows.all()]


def where(tab: Any) -> str:
    return tab.inner_text("#timeline .where")


def test_words_and_tables_are_those_of_the_json(visit: Visits) -> None:
    told = explained("deft-flatten", measured=True)
    tab, found = opened(visit, told), told.entries[0].timeline
    assert found.recording is not None
    value = found.to_object()
    for text, timeline in zip(words(tab), (value["predicted"], value["measured"]), strict=True):
        assert f"ends at {timeline['total_us']:.1f} us; tail {timeline['tail_us']:.1f} us" in text
        assert f"the busiest SM works {timeline['imbalance']:.2f} times the mean" in text
    assert "the usual kernels take 50.0 us, those that record 2.0 % more" in words(tab)[1]
    assert tab.inner_text("#roofline .words").endswith("Measured: 50.0 us.")  # by the usual kernels
    assert cells(tab, 0)[0] == ["launch", "predicted", "measured"]
    assert [row[0] for row in cells(tab, 0)[1:]] == [launch.name for launch in found.predicted.launches]
    classes = cells(tab, 1)[1:]
    assert [row[0] for row in classes] == [each.name for each in found.classes]
    assert [row[4] for row in classes if not row[0].startswith("merge")] == ["-50 %"] * (len(classes) - 1)


def test_without_a_measurement_there_is_one_timeline(visit: Visits) -> None:
    tab = opened(visit, explained("deft-flatten"))
    assert len(words(tab)) == 1
    assert cells(tab, 1)[0] == ["class of work", "blocks", "predicted"]


def test_plans_without_thread_blocks_have_no_panel(visit: Visits) -> None:
    tab = opened(visit, explain(Tree.parse("6(2*2)"), ["medusa"], Shape(4, 2, 64), "h200"))
    assert tab.locator("#timeline").count() == 0


def test_hover_tells_about_a_block(visit: Visits) -> None:
    told = explained("query")
    tab = opened(visit, told)
    first = told.entries[0].timeline.predicted.blocks
    canvas = tab.locator("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 600, "y": 24})
    tip = " ".join(tab.inner_text("#tip").split())
    assert tip.startswith("item ")
    assert "timeline predicted launch work items" in tip
    assert f"KV tokens {first.tokens[0]:,} KV {first.kv_bytes[0] / 1024:.1f} KiB" in tip


def test_keys_walk_blocks_and_enlarge(visit: Visits) -> None:
    tab = opened(visit, explained("deft-flatten", measured=True))
    tab.focus("#timeline canvas")

    tab.keyboard.press("Home")
    tip = tab.inner_text("#tip")
    assert "predicted" in tip
    assert "0, slot 0" in tip
    tab.keyboard.press("ArrowDown")
    assert "1, slot 0" in tab.inner_text("#tip")
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowRight")
    assert "0, slot" in tab.inner_text("#tip")
    whole = where(tab)
    tab.keyboard.press("Enter")
    assert where(tab).startswith("enlarged: ")
    tab.keyboard.press("Escape")
    assert where(tab) == whole
    for _ in range(132):
        tab.keyboard.press("ArrowDown")
    assert "measured" in tab.inner_text("#tip")


def test_a_click_enlarges_and_buttons_lead_back(visit: Visits) -> None:
    tab = opened(visit, explained("deft-flatten"))
    whole = where(tab)
    for _ in range(2):
        tab.click("#timeline canvas", position={"x": 700, "y": 120})
    assert where(tab).startswith("enlarged: ")
    tab.click("#timeline button:text('Zoom out')")
    assert where(tab).startswith("enlarged: ")
    tab.click("#timeline button:text('Whole timeline')")
    assert where(tab) == whole


def test_another_strategy_and_other_colours_redraw(visit: Visits) -> None:
    tab = opened(visit, explained("deft-flatten", "query"))

    def picture() -> str:
        return tab.evaluate("document.querySelector('#timeline canvas').toDataURL()")

    before, told = picture(), words(tab)
    tab.select_option("#timeline-colours", "group")
    coloured = picture()
    assert coloured != before
    shown = tab.evaluate("page.selected")
    tab.evaluate(f"page.select({1 - shown})")
    assert picture() != coloured
    assert words(tab) != told


def test_groups_have_the_colours_of_the_tree(visit: Visits) -> None:
    tab = opened(visit, explained("deft-node"))
    tab.select_option("#timeline-colours", "group")
    canvas = tab.locator("#timeline canvas")
    for _ in range(3):
        canvas.click(position={"x": 500, "y": 100})
    canvas.hover(position={"x": 500, "y": 100})
    group = int(tab.inner_text("#tip dt:text-is('group') + dd"))
    context = "document.querySelector('#timeline canvas').getContext('2d')"
    pixel = tab.evaluate(f"[...{context}.getImageData(500, 100, 1, 1).data].slice(0, 3)")
    colour = tab.evaluate(f"d3.rgb(shapes.colours().fill(groupColour(page.strategy, {group}))).formatHex()")
    assert pixel == [int(colour[place : place + 2], 16) for place in (1, 3, 5)]


@pytest.mark.parametrize("width", [390, 1280])
def test_the_panel_fits_the_screen(visit: Visits, width: int) -> None:
    tab = opened(visit, explained("deft-flatten", measured=True), width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate("document.querySelector('#timeline canvas').clientWidth") <= width


def test_twenty_thousand_blocks_stay_fluid(visit: Visits) -> None:
    told = explain(Tree.from_levels([1, 16, 8000], [700, 130, 40]), ["query"], Shape(32, 8, 128), "h200")
    tab = opened(visit, told)
    drawn_ms = tab.evaluate("() => { const t = performance.now(); page.redraw(); return performance.now() - t; }")
    assert drawn_ms < 500
