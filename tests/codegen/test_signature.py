"""Signatures: emitted functions declare their parameters as these list them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from treegen import Shape
from treegen.codegen.emit import Source, emit_merge, emit_partial
from treegen.codegen.kernel_signature import KernelSignature, ParameterKind, Tensors, kernel_signature
from treegen.codegen.merge_forms import invariant_merge_key
from treegen.codegen.partial_keys import kernel_key
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.keys import KernelKey, MergeKey, ScoreCode
from treegen.scoring.options import ScoreOptions, Scoring

SHAPE = Shape(32, 8, 128, dtype="bf16", page_size=16)


def score_code(options: ScoreOptions) -> ScoreCode:
    scoring = Scoring.of(options)
    assert scoring is not None
    assert scoring.code is not None
    return scoring.code


TABLE, ROW = torch.zeros(4, 4), torch.zeros(4)
READING = score_code(ScoreOptions(lambda score, b, h, q_idx, kv_idx: score + TABLE[b, h] + ROW[kv_idx]))
CAPPED = score_code(ScoreOptions(logits_soft_cap=2.0))
PARTIAL = kernel_key(KernelConfig(64, 64, 16, "interval", 4, 3), SHAPE, SHAPE.page_size)
MERGE = invariant_merge_key(SHAPE)
KEYS: dict[str, KernelKey | MergeKey] = {
    "partial": PARTIAL,
    "dealt": replace(PARTIAL, work_list=True),
    "merging": replace(PARTIAL, epilogue_merge=True),
    "waiting": replace(PARTIAL, fused_merge=True),
    "scaled": replace(PARTIAL, kv_dtype="e4m3", scaled=True),
    "sinks": replace(PARTIAL, sinks=True),
    "recorded": replace(PARTIAL, recorded=True),
    "capped": replace(PARTIAL, scoring=CAPPED),
    "guarded": replace(PARTIAL, scoring=READING, guarded=True),
    "all": replace(
        PARTIAL, scoring=READING, sinks=True, scaled=True, work_list=True, epilogue_merge=True, fused_merge=True
    ),
    "merge": MERGE,
    "merge, sinks": replace(MERGE, sinks=True),
    "merge, recorded": replace(MERGE, recorded=True),
}


def emitted(key: KernelKey | MergeKey) -> Source:
    return emit_partial(key) if isinstance(key, KernelKey) else emit_merge(key)


def function_of(source: Source) -> ast.FunctionDef:
    functions = (node for node in ast.parse(source.text).body if isinstance(node, ast.FunctionDef))
    return next(function for function in functions if function.name == source.kernel)


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_functions_declare_what_signatures_list(key: KernelKey | MergeKey) -> None:
    signature, function = kernel_signature(key), function_of(emitted(key))
    declared = function.args.args
    assert [argument.arg for argument in declared] == [parameter.name for parameter in signature]
    assert [argument.annotation is not None for argument in declared] == [each.constant for each in signature]
    assert {ast.unparse(each.annotation) for each in declared if each.annotation} == {"tl.constexpr"}
    (decorator,) = function.decorator_list
    left_out = [keyword.value for keyword in decorator.keywords] if isinstance(decorator, ast.Call) else []
    names = [name for value in left_out for name in ast.literal_eval(value)]
    assert names == [parameter.name for parameter in signature if not parameter.specialized]


def test_lines_of_parameters(golden: Callable[[str], None]) -> None:
    heads = []
    for name, key in KEYS.items():
        source = emitted(key)
        function = function_of(source)
        lines = source.text.splitlines()[function.decorator_list[0].lineno - 1 : function.body[0].lineno - 1]
        heads += [f"# {name}", *lines, ""]
    golden("\n".join(heads))


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_pointers_of_a_call_come_first(key: KernelKey | MergeKey) -> None:
    taken, signature = KernelSignature.of(key).tensors, kernel_signature(key)
    tensors = [parameter.name for parameter in signature if parameter.kind is ParameterKind.TENSOR]
    assert tensors == list(Tensors._fields[taken])
    assert tensors == [parameter.name for parameter in signature][: len(tensors)]
    expected = (3, 7) if isinstance(key, MergeKey) else (0, 8 if key.fused_merge else 7)
    assert (taken.start, taken.stop) == expected


def test_names_are_unique_and_lines_are_in_order() -> None:
    for key in KEYS.values():
        signature = kernel_signature(key)
        names, lines = [parameter.name for parameter in signature], [parameter.line for parameter in signature]
        assert len(set(names)) == len(names)
        assert lines == sorted(lines)
        assert set(lines) == set(range(lines[-1] + 1))
