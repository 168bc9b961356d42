"""Switches of the public functions take True and False, and nothing that is merely true or false."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import treegen
from support.rejections import rejected
from treegen import PageTable, Shape, Tree, TreeAttentionWrapper
from treegen.ir.errors import InputError

TREE, SHAPE = Tree.parse("4(2*2)"), Shape(2, 1, 32, page_size=16)
PAGES = PageTable(torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32), num_pages=4)

SWITCHES: dict[str, tuple[Callable[..., object], str]] = {
    **{f"compile {name}": (lambda **given: treegen.compile(TREE, **given), name)
       for name in ("autotune", "batch_invariant", "isolated")},
    "compile_batch": (lambda **given: treegen.compile_batch(SHAPE, PAGES, max_tokens=32, **given), "batch_invariant"),
    **{f"wrapper {name}": (TreeAttentionWrapper, name) for name in ("use_cuda_graph", "isolated", "by_request")},
}  # fmt: skip


@pytest.mark.parametrize("value", ["no", 0, 1, np.zeros((2, 2)), np.True_, torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("name", SWITCHES)
def test_other_types_are_errors(name: str, value: Any) -> None:
    make, switch = SWITCHES[name]
    rejected(lambda: make(**{switch: value}), InputError, f"{switch} = ", "is not a bool", "give True")
