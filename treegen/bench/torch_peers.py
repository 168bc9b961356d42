"""PyTorch's attention functions as providers: one call over all of a tree's KV, with a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treegen.bench.providers import TimedCall, UnavailableError
from treegen.ir.arrays import offsets, ragged, ragged_ranges
from treegen.tuning.kernel_meter import Case, free_bytes

_MASK_COPIES = 4
"""Bytes of a mask's entry: a bool, and the bias that PyTorch makes of it."""
_FLEX_KERNELS: tuple[dict[str, str], ...] = ({}, {"BACKEND": "TRITON"})
"""Options of FlexAttention's kernels: PyTorch's choice, and the kernel for many rows."""


class _Gathered:
    """A case's tensors for dense attention: rows in rank order, and all seen tokens in order of their KV slots.

    Where the cache holds just these tokens it is used as it is; otherwise every call gathers them.
    """

    def __init__(self, case: Case) -> None:
        tree, device = case.tree, case.q.device
        spans, order = tree.topology.spans, tree.topology.row_of_rank
        first = offsets(tree.tokens)[spans.node] + spans.start
        slot = ragged_ranges(tree.kv.start, tree.kv.length)[ragged_ranges(first, spans.lengths)]
        span, _ = ragged(spans.lengths)
        by_slot = np.argsort(slot, kind="stable")
        self._case = case
        self.lo, self.hi = (torch.from_numpy(rank[span][by_slot].copy()).to(device) for rank in (spans.lo, spans.hi))
        slots = case.k_cache.shape[0] * case.shape.page_size
        in_order = len(slot) == slots and np.array_equal(slot[by_slot], np.arange(slots))
        self._slots = None if in_order else torch.from_numpy(slot[by_slot]).to(device)
        ranked = np.array_equal(order, np.arange(len(order)))
        self._order = None if ranked else torch.from_numpy(order.astype(np.int64)).to(device)

    def queries(self) -> torch.Tensor:
        """Returns q in rank order: `[rows, num_qo_heads, head_dim]`."""
        return self._case.q if self._order is None else self._case.q[self._order]

    def keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of the seen tokens: `[tokens, num_kv_heads, head_dim]` each."""
        caches = (
            cache.flatten(0, -3) if cache.dim() == 4 else cache for cache in (self._case.k_cache, self._case.v_cache)
        )
        keys, values = (cache if self._slots is None else cache[self._slots] for cache in caches)
        return keys, values

    def in_order(self, out: torch.Tensor) -> torch.Tensor:
        """Reorders results from rank order to the caller's order of rows."""
        if self._order is None:
            return out
        result = torch.empty_like(out)
        result[self._order] = out
        return result


@dataclass(frozen=True, slots=True)
class Sdpa:
    """torch.nn.functional.scaled_dot_product_attention with a bool mask; every head of a group is a row."""

    name: str = "sdpa"

    def prepare(self, case: Case) -> TimedCall:
        """Makes the mask, `[rows * group, tokens]`."""
        gathered, shape, rows = _Gathered(case), case.shape, case.tree.num_rows
        entries = rows * shape.group * len(gathered.lo)
        free = free_bytes(case.q.device)
        if free is not None and 2 * _MASK_COPIES * entries > free:
            raise UnavailableError(f"the mask's {entries:.2g} entries take more than half of the free memory")
        rank = torch.arange(rows, device=case.q.device).repeat_interleave(shape.group)[:, None]
        mask = (gathered.lo[None, :] <= rank) & (rank < gathered.hi[None, :])

        def call() -> torch.Tensor:
            keys, values = gathered.keys_and_values()
            query = gathered.queries().view(rows, shape.num_kv_heads, shape.group, -1)
            query = query.transpose(0, 1).flatten(1, 2)[None]
            out = torch.nn.functional.scaled_dot_product_attention(
                query, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], mask
            )
            out = out[0].view(shape.num_kv_heads, rows, shape.group, -1).transpose(0, 1).flatten(1, 2)
            return gathered.in_order(out)

        return call


@dataclass(frozen=True, slots=True)
class Flex:
    """torch.nn.attention.flex_attention with a block mask, compiled for the case.

    Where PyTorch's kernel for few rows does not compile, the kernel for many rows is used.
    """

    name: str = "flex"

    def prepare(self, case: Case) -> TimedCall:
        """Makes the block mask, and compiles."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        gathered, shape = _Gathered(case), case.shape
        lo, hi = gathered.lo, gathered.hi

        def sees(batch: Any, head: Any, rank: Any, token: Any) -> Any:
            return (lo[token] <= rank) & (rank < hi[token])

        mask = create_block_mask(sees, None, None, case.tree.num_rows, len(lo), device=case.q.device)
        torch._dynamo.reset()
        compiled: Any = torch.compile(flex_attention, dynamic=False)

        def attend(kernel: dict[str, str]) -> torch.Tensor:
            query, keys, values = (
                part.transpose(0, 1)[None] for part in (gathered.queries(), *gathered.keys_and_values())
            )
            out = compiled(query, keys, values, block_mask=mask, enable_gqa=shape.group > 1, kernel_options=kernel)
            return gathered.in_order(out[0].transpose(0, 1))

        failed = ""
        for kernel in _FLEX_KERNELS:
            try:
                attend(kernel)
            except torch._dynamo.exc.TorchDynamoException as cause:
                failed = str(cause).partition("\n")[0]
            else:
                return lambda: attend(kernel)
        raise UnavailableError(f"FlexAttention does not compile: {failed}")
