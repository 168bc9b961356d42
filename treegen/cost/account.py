"""The account of a plan: the bytes and operations counted from its arrays, and the time that they take."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import numpy as np

from treegen.cost.analytic import ScheduleLaunches, Times, times
from treegen.cost.launch_counts import FP32_BYTES, item_launches, merge_launches
from treegen.cost.profiled import launches_us
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.schedule.passes.fuse_merge import with_fused_merge
from treegen.target.problem import Problem

_INTERVAL_BYTES = 8  # lo and hi, int32
_WORD_BYTES = 8


CostModel: TypeAlias = Literal["analytic", "profiled"]


@dataclass(frozen=True, slots=True)
class Account:
    """The bytes, operations and time of one call; estimates of several calls add up with `+`."""

    kv_unique_bytes: int  # bytes; keys and values of tokens that some row sees, each once
    kv_hbm_bytes: int  # bytes; every group's read range once (as the papers count)
    kv_l2_bytes: int  # bytes; loaded by work items beyond kv_unique_bytes: re-reads by row tiles and by other groups
    q_bytes: int  # bytes; queries loaded by work items
    out_bytes: int  # bytes; out and lse of every row, written
    partial_bytes: int  # bytes; partial out and lse, written and read
    score_bytes: int  # bytes; scores of unfused attention, written and read four times (DeFT, table 4)
    mask_bytes: int  # bytes; masks, in the form that the plan stores (see `mask_bytes`)
    useful_flops: int  # floating-point operations on visible (row, head, token) triples
    padded_flops: int  # floating-point operations of whole tiles, padding included
    items: int  # pieces of work: items times lanes, each a thread block or an entry of its list
    launches: int  # kernel launches
    waves: float  # pieces / thread blocks that the target holds at a time, summed over launches
    time_us: float  # microseconds; by a cost model

    def __add__(self, other: Account) -> Account:
        return Account(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def padding_waste(self) -> float:
        """The fraction of the executed operations that no visible token needs; 0 if nothing is executed."""
        return 1 - self.useful_flops / self.padded_flops if self.padded_flops else 0.0


def account(
    plan: Plan,
    schedule: Schedule,
    problem: Problem,
    model: CostModel = "analytic",
    *,
    fixed: bool = False,
) -> Account:
    """Accounts for a plan and its schedule, for an attention shape, and estimates their time on a target.

    Two matrix products are counted, and every load of a work item, whether or not L2 serves it.

    Args:
        plan: The plan.
        schedule: The plan's schedule.
        problem: The tree, the attention shape and the target.
        model: "analytic" (treegen.cost.analytic), or "profiled" for launches of work items (treegen.cost.profiled;
            where the target has no measured grid, with the analytic model's tasks).
        fixed: Whether launches are those of a fixed capacity, in which no item waits for others
            (treegen.schedule.passes.fuse_merge).
    """
    return assess(plan, schedule, problem, model, fixed=fixed)[0]


def assess(
    plan: Plan,
    schedule: Schedule,
    problem: Problem,
    model: CostModel = "analytic",
    *,
    fixed: bool = False,
) -> tuple[Account, Times]:
    """Returns the account, and the parts of its time. Arguments as of `account`."""
    tree, shape, target = problem
    schedule = schedule if fixed else with_fused_merge(schedule)
    items, merges = item_launches(plan, schedule, problem), merge_launches(schedule, shape)
    heads, unique = shape.num_qo_heads, tree.unique_tokens
    partials = schedule.num_partials + int((schedule.merge_rows < 0).sum())
    partials += len(schedule.merge_partials) + len(schedule.epilogue_partials)
    pieces, loads = int(items.pieces.sum()), int(items.kv_loads.sum())
    masks, scores = mask_bytes(plan, shape, int(items.mask_runs.sum())), score_bytes(plan, shape)
    q_bytes, flops = int(items.q_bytes.sum()), int(items.padded_flops.sum())
    unfused = 0
    if plan.mask == "dense":
        # PyTorch reads queries once and computes without tiles, and materialises scores and masks. KV is gathered
        # (read and written), converted to float32 (read and written) and read for the product
        # (treegen.backends.unfused).
        rows = int(plan.group_rows.sum())
        loads, q_bytes = unique, rows * heads * shape.head_dim * shape.dtype_bytes
        flops = rows * unique * heads * 2 * (shape.head_dim + shape.head_dim_v)
        widened = FP32_BYTES // shape.dtype_bytes
        passes = 3 if widened == 1 else 3 + 2 * widened
        unfused = scores + masks + q_bytes + passes * unique * shape.kv_token_bytes
    measured = launches_us(schedule, items, shape, target) if model == "profiled" else None
    launches = ScheduleLaunches(items, merges, schedule.launches, unfused, schedule.has_fused_merge)
    made_of = times(launches, target, items_us=measured)
    estimate = Account(
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
        items=pieces,
        launches=schedule.launches,
        waves=float((items.pieces / (items.resident * target.sms)).sum()),
        time_us=made_of.total,
    )
    return estimate, made_of


def mask_bytes(plan: Plan, shape: Shape, interval_runs: int) -> int:
    """Returns the bytes of a plan's masks, once for all heads.

    Masks of intervals take 8 bytes per run that a masked work item reads. Other masks are counted as by their authors:
    a 64-bit word per token of a group ("token-bits"), one bit per row and token in words of 64 tokens ("row-bits"), or
    an element of q's type per row and token ("dense"; DeFT, table 4).
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
    """Returns the bytes of scores that unfused attention writes and reads; 0 for a fused plan.

    Scores per head are products, scaled, masked, and their softmax (DeFT, table 4).
    """
    if plan.mask != "dense":
        return 0
    rows = plan.group_rows[plan.segment_group].astype(np.int64)
    return 8 * int((plan.read_tokens * rows).sum()) * shape.num_qo_heads * shape.dtype_bytes
