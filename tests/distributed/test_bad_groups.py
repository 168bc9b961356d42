"""What is given in place of groups and meshes is named, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from treegen import PageTable, Shape
from treegen.distributed import Parallel, compile_batch, merge_across
from treegen.ir.errors import InputError

STATES = torch.zeros(2, 4, 16), torch.zeros(2, 4)


def batch_kernel(positions: Any) -> object:
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    shape = Shape(4, 2, 16, dtype="fp32", page_size=16)
    return compile_batch(shape, PageTable(table, lengths, 4), Parallel(), max_tokens=64, positions=positions)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Parallel(tensor="tp"), "tensor = str: is no process group; give one of torch.distributed"),
    (lambda: Parallel(context=3), "context = int: is no process group"),
    (lambda: Parallel.over(None), "mesh = NoneType: is no DeviceMesh"),
    (lambda: merge_across(*STATES, None), "group = NoneType: is no process group"),
    (lambda: batch_kernel([0, 1]), "positions = list: is not a tensor; give integers"),
    (lambda: batch_kernel(torch.zeros(2)), r"positions = torch.float32 of shape \(2,\) on cpu: are no integers in"),
    (lambda: batch_kernel(torch.zeros(2, 1, dtype=torch.int64)), "are no integers in one dimension on cpu"),
])  # fmt: skip
def test_it_is_named(make: Callable[[], object], text: str) -> None:
    with pytest.raises(InputError, match=text):
        make()
