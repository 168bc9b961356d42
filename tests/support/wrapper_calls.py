"""Page tables for the wrapper, and its results compared with the oracle."""

from __future__ import annotations

from typing import Any

import torch

from support.page_requests import Requests, slots
from treegen import Tree
from treegen.backends import oracle

HEADS, KV_HEADS, DIM = 4, 2, 16
POOL = 30
LOG2_E = 1.4426950408889634


def pages(page_size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, [pages, page_size, KV heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, POOL, page_size, KV_HEADS, DIM, generator=generator).to(dtype)
    return k, v


def queries(made: Requests, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(len(made), HEADS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(
    made: Requests, page_size: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, lse: Any
) -> None:
    """Every request alone, by the oracle."""
    tolerance = oracle.TOLERANCE[{torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[q.dtype]]
    for row, (listed, tokens) in enumerate(made):
        alone = Tree.from_parents([-1], [tokens], kv=[slots(listed, tokens, page_size)])
        expected_out, expected_lse = oracle.reference(alone, q[row : row + 1], k, v)
        assert oracle.error(out[row : row + 1], expected_out) <= tolerance
        assert oracle.error(lse[row : row + 1], expected_lse * LOG2_E) <= tolerance
