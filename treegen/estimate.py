"""The account of a plan: what it reads, writes and computes, counted from its arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.targets import Target
from treegen.tiles import padded

_LSE_BYTES = 4
_PARTIAL_BYTES = 4
_MASK_BYTES = 8  # two int32 per run of tokens
BLOCKS_PER_SM = 2


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one call moves and computes; sums over calls with `+`."""

    kv_unique_bytes: int  # bytes; keys and values that some row sees, once
    kv_hbm_bytes: int  # bytes; every group's read range once (the papers' count)
    kv_l2_bytes: int  # bytes; loaded by work items beyond kv_unique_bytes: re-reads by row tiles and by other groups
    q_bytes: int  # bytes; queries loaded by work items
    out_bytes: int  # bytes; out and lse written
    partial_bytes: int  # bytes; partial out and lse, written once and read once
    mask_bytes: int  # bytes; row intervals of masked runs
    useful_flops: int  # floating-point operations on visible (row, token) pairs
    padded_flops: int  # floating-point operations of whole tiles, padding included
    items: int  # thread blocks of all stage-1 launches
    launches: int  # kernel launches
    waves: float  # items over the thread blocks that the target holds, two per SM

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def padding_waste(self) -> float:
        """The fraction of executed operations that no visible pair needs."""
        return 1 - self.useful_flops / self.padded_flops if self.padded_flops else 0.0


def account(plan: Plan, schedule: Schedule, tree: Tree, shape: Shape, target: Target) -> Estimate:
    """Counts bytes, operations, thread blocks and launches of a plan and its schedule for an attention shape."""
    loaded = blocks = query_rows = masked_runs = 0
    padded_flops = 0
    per_pair = 2 * (padded(shape.head_dim) + padded(shape.head_dim_v))
    for c, tile in enumerate(schedule.classes):
        chosen = slice(schedule.class_indptr[c], schedule.class_indptr[c + 1])
        full, packed, rows = (schedule.column(name)[chosen] for name in ("tiles", "block_tiles", "rows"))
        full_tiles, packed_tiles = int(full.sum()), int(packed.sum())
        head_tiles = -(-shape.group // tile.rows)
        blocks += len(rows) * shape.num_kv_heads * head_tiles
        query_rows += int(rows.sum())
        padded_flops += (
            (full_tiles + packed_tiles) * tile.rows * tile.tokens * shape.num_kv_heads * head_tiles * per_pair
        )
        # Blocks are numbered through all classes in item order, so each class owns one stretch of them.
        begin = int(schedule.column("block0")[chosen].min(initial=0)) if packed_tiles else 0
        lengths = schedule.blocks[begin : begin + packed_tiles * tile.blocks_per_tile, 1]
        loaded += (full_tiles * tile.tokens + int(lengths.sum())) * head_tiles
        masked_runs += (full_tiles + int(np.count_nonzero(lengths))) if tile.masked else 0
    unique = tree.unique_tokens * shape.kv_token_bytes
    heads = shape.num_qo_heads
    return Estimate(
        kv_unique_bytes=unique,
        kv_hbm_bytes=int(plan.read_tokens.sum()) * shape.kv_token_bytes,
        kv_l2_bytes=max(0, loaded * shape.kv_token_bytes - unique),
        q_bytes=query_rows * heads * shape.head_dim * shape.dtype_bytes,
        out_bytes=tree.num_rows * heads * (shape.head_dim_v * shape.dtype_bytes + _LSE_BYTES),
        partial_bytes=2 * schedule.num_slots * heads * (shape.head_dim_v * _PARTIAL_BYTES + _LSE_BYTES),
        mask_bytes=masked_runs * _MASK_BYTES,
        useful_flops=tree.path_tokens * heads * 2 * (shape.head_dim + shape.head_dim_v),
        padded_flops=padded_flops,
        items=blocks,
        launches=schedule.launches,
        waves=blocks / (BLOCKS_PER_SM * target.sms),
    )
