"""Ranks that run the code of a page together."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from typing import Any

from support.paths import ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
"""A block of Python, and the block of text right after it, if there is one."""


def page(path: str) -> None:
    """Runs the Python blocks of a page in order, and compares what they print with the text blocks that follow."""
    text = (ROOT / path).read_text("utf-8")
    namespace: dict[str, Any] = {}
    ran = 0
    for code, shown in BLOCK.findall(text):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, namespace)
        assert not shown or printed.getvalue() == shown, printed.getvalue()
        ran += 1
    assert ran
