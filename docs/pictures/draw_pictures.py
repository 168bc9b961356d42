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
PANELS = ("tree", "strategies", "plan", "timeline", "roofline", "search")
RESULTS = FOLDER.parent.parent / "benchmarks" / "results" / "h200_fasttree.json"


def main(folder: Path = FOLDER) -> None:
    """Writes a picture of the top of the page, one of each panel, one of a difference, and the drawing of the tree."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        names = ("page", "difference", "course", "results")
        page, difference, course, results = (Path(made, f"{name}.html") for name in names)
        treegen(["explain", TREE, "--html", str(page), "--svg", str(folder / "tree.svg")])
        treegen(["explain", TREE, "--diff", "deft-node", "fasttree", "--html", str(difference)])
        treegen(["io", "reasoning", "--html", str(course)])
        treegen(["bench", "--from", str(RESULTS), "--html", str(results)])
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1120, "height": 1130}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.screenshot(path=folder / "report_page.png")
        tab.set_viewport_size({"width": 1120, "height": 1800})  # higher than every panel, which is not scrolled then
        tab.select_option("#strategy", label="deft-flatten(block=128)")
        tab.click("#plan .group:has-text('masked') >> nth=0")
        for panel in PANELS:
            tab.locator(f"#{panel}").screenshot(path=folder / f"{panel}.png")
        for file, panel in ((difference, "differences"), (course, "course"), (results, "results")):
            tab.goto(file.as_uri())
            if panel == "results":
                tab.select_option("#results-heads", label="32/8")
            tab.locator(f"#{panel}").screenshot(path=folder / f"{panel}.png")
        browser.close()


if __name__ == "__main__":
    main()
