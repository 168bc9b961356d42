"""Templates, and the modules that they make: each can be read at once, and stands alone."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache

import pytest

from support.canonical_kernels import canonical_kernels
from support.paths import ROOT
from treegen.codegen.emit import Source, emit_merge, emit_partial
from treegen.codegen.key_table import key_table
from treegen.codegen.line_breaks import MOST_COLUMNS
from treegen.ir.keys import KernelKey, MergeKey

TEMPLATES = ROOT / "templates"
SHARED = [TEMPLATES / "kernel_functions.py", TEMPLATES / "ptx_functions.py"]
MOST_LINES = 120
NAMES = list(canonical_kernels())


@cache
def source_of(name: str) -> Source:
    key = canonical_kernels()[name].key
    return emit_partial(key) if isinstance(key, KernelKey) else emit_merge(key)


def definitions(text: str) -> Iterator[tuple[str, str]]:
    """The names and texts of what a module defines."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = node.decorator_list[0].lineno
            yield node.name, "\n".join(text.splitlines()[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, ast.get_source_segment(text, node) or ""


def read(function: ast.AST) -> set[str]:
    """The names that code reads."""
    return {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def test_templates_are_short() -> None:
    lines = {path.relative_to(TEMPLATES): len(path.read_text().splitlines()) for path in TEMPLATES.rglob("*.jinja")}
    assert lines
    assert {path: count for path, count in lines.items() if count >= MOST_LINES} == {}


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_short_and_end_where_they_seem_to(name: str) -> None:
    text = source_of(name).text
    assert [line for line in text.splitlines() if len(line) > MOST_COLUMNS or line != line.rstrip()] == []
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert "\n\n\n\n" not in text


@pytest.mark.parametrize("name", NAMES)
def test_modules_stand_alone_and_hold_nothing_that_is_not_used(name: str) -> None:
    source = source_of(name)
    module = ast.parse(source.text)
    imports = [node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(each) for each in imports] == ["import triton", "import triton.language as tl"]
    defined = [one for one, _ in definitions(source.text)]
    assert len(set(defined)) == len(defined)
    used: set[str] = set()
    for function in (node for node in module.body if isinstance(node, ast.FunctionDef)):
        own = {argument.arg for argument in function.args.args}
        own |= {
            each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
        assert read(function) <= own | {*defined, "triton", "tl"} | set(dir(builtins))
        used |= read(function)
    assert set(defined) - used == {source.kernel}


@pytest.mark.parametrize("name", NAMES)
def test_what_kernels_share_is_copied_word_for_word(name: str) -> None:
    shared = {one: text for path in SHARED for one, text in definitions(path.read_text())}
    for one, text in definitions(source_of(name).text):
        if one in shared:
            assert text == shared[one]
        else:
            assert one == source_of(name).kernel or re.fullmatch(r"entry_\d|merge_heads", one)


def test_some_kernel_uses_each_shared_definition() -> None:
    shared = {one for path in SHARED for one, _ in definitions(path.read_text())}
    used = {one for name in NAMES for one, _ in definitions(source_of(name).text)}
    assert shared <= used


def test_some_kernel_uses_each_template() -> None:
    """A template that nothing includes or imports is named nowhere but in the folder."""
    texts = "\n".join(path.read_text() for path in TEMPLATES.rglob("*.jinja"))
    named = set(re.findall(r'(?:include|import) "([^"]+)"', texts))
    named |= {f"{kernel}/{file}.jinja" for kernel in ("partial_attention", "merge") for file in ("kernel", "module.py")}
    assert named == {path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.rglob("*.jinja")}


@pytest.mark.parametrize("name", NAMES)
def test_the_head_lists_the_key(name: str) -> None:
    source = source_of(name)
    head = ast.get_docstring(ast.parse(source.text)) or ""
    table = head.partition("\nKey:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.removeprefix("    ") for line in table] == key_table(source.key)
    given = [each.name for each in fields(source.key) if getattr(source.key, each.name) != each.default]
    assert [line.split()[0] for line in table] == given
    assert head.splitlines()[0].startswith(
        "Partial attention kernel: " if isinstance(source.key, KernelKey) else "Merge kernel: "
    )


def test_keys_that_differ_make_modules_that_differ() -> None:
    keys = {canonical_kernels()[name].key for name in NAMES}
    assert len({source_of(name).digest for name in NAMES}) == len(keys)


@pytest.mark.parametrize("kind", [KernelKey, MergeKey])
def test_the_canonical_kernels_have_several_values_of_every_field(kind: type[KernelKey] | type[MergeKey]) -> None:
    keys = [each.key for each in canonical_kernels().values() if isinstance(each.key, kind)]
    for field in fields(kind):
        assert len({getattr(key, field.name) for key in keys}) > 1, field.name


def test_inline_ptx_explains_its_operands() -> None:
    text = SHARED[1].read_text()
    calls = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call)]
    inline = [each for each in calls if ast.unparse(each.func) == "tl.inline_asm_elementwise"]
    assert len(inline) == 6
    for call in inline:
        code, constraints = call.args[:2]
        assert isinstance(code, ast.Constant)
        assert isinstance(constraints, ast.Constant)
        operands = constraints.value.split(",")
        assert {int(number) for number in re.findall(r"\$(\d+)", code.value)} <= set(range(len(operands)))
        lines = text.splitlines()[constraints.lineno - 1 : constraints.end_lineno]
        assert all(re.search(r"  # \$\d", line) for line in lines)
        assert len(lines) > 1
