"""Drawings as SVG: a tree with the groups of a plan in colour, for papers, READMEs and notebooks.

Shapes carry light colours as attributes, which every program reads. A style sheet inside the drawing changes them where
the reader prefers dark colours.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from treegen.cost.figures import count_text

LIGHT = ("#8cc0e4", "#f3c875", "#86cfb6", "#e3b3cf", "#f5ee9a", "#e9a17a", "#bfe3f7", "#c3c8ce")
DARK = ("#1d6596", "#8f6511", "#14735a", "#85506f", "#6f6b22", "#8f4a20", "#3b6f8d", "#565e68")
"""Colours of fills, light and dark, as in templates/report/colours.css."""
WIDTH = 960
"""The width of drawings in points."""
_LEFT, _TOP, _EDGE = 52, 40, 4
_MOST_EVEN = 120  # ends of nodes in a drawing with even widths
FONT = "font-family='system-ui, sans-serif' font-size='12'"
LETTER = 6.6
"""The usual width of a letter of this font, in points."""


def tree_svg(drawing: Mapping[str, Any], groups: Mapping[str, Any] | None = None) -> str:
    """Draws a tree as SVG: tokens to the right, rows downward, a box for each node.

    Where most nodes would be narrower than a point, as drafts behind a long prompt, widths are even: all stretches
    between neighbouring ends of nodes have the same one.

    Args:
        drawing: The tree's drawing (`treegen.report.page.tree_marks.TreeMarks.to_object`).
        groups: The marks of a plan's groups, which colour the boxes (`treegen.report.page.group_marks.group_marks`). By
            default colours are depths.
    """
    marks, height = drawing["marks"], tree_height(drawing)
    scales = _Scales(drawing, height)
    layer = groups or marks
    colours = groups["colour"] if groups else _depths(marks["parent"])
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"class='treegen' role='img' aria-label='{html.escape(_label(drawing))}' {FONT}>",
        f"<style>{style_text()}</style>",
        f"<rect class='tg-paper' width='{WIDTH}' height='{height}' fill='#ffffff'/>",
        *_axes(scales, drawing["rows"]),
    ]
    for index, box in _boxes(layer, scales):
        colour = colours[index] % len(LIGHT)
        lines.append(f"<rect class='tg-{colour}' {box.attributes} fill='{LIGHT[colour]}'/>")
    for index, box in _boxes(marks, scales):
        if box.width > 2 and box.height > 2:
            lines.append(f"<rect class='tg-edge' {box.attributes} fill='none' stroke='#ffffff' stroke-width='1.5'/>")
        if text := _box_text(marks, index, box):
            place = f"x='{box.left + 5:.1f}' y='{box.top + min(box.height / 2, 11) + 4:.1f}'"
            lines.append(f"<text class='tg-ink' {place} fill='#16191d'>{html.escape(text)}</text>")
    return "\n".join([*lines, "</svg>\n"])


def tree_height(drawing: Mapping[str, Any]) -> int:
    """Returns the height of a tree's drawing in points."""
    rows: int = max(drawing["rows"], 1)
    return min(480, max(120, _TOP + 18 * rows)) + _EDGE


