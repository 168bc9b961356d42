"""KERNEL_VERSION and SPACE_VERSION: what kernels and space were when they were last raised.

Measured policies are kept for as long as these numbers stay (treegen.version), so a change of what they stand for must
not go unnoticed. Docstrings, comments, formatting and the names of local variables do not count.
"""

import ast
import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from typing import get_args

from treegen import Shape
from treegen.codegen.emit import Source
from treegen.ir.plan import MergePlace
from treegen.search import path_cuts, split_estimates, walk_layout
from treegen.target.targets import target_from
from treegen.tuning.kernel_variants import kernel_sources
from treegen.version import KERNEL_VERSION, SPACE_VERSION

SHAPES = (
    Shape(32, 8, 128, dtype="fp16"),
    Shape(32, 8, 128, dtype="bf16", page_size=16),
)


class _Renamed(ast.NodeTransformer):
    """Drops docstrings and renames the local variables of functions to v0, v1, ... in order of their first use."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        local = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        local -= {argument.arg for argument in node.args.args}
        names: dict[str, str] = {}
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id in local:
                each.id = names.setdefault(each.id, f"v{len(names)}")
        node.body = _without_docstring(node.body)
        return node


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if has_docstring else body


def normalised(text: str) -> str:
    """The code of a module without what does not reach the machine."""
    module = ast.parse(text)
    module.body = _without_docstring(module.body)
    return ast.unparse(_Renamed().visit(module))


def described(source: Source) -> str:
    """A digest of a module's code, and its key without what is left at its default."""
    digest = hashlib.sha256(normalised(source.text).encode()).hexdigest()[:16]
    values = {each.name: (getattr(source.key, each.name), each.default) for each in fields(source.key)}
    given = {name: value for name, (value, default) in values.items() if value != default}
    return f"{digest} {json.dumps({'kernel': source.kernel, **given}, sort_keys=True)}"


def test_kernels_are_those_of_kernel_version(golden: Callable[[str], None]) -> None:
    """If this fails: can the change make another policy the fastest? If so raise KERNEL_VERSION in treegen/version.py
    and measure the shipped policies again; else run with --update-golden.
    """
    lines = [described(source) for shape in SHAPES for source in kernel_sources(shape, target_from("h200"))]
    golden("\n".join([f"KERNEL_VERSION {KERNEL_VERSION}", *lines]))


def test_the_space_is_that_of_space_version(golden: Callable[[str], None]) -> None:
    """If this fails: can a policy that is new beat those measured so far? If so raise SPACE_VERSION in
    treegen/version.py and measure the shipped policies again; else run with --update-golden.
    """
    facts = {
        "WHOLE": walk_layout.WHOLE,
        "CUT": walk_layout.CUT,
        "MOST_CUTS": path_cuts.MOST_CUTS,
        "BLOCKS_PER_SM": split_estimates.BLOCKS_PER_SM,
        "merges": get_args(MergePlace),
        "walks": [str(each) for each in walk_layout.layout_of(SHAPES[0], target_from("h200"), 256, 2).walks],
    }
    golden("\n".join([f"SPACE_VERSION {SPACE_VERSION}", *(f"{name} {value}" for name, value in facts.items())]))


def test_comments_docstrings_and_local_names_do_not_count() -> None:
    text = '"""Title."""\n\ndef f(a):\n    """Says."""\n    part = a + 1  # why\n    return part\n'
    other = "def f(a):\n    sum_of = (a +\n        1)\n    return sum_of\n"
    assert normalised(text) == normalised(other)
    assert normalised(text) != normalised(other.replace("1", "2"))
    assert normalised(text) != normalised(other.replace("(a)", "(b)").replace("a +", "b +"))  # a kernel's arguments
