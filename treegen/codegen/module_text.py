"""The text of emitted modules: templates rendered, and the shared functions that a kernel uses put in front of it."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import NamedTuple

import jinja2

from treegen.codegen.function_source import definitions_for
from treegen.codegen.key_table import key_table
from treegen.codegen.line_breaks import broken
from treegen.codegen.merge_context import MergeContext
from treegen.codegen.partial_context import PartialContext
from treegen.ir.keys import KernelKey, MergeKey


class ModuleText(NamedTuple):
    """A module's text, and the digest of the text without the digest itself."""

    text: str
    digest: str


def module_text(kernel: str, key: KernelKey | MergeKey, context: PartialContext | MergeContext) -> ModuleText:
    """Renders a module.

    Args:
        kernel: The kernel's name, which is that of its templates' folder.
        key: The key, which the module's head lists.
        context: What the templates read.

    Returns:
        The text and its digest.
    """
    code = broken(_environment().get_template(f"{kernel}/kernel.jinja").render(c=context))
    constants, functions = definitions_for(code)
    module = _environment().get_template(f"{kernel}/module.py.jinja")
    given = {"c": context, "key_table": key_table(key), "constants": constants, "functions": functions, "kernel": code}
    digest = hashlib.sha256(module.render(digest="", **given).encode()).hexdigest()[:32]
    return ModuleText(module.render(digest=digest, **given), digest)


def compile_templates() -> None:
    """Compiles the templates, which the first emission does otherwise: it takes tens of milliseconds, once."""
    for name in _environment().list_templates(extensions=["jinja"]):
        _environment().get_template(name)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("treegen.templates", "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
