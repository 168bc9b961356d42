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
from treegen.target.tile_config import lanes_of, tile_work


class TokenRates(NamedTuple):
    """Microseconds per token that a kernel for running batches reads.

    token_us: to read its keys and values, where all SMs read. lone_token_us: of a thread block that is alone on its SM.
    item_token_us: to compute it for all heads of a work item, where all SMs are full of items. window_left: the tokens
    before its own that a row reads, -1 for all.
    """

    token_us: float
    lone_token_us: float
    item_token_us: float
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
        facts, (flops, loaded) = facts_of(target), tile_work(config, shape)
        of_tile = SimpleNamespace(tile_flops=flops, tile_bytes=loaded, **facts)
        lone_us, full_us = (float(ITEMS.terms[name](of_tile)) / config.tokens for name in ("lone_tile", "full_tile"))
        item_us = full_us * lanes_of(config, shape) / target.sms
        return cls(shape.kv_token_bytes / facts["memory_bytes_per_us"], lone_us, item_us, window_left)
