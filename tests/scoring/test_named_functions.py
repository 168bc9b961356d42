"""Errors about score options name what the caller gave: the tensor, or the function and its line."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import treegen
from support.rejections import rejected
from treegen import Tree
from treegen.ir.errors import InputError

TREE = Tree.parse("30(9*3)")
HERE = Path(__file__).name


def halved(score: Any) -> Any:
    return score / 2


def texts(*_: Any) -> Any:
    return "a text"


def line_of(function: Callable[..., Any]) -> str:
    return f"{HERE}:{inspect.getsourcelines(function)[1]}:"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_slopes_of_a_type_that_kernels_do_not_read(dtype: torch.dtype) -> None:
    slopes = torch.ones(32).to(dtype)
    words = (f"alibi_slopes = {dtype}: ", "torch.float32", "give alibi_slopes.float()")
    rejected(lambda: treegen.compile(TREE, alibi_slopes=slopes), InputError, *words)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_slopes_of_other_types(dtype: torch.dtype) -> None:
    assert "ALiBi" in treegen.compile(TREE, alibi_slopes=torch.ones(32, dtype=dtype)).explain()


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_functions_with_other_parameters(name: str) -> None:
    parameters = {"score_mod": "score, b, h, q_idx, kv_idx", "mask_mod": "b, h, q_idx, kv_idx"}[name]
    words = (f"{name} = {line_of(halved)} TypeError: halved() takes 1", f"give {name}({parameters})")
    rejected(lambda: treegen.compile(TREE, **{name: halved}), InputError, *words)  # type: ignore[arg-type]
    tanh = (f"{name} = tanh: TypeError: tanh() takes 1", f"give {name}({parameters})")
    rejected(lambda: treegen.compile(TREE, **{name: torch.tanh}), InputError, *tanh)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_functions_with_other_results(name: str) -> None:
    words = (f"{name} = {line_of(texts)} uses str 'a text'", "write it with arithmetic")
    rejected(lambda: treegen.compile(TREE, **{name: texts}), InputError, *words)  # type: ignore[arg-type]
