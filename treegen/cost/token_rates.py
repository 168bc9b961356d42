"""The time that tokens take in a kernel for running batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.shape import Shape
from treegen.target.cost_terms import ITEMS, facts_of
from treegen.target.targets import Target
from treegen.target.tile_config import tile_work


class TokenRates(NamedTuple):
    """Microseconds per token that a kernel for running batches reads.

    token_us: to read its keys and values, where all SMs read. lone_token_us: of a thread block that is alone on its SM.
    window_left: the tokens before its own that a row reads, -1 for all.
    """

    token_us: float
    lone_token_us: float
    window_left: int = -1

    def read_of(self, tokens: int) -> int:
        """Returns how many of its tokens a request reads: those in its window."""
        return tokens if self.window_left < 0 else min(tokens, 1 + self.window_left)

    def read(self, tokens: Ints | Longs, shared: Ints | Longs) -> tuple[Ints | Longs, Ints | Longs]:
        """Returns how many of its tokens, and of those that it shares, each request reads: those in its window."""
        if self.window_left < 0:
            return tokens, shared
        before = np.maximum(tokens - (1 + self.window_left), 0)
        return tokens - before, np.maximum(shared - before, 0)

    @classmethod
    def of(cls, config: KernelConfig, shape: Shape, target: Target, window_left: int = -1) -> TokenRates:
        """Returns the rates of launches in one kernel config."""
        facts, (flops, _) = facts_of(target), tile_work(config, shape)
        lone_tile_us = float(ITEMS.terms["lone_tile"](SimpleNamespace(tile_flops=flops, **facts)))
        return cls(shape.kv_token_bytes / facts["memory_bytes_per_us"], lone_tile_us / config.tokens, window_left)
