"""Draws the pictures of the report page, for the README and the documentation: `python docs/pictures/draw_pictures.py`.

It needs a Chromium, and the extra `browser` (playwright).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from treegen.cli import main as treegen

FOLDER = Path(__file__).parent
TREE = "1,4,16,64/1024,256,128,32"
PANELS = ("tree", "strategies", "plan", "roofline", "search")


def main(folder: Path = FOLDER) -> None:
    """Writes a picture of the top of the page, one of each panel, one of a difference, and the drawing of the tree."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        page, difference = Path(made, "page.html"), Path(made, "difference.html")
        treegen(["explain", TREE, "--html", str(page), "--svg", str(folder / "tree.svg")])
        treegen(["explain", TREE, "--diff", "deft-node", "fasttree", "--html", str(difference)])
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1120, "height": 1130}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.screenshot(path=folder / "report_page.png")
        tab.select_option("#strategy", label="deft-flatten(block=128)")
        tab.click("#plan .group:has-text('masked') >> nth=0")
        for panel in PANELS:
            tab.locator(f"#{panel}").screenshot(path=folder / f"{panel}.png")
        tab.goto(difference.as_uri())
        tab.locator("#differences").screenshot(path=folder / "differences.png")
        browser.close()


if __name__ == "__main__":
    main()
