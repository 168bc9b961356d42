"""compile(): a tree becomes a callable attention kernel."""

from __future__ import annotations

import math

import torch

from treegen.devices import resolve_target
from treegen.ir.errors import InputError, TreeError
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.kernel import Kernel
from treegen.limits import WantedLimits
from treegen.scales import Scales
from treegen.strategies import Strategy, strategy_from
from treegen.targets import Target
from treegen.tune import check_tuning


def compile(
    tree: Tree,
    *,
    strategy: str | Strategy = "auto",
    shape: Shape | None = None,
    target: str | Target | None = None,
    backend: str | None = None,
    sm_scale: float | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    autotune: bool = False,
    max_rows: int | None = None,
    max_items: int | None = None,
    max_slots: int | None = None,
) -> Kernel:
    """A kernel for `tree`.

    strategy: a registered name or a Strategy. shape: the attention shape; without one, 32:8 heads of head_dim 128 in
    bf16 are assumed until the first call shows the real one, which replans once. target: what to plan for, by default
    the current GPU, else h200. backend: "triton" or "torch", by default what the tensors' device can run. sm_scale:
    the scores' factor, 0 or more, by default `1 / sqrt(head_dim)` of the head_dim given (absorbed MLA wants that of the
    heads before absorption: give it). k_scale, v_scale: what keys and values are multiplied by, above 0, as fp8 caches
    need it: a number, or a float32 tensor [num_kv_heads] on the tensors' device, which every launch reads, so that it
    may be overwritten. autotune: `auto` measures its best candidates on the current GPU, for every
    bucket of trees that the cache does not know, as soon as the shape is known (treegen.tune).

    max_rows, max_items (work items of one launch), max_slots (slots of partial results): any of them makes a kernel of
    fixed capacity, for CUDA graphs. It keeps its launches and the addresses of its tables for all trees: a graph that
    was captured from a call replays with the plan of the latest `update`. What is not given follows from `tree`, with
    room for twice as much; treegen.capacity.Layout says how tables are sized, `Kernel.capacity` what came of it. `auto`
    chooses once, for `tree`. Raises a TreegenError for any argument that cannot be served.
    """
    if not isinstance(tree, Tree):
        raise TreeError("tree", tree, "is not a Tree", "make one with treegen.Tree.from_parents or its siblings")
    if shape is not None and not isinstance(shape, Shape):
        raise InputError("shape", shape, "is not a Shape", "give treegen.Shape(num_qo_heads, num_kv_heads, head_dim)")
    if sm_scale is not None and not (isinstance(sm_scale, int | float) and math.isfinite(sm_scale) and sm_scale >= 0):
        reason = "is not a finite number of at least 0"
        raise InputError("sm_scale", sm_scale, reason, "give such a number (negate q for others), or None")
    wanted = WantedLimits(max_rows, max_items, max_slots)
    made, on_target = strategy_from(strategy), resolve_target(target)
    if autotune:
        check_tuning(made, on_target)
    limits, scales = wanted if wanted.any else None, Scales.of(k_scale, v_scale)
    return Kernel(tree, made, shape, on_target, backend, sm_scale, autotune, limits, scales)
