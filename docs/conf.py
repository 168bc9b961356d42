"""The settings of Sphinx, which `make docs` runs: Markdown pages, and a reference from docstrings."""

from __future__ import annotations

from sphinx.application import Sphinx

from treegen.version import VERSION

project = "treegen"
author = "the authors of treegen"
version = release = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"treegen {VERSION}"
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 3  # links to headings are checked; anchors are those that GitHub gives the same headings
nitpicky = True  # a role that names no object is a warning
nitpick_ignore_regex = [(r"py:(class|data|obj)", r".*")]  # but for types in signatures, also of other libraries

default_role = "code"  # single backticks in docstrings are code
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
maximum_signature_line_length = 88
napoleon_numpy_docstring = False


def indented_is_code(_app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Makes literal blocks of indented paragraphs in docstrings: drawings, and examples."""
    for number in range(len(lines) - 1, 0, -1):
        begins = lines[number].startswith("    ") and not lines[number - 1].strip()
        before = next((line for line in reversed(lines[:number]) if line.strip()), "")
        if begins and not before.startswith(" ") and not before.endswith(":"):
            lines[number:number] = ["::", ""]


def setup(app: Sphinx) -> None:
    """Runs before Napoleon rewrites sections, so that these are still told by their titles."""
    app.connect("autodoc-process-docstring", indented_is_code, priority=400)