class _Scales:
    """Places of tokens and rows in points."""

    def __init__(self, drawing: Mapping[str, Any], height: int) -> None:
        tokens, rows = max(drawing["tokens"], 1), max(drawing["rows"], 1)
        self.left = max(_LEFT, 16 + round(LETTER * len(f"{drawing['rows']:,}")))
        self.down = (height - _TOP - _EDGE) / rows
        across = (WIDTH - self.left - _EDGE) / tokens
        start, stop = (np.array(drawing["marks"][name], np.int64) for name in ("start", "stop"))
        ends = np.unique(np.concatenate([start, stop, [0, tokens]]))
        narrow = (stop - start) * across < 1
        self.even = bool(2 * narrow.sum() > len(narrow)) and len(ends) <= _MOST_EVEN
        self._ends = ends if self.even else np.array([0, tokens])
        self._places = np.linspace(self.left, WIDTH - _EDGE, len(self._ends))
        step, self.last = -(-len(ends) // 12), tokens
        self.ticks = ends[::step].tolist() if self.even else _ticks(drawing["tokens"], 10)

    def x(self, token: float) -> float:
        """The place of a token."""
        return float(np.interp(token, self._ends, self._places))


class _Box:
    """A box in points."""

    def __init__(self, left: float, top: float, width: float, height: float) -> None:
        self.left, self.top, self.width, self.height = left, top, width, height

    @property
    def attributes(self) -> str:
        """Its place and size as attributes."""
        return f"x='{self.left:.2f}' y='{self.top:.2f}' width='{self.width:.2f}' height='{self.height:.2f}'"


def _boxes(marks: Mapping[str, Any], scales: _Scales) -> Iterator[tuple[int, _Box]]:
    columns = (marks[name] for name in ("start", "stop", "lo", "hi"))
    for index, (start, stop, lo, hi) in enumerate(zip(*columns, strict=True)):
        left = scales.x(start)
        size = max(scales.x(stop) - left, 0.5), max((hi - lo) * scales.down, 0.5)
        yield index, _Box(left, _TOP + lo * scales.down, *size)


def _box_text(marks: Mapping[str, Any], index: int, box: _Box) -> str:
    """Returns the text that fits into a box: the node with its tokens, the node alone, or nothing."""
    if box.height < 14:
        return ""
    name = f"n{marks['node'][index]}" if marks["nodes"][index] == 1 else f"{marks['nodes'][index]:,} nodes"
    tokens = marks["tokens"][index]
    for text in (f"{name}, {tokens:,} {'token' if tokens == 1 else 'tokens'}", name):
        if len(text) * LETTER + 8 < box.width:
            return text
    return ""


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _axes(scales: _Scales, rows: int) -> Iterator[str]:
    """Yields the numbers of tokens along the upper edge, and of rows along the left one."""
    for at in scales.ticks:
        place = f"x='{scales.x(at):.1f}' y='{_TOP - 8}'"
        anchor = "end" if at == scales.last else "middle"
        yield f"<text class='tg-faint' {place} fill='#5a626d' text-anchor='{anchor}'>{at:,}</text>"
    for at in _ticks(rows, max(2, round(rows * scales.down / 44))):
        place = f"x='{scales.left - 8}' y='{min(_TOP + at * scales.down + 10, _TOP + rows * scales.down):.1f}'"
        yield f"<text class='tg-faint' {place} fill='#5a626d' text-anchor='end'>{at:,}</text>"
    even = ", in even widths" if scales.even else ""
    yield f"<text class='tg-faint' x='4' y='14' fill='#5a626d'>rows downward, tokens to the right{even}</text>"


def _ticks(most: int, wanted: int) -> list[int]:
    """Returns at most about this many round numbers from 0 to below `most`."""
    steps = (factor * 10**power for power in range(12) for factor in (1, 2, 5))
    return list(range(0, max(most, 1), next(step for step in steps if most <= wanted * step)))


def _label(drawing: Mapping[str, Any]) -> str:
    nodes = sum(drawing["marks"]["nodes"])
    return f"A tree of {count_text(nodes).strip()} nodes and {drawing['rows']} rows"


def style_text() -> str:
    """Returns the style sheet that changes colours for readers who prefer dark ones."""
    fills = "".join(f".tg-{index}{{fill:{colour}}}" for index, colour in enumerate(DARK))
    others = ".tg-paper{fill:#1b1f24}.tg-ink{fill:#eef1f4}.tg-faint{fill:#a5aeb9}.tg-edge{stroke:#14171b}"
    return f"@media (prefers-color-scheme:dark){{{fills}{others}}}"
