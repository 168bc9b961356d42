"""Trees that are cut in two: the last round's items merge what rounds above the cut left."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from support.h200 import H200
from treegen import Shape, Tree
from treegen.backends import oracle
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import TritonProgram
from treegen.ir.groups import Group
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.schedule.lower import lower
from treegen.strategies.groupings import by_cohort, by_node
from treegen.strategies.passes import MergeLast, StoreMask, TrimRows
from treegen.target.problem import Problem

SHAPE = Shape(4, 2, 16, dtype="fp32")
MASKS = ("interval", "token-bits", "row-bits")
PROGRAMS = (TorchProgram, TritonProgram)


def cut(tree: Tree, level: int, width: int, *, steps: bool = False, trim: bool = False, mask: str = "interval") -> Plan:
    """A plan in which nodes above `level` are read by all rows that see them, and the last round reads the nodes below,
    `width` neighbouring rows at a time.

    steps: every level above is a round of its own. trim: rows that see nothing leave their group.
    """
    depth = tree.topology.depth
    groups = [
        dataclasses.replace(group, round=int(depth[group.segments[0].node]) if steps else 0)
        for group in by_node(tree).groups
        if depth[group.segments[0].node] < level
    ]
    for group in by_cohort(tree, width).groups:
        below = tuple(segment for segment in group.segments if depth[segment.node] >= level)
        if below:
            groups.append(Group(group.rows, below, level if steps else 1))
    plan = Plan.from_groups("cut", groups)
    for step in (*((TrimRows(),) if trim else ()), StoreMask(mask), MergeLast()):
        plan = step.apply(plan, tree)
    return plan


def scheduled(plan: Plan, tree: Tree, shape: Shape = SHAPE) -> Schedule:
    return lower(plan, Problem(tree, shape, H200))


def tensors(tree: Tree, shape: Shape = SHAPE) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standard-normal q, keys and values; the latter by slot, in whole pages."""
    generator = torch.Generator().manual_seed(tree.num_rows)
    slots = -(-(tree.kv.last_slot + 1) // shape.page_size) * shape.page_size
    q = torch.randn(tree.num_rows, shape.num_qo_heads, shape.head_dim, generator=generator)
    keys, values = torch.randn(2, slots, shape.num_kv_heads, shape.head_dim, generator=generator)
    return q, keys, values


def assert_attention(
    schedule: Schedule, tree: Tree, shape: Shape, program: Callable[..., TorchProgram | TritonProgram]
) -> None:
    q, keys, values = tensors(tree, shape)
    caches = [keys, values]
    if shape.page_size > 1:
        # Pages lie farther apart than their tokens reach, so that they are addressed as pages.
        caches = []
        for flat in (keys, values):
            room = torch.zeros(len(flat) // shape.page_size, shape.page_size + 1, *flat.shape[1:])
            room[:, : shape.page_size] = flat.view(-1, shape.page_size, *flat.shape[1:])
            caches.append(room[:, : shape.page_size])
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan)
    sm_scale = shape.head_dim**-0.5
    program(schedule, shape, q.device)(q, *caches, out, lse, sm_scale, 1.0)
    options = oracle.OracleOptions(sm_scale=sm_scale)
    for found, expected in zip((out, lse), oracle.reference(tree, q, keys, values, options), strict=True):
        assert oracle.error(found, expected) <= 1e-5


def entries(schedule: Schedule) -> dict[int, list[int]]:
    """The slots that are listed for the rows of every merging final item."""
    result: dict[int, list[int]] = {}
    for index, tile in enumerate(schedule.configs):
        if tile.epilogue_merge:
            for number in range(schedule.config_indptr[index], schedule.config_indptr[index + 1]):
                item = schedule.work_items[number]
                for entry in range(item.row0, item.row0 + item.rows):
                    bounds = schedule.epilogue_indptr[entry : entry + 2]
                    listed = schedule.epilogue_partials[bounds[0] : bounds[1]].tolist()
                    if item.partial0 < 0:
                        result[int(schedule.rows[entry])] = listed
                    else:
                        assert not listed
    return result
