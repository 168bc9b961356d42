"""Parts of pages that follow from the code: tests hold them, and write them anew under `--update-golden`."""

from __future__ import annotations

from pathlib import Path

import pytest


def hold(page: Path, name: str, wanted: str, request: pytest.FixtureRequest) -> None:
    """Fails unless the page has this text, in a fence, between `<!-- name: begin -->` and `<!-- name: end -->`."""
    text = page.read_text("utf-8")
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    assert text.count(begin) == text.count(end) == 1, f"{page.name} has no lines {begin} and {end}"
    before, _, rest = text.partition(begin)
    shown, _, after = rest.partition(end)
    fenced = f"\n\n```text\n{wanted}\n```\n\n"
    if request.config.getoption("update_golden"):
        page.write_text(f"{before}{begin}{fenced}{end}{after}", encoding="utf-8", newline="\n")
    elif shown != fenced:
        update = f"python -m pytest {request.path.relative_to(request.config.rootpath)} --update-golden"
        pytest.fail(f"{name} of {page.name} are not those of the code: run `{update}`", pytrace=False)
