"""Tests reach treegen through names that it shows: none of them takes a private attribute or name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

OWN = {"self", "cls"}
OTHERS = {
    "_asdict": "a method of NamedTuple",
    "_replace": "a method of NamedTuple",
    "_fields": "an attribute of NamedTuple",
    "_exit": "os._exit",
    "_dynamo": "torch._dynamo",
    "_subclasses": "torch._subclasses",
    "_C": "torch._C",
    "_cuda_getDriverVersion": "torch._C",
    "_active": "an attribute of Triton's driver",
    "_get_np_dtype": "a function of Triton's interpreter",
    "_patch_lang": "a function of Triton's interpreter",
    "_batch_prefill_wrappers": "an attribute of FlashInfer's cascade wrapper",
    "_backend": "an attribute of FlashInfer's prefill wrapper",
    "_repr_html_": "the method by which notebooks draw values",
    "_attn_implementation": "the name of a model's attention in Transformers",
}
"""Private names of other packages."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS


def private_names(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each private attribute, import and patch of a module, but for those of its own objects."""
    made = {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    made |= {node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute) and owner(node) in OWN}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in made:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, each.name) for each in node.names if is_private(each.name))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "delattr"):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            yield from ((node.lineno, each) for each in texts if is_private(each.rpartition(".")[2]))


def owner(node: ast.Attribute) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.stem)
def test_no_private_names(path: Path) -> None:
    assert list(private_names(ast.parse(path.read_text("utf-8")))) == []


@pytest.mark.parametrize(
    "code",
    ["kernel._plan", "from treegen.ir.plan import _checked", "patch.setattr(module, '_made', 1)",
     "patch.setattr('treegen.cli.doctor._compiler', 1)"],
)  # fmt: skip
def test_private_names_are_found(code: str) -> None:
    assert len(list(private_names(ast.parse(code)))) == 1
