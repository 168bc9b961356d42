"""The account of a plan: what it reads, writes and computes, counted from its arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from treegen.ir.arrays import offsets
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.targets import Target
from treegen.tiles import padded

BLOCKS_PER_SM = 2
"""Thread blocks that one SM is taken to hold at a time; tile classes are chosen so that they fit."""
_FP32_BYTES = 4
_MASK_BYTES = 8  # lo and hi, int32
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one call moves and computes; estimates of several calls add up with `+`."""

    kv_unique_bytes: int  # bytes; keys and values of tokens that some row sees, each once
    kv_hbm_bytes: int  # bytes; every group's read range once (as the papers count)
    kv_l2_bytes: int  # bytes; loaded by work items beyond kv_unique_bytes: re-reads by row tiles and by other groups
    q_bytes: int  # bytes; queries loaded by work items
    out_bytes: int  # bytes; out and lse of every row, written
    partial_bytes: int  # bytes; partial out and lse in float32, written once and read once
    score_bytes: int  # bytes; scores of unfused attention, written and read four times (DeFT, table 4)
    mask_bytes: int  # bytes; who sees what, in the form that the plan stores it (see `mask_bytes`)
    useful_flops: int  # floating-point operations on visible (row, head, token) triples
    padded_flops: int  # floating-point operations of whole tiles, padding included
    items: int  # thread blocks of all stage-1 launches
    launches: int  # kernel launches
    waves: float  # items / thread blocks that the target holds at a time (BLOCKS_PER_SM per SM)

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def padding_waste(self) -> float:
        """The fraction of the executed operations that no visible token needs; 0 when nothing is executed."""
        return 1 - self.useful_flops / self.padded_flops if self.padded_flops else 0.0


def account(plan: Plan, schedule: Schedule, tree: Tree, shape: Shape, target: Target) -> Estimate:
    """The account of a plan and of its schedule, for an attention shape.

    Two matrix products are counted, and every load that a work item does, whether or not L2 serves it. `waves` assumes
    that BLOCKS_PER_SM thread blocks are resident on every SM.
    """
    full, packed, rows = (schedule.column(name).astype(np.int64) for name in ("tiles", "block_tiles", "rows"))
    tile0, block0 = schedule.column("tile0"), schedule.column("block0")
    tile_ends = offsets(schedule.tiles[:, 1])
    block_ends, block_runs = offsets(schedule.blocks[:, 1]), offsets(schedule.blocks[:, 1] > 0)
    loaded = mask_runs = padded_flops = blocks = 0
    heads, unique = shape.num_qo_heads, tree.unique_tokens
    for index, tile in enumerate(schedule.classes):
        of_class = slice(schedule.class_indptr[index], schedule.class_indptr[index + 1])
        begin = block0[of_class]
        end = begin + packed[of_class] * tile.blocks_per_tile
        tokens = tile_ends[tile0[of_class] + full[of_class]] - tile_ends[tile0[of_class]]
        tokens += block_ends[end] - block_ends[begin]
        # A row whose heads need several tiles has that many thread blocks per KV head, and each loads the KV again.
        head_tiles = -(-shape.group // tile.rows)
        per_item = shape.num_kv_heads * head_tiles
        loaded += int(tokens.sum()) * head_tiles
        blocks += len(tokens) * per_item
        steps = int((full[of_class] + packed[of_class]).sum())
        per_step = tile.rows * tile.tokens * 2 * (padded(shape.head_dim) + padded(shape.head_dim_v))
        if tile.fused:
            padded_flops += steps * per_step * per_item
        else:
            padded_flops += int((rows[of_class] * tokens).sum()) * heads * 2 * (shape.head_dim + shape.head_dim_v)
        if tile.mask != "none":
            mask_runs += int((full[of_class] + block_runs[end] - block_runs[begin]).sum())
    return Estimate(
        kv_unique_bytes=unique * shape.kv_token_bytes,
        kv_hbm_bytes=int(plan.read_tokens.sum()) * shape.kv_token_bytes,
        kv_l2_bytes=(loaded - unique) * shape.kv_token_bytes,
        q_bytes=int(rows.sum()) * heads * shape.head_dim * shape.dtype_bytes,
        out_bytes=tree.num_rows * heads * (shape.head_dim_v * shape.dtype_bytes + _FP32_BYTES),
        partial_bytes=2 * schedule.num_slots * heads * (shape.head_dim_v + 1) * _FP32_BYTES,
        score_bytes=score_bytes(plan, shape),
        mask_bytes=mask_bytes(plan, shape, mask_runs),
        useful_flops=tree.path_tokens * heads * 2 * (shape.head_dim + shape.head_dim_v),
        padded_flops=padded_flops,
        items=blocks,
        launches=schedule.launches,
        waves=blocks / (BLOCKS_PER_SM * target.sms),
    )


def mask_bytes(plan: Plan, shape: Shape, interval_runs: int) -> int:
    """Bytes of a plan's masks: 8 per run that a masked work item walks ("interval"), else as their authors count.

    A 64-bit word per token of a group ("token-bits"), one bit per row and token in words of 64 tokens ("row-bits"), an
    element of q's type per row and token ("dense"); once for all heads (DeFT, table 4).
    """
    tokens, rows = plan.read_tokens, plan.group_rows[plan.segment_group].astype(np.int64)
    match plan.mask:
        case "interval":
            return interval_runs * _MASK_BYTES
        case "token-bits":
            return int(tokens.sum()) * _WORD_BYTES
        case "row-bits":
            words = -(-np.bincount(plan.segment_group, tokens, len(plan)).astype(np.int64) // (8 * _WORD_BYTES))
            return int((plan.group_rows * words).sum()) * _WORD_BYTES
        case "dense":
            return int((tokens * rows).sum()) * shape.dtype_bytes


def score_bytes(plan: Plan, shape: Shape) -> int:
    """Bytes of scores that unfused attention writes and reads per head: products, scaled, masked, softmax (DeFT, table
    4); 0 for a fused plan.
    """
    if plan.mask != "dense":
        return 0
    rows = plan.group_rows[plan.segment_group].astype(np.int64)
    return 8 * int((plan.read_tokens * rows).sum()) * shape.num_qo_heads * shape.dtype_bytes
