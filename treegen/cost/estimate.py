"""The account of a plan: what it reads, writes and computes, counted from its arrays, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import numpy as np

from treegen.cost.analytic import Times, times
from treegen.cost.launch_counts import FP32_BYTES, item_launches, merge_launches
from treegen.cost.profiled import launches_us
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.schedule.passes.fuse_merge import in_one_launch, waits
from treegen.target.problem import Problem

_INTERVAL_BYTES = 8  # lo and hi, int32
_WORD_BYTES = 8


CostModel: TypeAlias = Literal["analytic", "profiled"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one call moves and computes, and its time; estimates of several calls add up with `+`."""

    kv_unique_bytes: int  # bytes; keys and values of tokens that some row sees, each once
    kv_hbm_bytes: int  # bytes; every group's read range once (as the papers count)
    kv_l2_bytes: int  # bytes; loaded by work items beyond kv_unique_bytes: re-reads by row tiles and by other groups
    q_bytes: int  # bytes; queries loaded by work items
    out_bytes: int  # bytes; out and lse of every row, written
    partial_bytes: int  # bytes; partial out and lse, written and read
    score_bytes: int  # bytes; scores of unfused attention, written and read four times (DeFT, table 4)
    mask_bytes: int  # bytes; who sees what, in the form that the plan stores it (see `mask_bytes`)
    useful_flops: int  # floating-point operations on visible (row, head, token) triples
    padded_flops: int  # floating-point operations of whole tiles, padding included
    items: int  # thread blocks of all stage-1 launches, or entries of their lists
    launches: int  # kernel launches
    waves: float  # items / thread blocks that the target holds at a time, added up over launches
    time_us: float  # microseconds; by a cost model

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def padding_waste(self) -> float:
        """The fraction of the executed operations that no visible token needs; 0 when nothing is executed."""
        return 1 - self.useful_flops / self.padded_flops if self.padded_flops else 0.0


def account(
    plan: Plan,
    schedule: Schedule,
    problem: Problem,
    model: CostModel = "analytic",
    *,
    fixed: bool = False,
) -> Estimate:
    """The account of a plan and of its schedule, for an attention shape, and its time on a target.

    model: "analytic" (treegen.cost.analytic), or "profiled" for launches of work items (treegen.cost.profiled; the
    analytic model's tasks where the target has no measured grid). Two matrix products are counted, and every load that
    a work item does, whether or not L2 serves it. fixed: whether launches are those of a capacity, among which none
    waits in another's place (treegen.schedule.passes.fuse_merge).
    """
    return assess(plan, schedule, problem, model, fixed=fixed)[0]


def assess(
    plan: Plan,
    schedule: Schedule,
    problem: Problem,
    model: CostModel = "analytic",
    *,
    fixed: bool = False,
) -> tuple[Estimate, Times]:
    """The account, and what its time is made of."""
    tree, shape, target = problem
    schedule = schedule if fixed else in_one_launch(schedule)
    items, merges = item_launches(plan, schedule, problem), merge_launches(schedule, shape)
    heads, unique = shape.num_qo_heads, tree.unique_tokens
    partials = schedule.num_slots + int((schedule.merge_rows < 0).sum())
    partials += len(schedule.merge_slots) + len(schedule.epilogue_slots)
    blocks, loads = int(items.turns.sum()), int(items.kv_loads.sum())
    masks, scores = mask_bytes(plan, shape, int(items.mask_runs.sum())), score_bytes(plan, shape)
    q_bytes, flops = int(items.q_bytes.sum()), int(items.padded_flops.sum())
    unfused = 0
    if plan.mask == "dense":
        # PyTorch reads queries once and computes without tiles; what it materialises comes on top. KV is gathered (read
        # and written), made float32 (read and written) and read for the product (treegen.backends.unfused).
        rows = int(plan.group_rows.sum())
        loads, q_bytes = unique, rows * heads * shape.head_dim * shape.dtype_bytes
        flops = rows * unique * heads * 2 * (shape.head_dim + shape.head_dim_v)
        widened = FP32_BYTES // shape.dtype_bytes
        passes = 3 if widened == 1 else 3 + 2 * widened
        unfused = scores + masks + q_bytes + passes * unique * shape.kv_token_bytes
    measured = launches_us(schedule, items, shape, target) if model == "profiled" else None
    made_of = times(items, merges, schedule.launches, unfused, target, items_us=measured, waiting=waits(schedule))
    estimate = Estimate(
        kv_unique_bytes=unique * shape.kv_token_bytes,
        kv_hbm_bytes=int(plan.read_tokens.sum()) * shape.kv_token_bytes,
        kv_l2_bytes=(loads - unique) * shape.kv_token_bytes,
        q_bytes=q_bytes,
        out_bytes=tree.num_rows * heads * (shape.head_dim_v * shape.dtype_bytes + FP32_BYTES),
        partial_bytes=partials * shape.partial_bytes,
        score_bytes=scores,
        mask_bytes=masks,
        useful_flops=tree.path_tokens * heads * 2 * (shape.head_dim + shape.head_dim_v),
        padded_flops=flops,
        items=blocks,
        launches=schedule.launches,
        waves=float((items.turns / (items.resident * target.sms)).sum()),
        time_us=made_of.total,
    )
    return estimate, made_of


def mask_bytes(plan: Plan, shape: Shape, interval_runs: int) -> int:
    """Bytes of a plan's masks: 8 per run that a masked work item walks ("interval"), else as their authors count.

    A 64-bit word per token of a group ("token-bits"), one bit per row and token in words of 64 tokens ("row-bits"), an
    element of q's type per row and token ("dense"); once for all heads (DeFT, table 4).
    """
    tokens, rows = plan.read_tokens, plan.group_rows[plan.segment_group].astype(np.int64)
    match plan.mask:
        case "interval":
            return interval_runs * _INTERVAL_BYTES
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
