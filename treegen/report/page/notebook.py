"""Drawings in notebooks: trees and plans as SVG, and whole pages in a frame of their own."""

from __future__ import annotations

import html
from itertools import pairwise

from treegen.ir.plan import Plan
from treegen.ir.shape import DEFAULT_SHAPE
from treegen.ir.tree import Tree
from treegen.report.page.group_marks import COLOURS
from treegen.report.page.tree_marks import TreeMarks
from treegen.report.page.tree_svg import FONT, LETTER, LIGHT, WIDTH, style_text, tree_svg

_MOST_GROUPS = 24
_MOST_SEGMENTS = 200  # of a group
_LINE, _LEFT = 24, 190
_FRAME_HEIGHT = 760  # CSS pixels


def framed(page: str) -> str:
    """Returns a page in a frame, whose scripts cannot reach the notebook."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" title="treegen" '
        f'style="width:100%;height:{_FRAME_HEIGHT}px;border:0"></iframe>'
    )


def tree_html(tree: Tree) -> str:
    """Returns a tree for notebooks: its size in words, above a drawing with its depths in colour."""
    drawing = TreeMarks.of(tree).to_object(DEFAULT_SHAPE)
    return f"<div style='max-width:{WIDTH}px'>{html.escape(str(tree))}</div>{tree_svg(drawing)}"


def plan_html(plan: Plan) -> str:
    """Returns a plan for notebooks: a line for each group, with its segments as boxes as wide as their tokens."""
    shown = min(len(plan), _MOST_GROUPS)
    tokens = plan.group_tokens
    across = (WIDTH - _LEFT) / max(int(tokens[:shown].max(initial=1)), 1)
    height = _LINE * max(shown, 1)
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"class='treegen' style='max-width:100%;height:auto' role='img' aria-label='The groups of a plan' {FONT}>",
        f"<style>{style_text()}</style>",
        f"<rect class='tg-paper' width='{WIDTH}' height='{height}' fill='#ffffff'/>",
    ]
    for group in range(shown):
        lines += _group_lines(plan, group, across)
    lines.append("</svg>")
    heading = plan.text(0).partition("\n")[0]
    more = f"<div>{len(plan) - shown} more groups</div>" if shown < len(plan) else ""
    return f"<div>{html.escape(heading)}</div>" + "\n".join(lines) + more


def _group_lines(plan: Plan, group: int, across: float) -> list[str]:
    """Draws one group: its rows in words, and a box for each segment. Segments that some row does not see are pale."""
    top, colour = group * _LINE, group % COLOURS
    rows = int(plan.group_rows[group])
    words = f"group {group}: {rows} {'row' if rows == 1 else 'rows'}, {plan.group_tokens[group]} tokens"
    lines = [f"<text class='tg-ink' x='2' y='{top + 16}' fill='#16191d'>{words}</text>"]
    first, end = int(plan.segment_indptr[group]), int(plan.segment_indptr[group + 1])
    last = min(end, first + _MOST_SEGMENTS)
    ends = [0, *plan.read_tokens[first:last].cumsum().tolist()]
    masked = plan.masked[first:last].tolist()
    for place, (begin, stop) in enumerate(pairwise(ends)):
        left, width = _LEFT + begin * across, max((stop - begin) * across, 0.5)
        pale = " fill-opacity='0.45'" if masked[place] else ""
        box = f"x='{left:.2f}' y='{top + 3}' width='{width:.2f}' height='{_LINE - 6}'"
        lines.append(
            f"<rect class='tg-{colour} tg-edge' {box} fill='{LIGHT[colour]}'{pale} stroke='#ffffff' stroke-width='1'/>"
        )
        name = f"n{plan.node[first + place]}"
        if len(name) * LETTER + 6 < width:
            lines.append(f"<text class='tg-ink' x='{left + 4:.2f}' y='{top + 16}' fill='#16191d'>{name}</text>")
    return lines
