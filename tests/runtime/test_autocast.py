"""Calls under torch.autocast, which changes the types of what PyTorch multiplies: results are those without it."""

from __future__ import annotations

import pytest
import torch

import treegen
from treegen import LiveBatch, PageTable, Shape, Tree

TREE = Tree.parse("1,3/20,4")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["deft-node", "medusa"])
def test_kernels_of_trees(strategy: str, dtype: str) -> None:
    kernel = treegen.compile(TREE, strategy=strategy, shape=Shape(4, 2, 16, dtype=dtype), backend="torch")
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    q, (k, v) = torch.randn(3, 4, 16).to(kind), torch.randn(2, 32, 2, 16).to(kind)
    expected = kernel(q, k, v)
    for of_products in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=of_products):
            assert torch.equal(kernel(q, k, v), expected)


def test_kernels_of_batches() -> None:
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    pages = PageTable(table, torch.tensor([20, 30], dtype=torch.int32), 8)
    kernel = treegen.compile_batch(Shape(4, 2, 16, dtype="fp32", page_size=16), pages, max_tokens=64, backend="torch")
    batch = LiveBatch(16)
    batch.add(20)
    batch.add(30)
    kernel.update(batch)
    kernel.step()
    q, cache = torch.randn(2, 4, 16), torch.randn(8, 16, 2, 16)
    expected = kernel(q, cache, cache)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kernel(q, cache, cache), expected)
