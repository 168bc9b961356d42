"""Functions that change scores, for tests of several modules."""

from typing import Any

import torch

BIAS = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
GRID = (torch.arange(64)[:, None] * 7 + torch.arange(400)[None, :]) % 5 != 0


def gridded(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return GRID[b, kv_idx] & ~((h == 1) ^ (kv_idx < 7)) | (kv_idx == q_idx)
