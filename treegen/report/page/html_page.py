"""HTML pages: a title, data and panels as one file that loads nothing.

    templates/report/page.html            the frame, with a place for each part below
    colours.css, page.css                 colours, and the style of the frame
    charts.css, panels.css, results.css   the style of what panels are made of
    d3.min.js, d3.LICENSE                 the drawing library, unmodified
    page.js, shapes.js                    the frame's script, and what all panels draw with
    marks.js, icicle_scales.js, icicle.js drawings of trees
    bars.js                               bars
    groups.js, group_drawings.js          groups on drawings of trees, and one by one
    NAME_panel.js                         a panel: it draws a part of the data
    timeline_blocks.js, timeline_chart.js what the panel `timeline` draws with

The data is a block of JSON, which scripts read; nothing of it is ever markup. The page's policy names the digests of
its own style and scripts, so a browser runs nothing else, and connects to nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from treegen.ir.tree import Tree

_SHARED = (
    *("d3.min.js", "page.js", "shapes.js", "marks.js", "icicle_scales.js", "icicle.js"),
    *("groups.js", "bars.js", "group_drawings.js"),
)
_PARTS = {"timeline": ("timeline_blocks.js", "timeline_chart.js")}
"""Further scripts of a panel, which come before it."""
_STYLES = ("colours.css", "page.css", "charts.css", "panels.css", "results.css")
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def html_page(title: str, data: Mapping[str, Any], panels: Sequence[str]) -> str:
    """Writes a page that draws data.

    Args:
        title: The page's heading. Any text, also from file names.
        data: What the panels draw, in the form of `explain --json`. Numbers must be finite.
        panels: The panels, from the top down: the NAME of each NAME_panel.js. A panel shows itself only if the data has
            what it draws.

    Returns:
        The text of one HTML file, which needs no other file and no network.
    """
    style = "\n".join(map(_part, _STYLES))
    of_panels = [name for panel in panels for name in (*_PARTS.get(panel, ()), f"{panel}_panel.js")]
    scripts = [_part(name) for name in (*_SHARED, *of_panels)]
    allowed = f"script-src {' '.join(map(_digest, scripts))}; style-src {_digest(style)}"
    return Template(_part("page.html")).substitute(
        title=html.escape(title),
        policy=f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'",
        style=style,
        license=_part("d3.LICENSE").strip(),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
        data=json_block(data),
    )


def page_title(title: str, tree: Tree) -> str:
    """Returns the heading of a tree's page: the title, or without one the beginning of the tree's text."""
    return title or str(tree).partition(" | ")[0]


def json_block(data: Mapping[str, Any]) -> str:
    """Writes data as JSON that may stand inside a script element: markup characters are escaped."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False, default=str).translate(_ESCAPES)


def _part(name: str) -> str:
    """Reads a file of the page's templates."""
    return (files("treegen.templates") / "report" / name).read_text("utf-8")


def _digest(text: str) -> str:
    """Returns the digest of an inline style or script, in the form of a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
