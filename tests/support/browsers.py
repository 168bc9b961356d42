"""Pages in a headless Chromium: what they log, and what they ask of a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless Chromium, by playwright; skips where one of the two is missing."""
    sync_api = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium")
    # Chromium has no sandbox for root, whom containers run tests as.
    flags = ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


class Visits:
    """Opens pages in a browser, and collects what must never happen: errors, and requests but for the file itself."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self.browser, self.folder = browser, folder
        self.wrong: list[str] = []

    def __call__(self, text: str, width: int = 1280, height: int = 900, **options: Any) -> Any:
        """Opens a page's text in a tab of its own."""
        path = self.folder / f"page{len(list(self.folder.iterdir()))}.html"
        path.write_text(text, "utf-8")
        tab = self.browser.new_page(viewport={"width": width, "height": height}, **options)
        tab.on("console", lambda message: self.wrong.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: self.wrong.append(f"dialog: {dialog.message}"))
        tab.on("request", lambda request: self._note(request.url, path))
        tab.goto(path.as_uri())
        return tab

    def _note(self, url: str, path: Path) -> None:
        if url != path.as_uri():
            self.wrong.append(f"request: {url}")
