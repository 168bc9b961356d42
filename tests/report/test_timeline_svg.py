"""Timelines as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from treegen import Tree
from treegen.report.explain import explain
from treegen.report.page.timeline_svg import timeline_svg

TIMELINE = {
    "sms": 2, "total_us": 8.0, "tail_us": 3.0, "launches": [{"name": "<first>"}, {"name": "merge"}],
    "blocks": {
        "launch": [0, 0, 1], "sm": [0, 1, 1], "slot": [0, 1, 0], "start_us": [1.0, 1.0, 6.0], "end_us": [5.0, 4.0, 8.0]
    },
}  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


def boxes(drawing: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """Places and sizes of thread blocks."""
    found = [each for each in drawing.iter(f"{SVG}rect") if each.get("class", "").startswith("tg-")]
    named = [each for each in found if each.get("class") != "tg-paper" and each.get("width") != "12"]
    return [tuple(float(each.get(name, "nan")) for name in ("x", "y", "width", "height")) for each in named]  # type: ignore[misc]


def test_blocks_lie_by_time_and_by_sm() -> None:
    drawing = ElementTree.fromstring(timeline_svg(TIMELINE, "predicted", 45.2))  # 20 points a microsecond
    assert boxes(drawing) == [(72, 44, 80, 55), (72, 209, 60, 55), (172, 154, 40, 55)]
    texts = [each.text for each in drawing.iter(f"{SVG}text")]
    assert {"predicted: ends at 8.0 us; tail 3.0 us", "<first>", "merge", "SM 1"} <= set(texts)


def test_the_tree_and_its_timeline_are_one_drawing() -> None:
    explanation = explain(Tree.parse("1,4/100,10"))
    drawing = ElementTree.fromstring(explanation.to_svg())
    tree, timeline = drawing.findall(f"{SVG}svg")
    assert tree.get("aria-label") == "A tree of 5 nodes and 4 rows"
    assert float(timeline.get("y", 0)) == float(tree.get("height", 0))
    made = explanation.to_object()["strategies"][0]["timeline"]["predicted"]
    assert timeline.get("aria-label") == f"predicted: ends at {made['total_us']:.1f} us; tail {made['tail_us']:.1f} us"
    assert len(boxes(timeline)) == len(made["blocks"]["sm"])
