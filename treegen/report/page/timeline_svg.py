"""Timelines as SVG: the thread blocks of a plan on the SMs of a GPU, for papers and READMEs."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

from treegen.report.page.tree_svg import FONT, LIGHT, WIDTH, style_text, tree_height, tree_svg

_LEFT, _TOP, _LOWER, _EDGE, _HEIGHT = 52, 44, 24, 4, 220


def plan_svg(drawing: Mapping[str, Any], groups: Mapping[str, Any], timeline: Mapping[str, Any]) -> str:
    """Draws a tree with the groups of a plan, and below it the plan's timelines: the predicted and the measured one.

    Args:
        drawing, groups: As in `treegen.report.page.tree_svg.tree_svg`.
        timeline: The plan's timelines (`treegen.report.timelines.PlanTimeline.to_object`).
    """
    named = [(name, timeline[name]) for name in ("predicted", "measured") if timeline[name] is not None]
    longest = max((each["total_us"] for _, each in named), default=0.0)
    top, parts = tree_height(drawing), [tree_svg(drawing, groups)]
    for name, each in named:
        parts.append(_placed(timeline_svg(each, name, longest), top))
        top += _TOP + _HEIGHT + _LOWER
    begin = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {top}' width='{WIDTH}' height='{top}'>"
    return "\n".join([begin, *(part.strip() for part in parts), "</svg>\n"])


def timeline_svg(timeline: Mapping[str, Any], name: str, longest_us: float) -> str:
    """Draws a timeline as SVG: time to the right, SMs downward, a box for each thread block, in its launch's colour.

    Args:
        timeline: A predicted or a measured timeline of `PlanTimeline.to_object`.
        name: What it is called.
        longest_us: Microseconds at the right edge.
    """
    height, sms = _TOP + _HEIGHT + _LOWER, max(timeline["sms"], 1)
    across = (WIDTH - _LEFT - _EDGE) / max(longest_us, 1e-9)
    label = f"{name}: ends at {timeline['total_us']:.1f} us; tail {timeline['tail_us']:.1f} us"
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"class='treegen' role='img' aria-label='{html.escape(label)}' {FONT}>",
        f"<style>{style_text()}</style>",
        f"<rect class='tg-paper' width='{WIDTH}' height='{height}' fill='#ffffff'/>",
        f"<text class='tg-ink' x='4' y='14' fill='#16191d'>{html.escape(label)}</text>",
        *_legend(timeline["launches"]),
        *_scales(sms, longest_us, across),
    ]
    blocks = timeline["blocks"]
    lanes = sms * (1 + max(blocks["slot"], default=0))
    columns = (blocks[column] for column in ("launch", "sm", "slot", "start_us", "end_us"))
    for launch, sm, slot, start, end in zip(*columns, strict=True):
        lane, colour = sm * (lanes // sms) + slot, launch % len(LIGHT)
        place = f"x='{_LEFT + start * across:.2f}' y='{_TOP + lane * _HEIGHT / lanes:.2f}'"
        size = f"width='{max((end - start) * across, 0.4):.2f}' height='{_HEIGHT / lanes:.2f}'"
        lines.append(f"<rect class='tg-{colour}' {place} {size} fill='{LIGHT[colour]}'/>")
    return "\n".join([*lines, "</svg>\n"])


def _placed(drawing: str, top: int) -> str:
    """Moves a drawing down within another one."""
    return drawing.replace("<svg ", f"<svg y='{top}' ", 1)


def _legend(launches: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a sample of each launch's colour, and its name; and how many launches there is no room for."""
    at = _LEFT
    for number, launch in enumerate(launches):
        room = WIDTH - (0 if number == len(launches) - 1 else 100)
        if at + 17 + 7 * len(launch["name"]) > room:
            more = f"{len(launches) - number} more launches"
            yield f"<text class='tg-ink' x='{at}' y='{_TOP - 10}' fill='#16191d'>{more}</text>"
            return
        colour = number % len(LIGHT)
        yield f"<rect class='tg-{colour}' x='{at}' y='{_TOP - 20}' width='12' height='12' fill='{LIGHT[colour]}'/>"
        yield f"<text class='tg-ink' x='{at + 17}' y='{_TOP - 10}' fill='#16191d'>{html.escape(launch['name'])}</text>"
        at += 40 + 7 * len(launch["name"])


def _scales(sms: int, longest_us: float, across: float) -> Iterator[str]:
    """Yields the numbers of SMs along the left edge, and of microseconds along the lower one."""
    for sm in range(0, sms, max(1, -(-sms // 6))):
        place = f"x='{_LEFT - 6}' y='{_TOP + sm * _HEIGHT / sms + 9:.1f}'"
        yield f"<text class='tg-faint' {place} fill='#5a626d' text-anchor='end'>SM {sm}</text>"
    steps = (factor * 10.0**power for power in range(-2, 8) for factor in (1, 2, 5))
    step = next(step for step in steps if longest_us <= 10 * step)
    for number in range(int(longest_us / step) + 1):
        place = f"x='{_LEFT + number * step * across:.1f}' y='{_TOP + _HEIGHT + 16}'"
        unit = " us" if not number else ""
        yield f"<text class='tg-faint' {place} fill='#5a626d' text-anchor='middle'>{number * step:g}{unit}</text>"
