"""compile(): a tree becomes a callable attention kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from treegen.backends.devices import resolve_target
from treegen.backends.kv_scales import Scales
from treegen.ir.errors import InputError
from treegen.ir.scalars import is_finite
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.ir.tree import Tree, check_is_by_slot, check_is_tree
from treegen.runtime.call_options import CallOptions
from treegen.runtime.kernel import Kernel
from treegen.runtime.limits import WantedLimits
from treegen.runtime.prepared import prepare
from treegen.scoring.options import ScoreOptions, Scoring
from treegen.strategies import Strategy, strategy_from
from treegen.strategies.batch_invariant import invariant_strategy
from treegen.strategies.isolated import isolated_strategy
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.tuning.planner import Planner
from treegen.tuning.tune import check_tuning


def compile(
    tree: Tree,
    *,
    strategy: str | Strategy = "auto",
    shape: Shape | None = None,
    target: str | Target | None = None,
    backend: str | None = None,
    sm_scale: float | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    logits_soft_cap: float | None = None,
    window_left: int = -1,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    autotune: bool = False,
    max_rows: int | None = None,
    max_items: int | None = None,
    max_slots: int | None = None,
    batch_invariant: bool = False,
    isolated: bool = False,
) -> Kernel:
    """A kernel for `tree`.

    strategy: a registered name or a Strategy. shape: the attention shape; without one, 32:8 heads of head_dim 128 in
    bf16 are assumed until the first call shows the real one, which replans once. target: what to plan for, by default
    the current GPU, else h200. backend: "triton" or "torch", by default what the tensors' device can run. sm_scale:
    the scores' factor, 0 or more, by default `1 / sqrt(head_dim)` of the head_dim given (absorbed MLA wants that of the
    heads before absorption: give it). k_scale, v_scale: what keys and values are multiplied by, above 0, as fp8 caches
    need it: a number, or a float32 tensor [num_kv_heads] on the tensors' device, which every launch reads, so that it
    may be overwritten. autotune: `auto` measures its best candidates on the current GPU, with plain scores, for every
    bucket of trees that the cache does not know, as soon as the shape is known (treegen.tuning.tune).

    score_mod(score, b, h, q_idx, kv_idx) returns what becomes of a score (already times sm_scale), and mask_mod(b, h,
    q_idx, kv_idx) whether a row sees a token, as in PyTorch's FlexAttention: b is the row's number, h the query head,
    q_idx and kv_idx the depths of row and token along the row's path, from 0. Both are traced once, on symbols: they
    may use arithmetic, comparisons, torch.where and functions like torch.tanh, numbers, and single entries of tensors,
    whose later values count; an index that is out of bounds takes the last entry. logits_soft_cap: `cap * tanh(score /
    cap)`, None or 0 for none. alibi_slopes [num_qo_heads]: `slopes[h] * (kv_idx - q_idx)` is added. The cap comes
    first, then slopes, then score_mod, then masks. window_left: a row sees its own token and so many before it, -1 for
    all; what no row sees is not read. sinks [num_qo_heads]: a score for every head that takes part in each row's
    softmax and in its lse, without a value.

    max_rows, max_items (work items of one launch), max_slots (slots of partial results): any of them makes a kernel of
    fixed capacity, for CUDA graphs. It keeps its launches and the addresses of its tables for all trees: a graph that
    was captured from a call replays with the plan of the latest `update`. What is not given follows from `tree`, with
    room for twice as much; treegen.runtime.graph_layout.Layout says how tables are sized, `Kernel.capacity` what came
    of it. `auto` chooses once, for `tree`.

    batch_invariant: a row's bits do not depend on the other rows of the batch, the tree that it hangs in, or where its
    KV lies in the cache: `treegen.strategies.batch_invariant()` plans, for `auto`; give this strategy itself to set its
    options.

    isolated: an infinity or NaN in K or V reaches only the rows that see its token. By default it reaches every row
    that a work item takes together with such a row, also rows of other requests: kernels multiply all values of a tile
    by the weights of all its rows, and 0 times infinity is NaN. An isolated kernel gives rows a common work item only
    for tokens that all of them see, which takes more time where many rows see few tokens alone: `auto` chooses among
    such plans, and the groups of a named strategy are divided. Where mask_mod, score_mod or window_left hide a token,
    kernels keep its values from the row, too. A score_mod has to hide a token by torch.where, as arithmetic on a NaN
    gives NaN. A row that sees such a value has NaN in its result. `auto` uses a measured policy where its plan is
    isolated. autotune is refused.

    A score below -1e24 hides its token, as -inf does, so that masks of torch.finfo(dtype).min act as masks (of fp32 and
    bf16). Where nothing is done to scores, the bound is that of the product of q and k, before sm_scale. A sink below
    it takes no part. Raises a TreegenError for any argument that cannot be served.
    """
    _check(tree, shape, sm_scale, batch_invariant=batch_invariant, isolated=isolated)
    problem = Problem(tree, shape or DEFAULT_SHAPE, resolve_target(target))
    options = ScoreOptions(score_mod, mask_mod, logits_soft_cap, alibi_slopes, window_left, sinks)
    if shape is not None:
        options.check(shape)
    chosen, scoring = strategy_from(strategy), Scoring.of(options)
    if batch_invariant:
        chosen = invariant_strategy(chosen, autotune)
    if isolated:
        chosen, scoring = in_isolation(chosen, scoring, autotune)
    if scoring is not None and chosen.batch_invariant:
        scoring = replace(scoring, prunes=False)  # what the windows of other rows reach would decide on places in tiles
    if autotune:
        check_tuning(chosen, problem.target)
    limits, scales = WantedLimits(max_rows, max_items, max_slots), Scales.of(k_scale, v_scale)
    wanted, assumed = limits if limits.any else None, shape is None

    calls, planner = CallOptions(backend, sm_scale, scales, scoring), Planner(chosen, autotune=autotune)
    prepared = prepare(problem, planner, scoring, wanted, shape_is_assumed=assumed)  # choice, plan, schedule
    return Kernel(prepared, planner, calls, wanted, shape_is_assumed=assumed)


def _check(tree: Tree, shape: Shape | None, sm_scale: float | None, **modes: bool) -> None:
    """Raises TreeError or InputError for arguments of wrong types. modes: switches by name."""
    check_is_tree("tree", tree)
    check_is_by_slot("tree", tree)
    if shape is not None and not isinstance(shape, Shape):
        raise InputError("shape", shape, "is not a Shape", "give treegen.Shape(num_qo_heads, num_kv_heads, head_dim)")
    if sm_scale is not None and not (is_finite(sm_scale) and sm_scale >= 0):
        reason = "is not a finite number of at least 0"
        raise InputError("sm_scale", sm_scale, reason, "give such a number (negate q for others), or None")
    for name, mode in modes.items():
        if not isinstance(mode, bool):
            fix = "give True or False"
            fix += "; strategy=treegen.strategies.batch_invariant(...) has options" * (name == "batch_invariant")
            raise InputError(name, mode, "is not a bool", fix)


def in_isolation(
    strategy: Strategy, scoring: Scoring | None, autotune: bool = False
) -> tuple[Strategy, Scoring | None]:
    """The strategy and the scoring of an isolated kernel. Raises StrategyError for `autotune`."""
    return isolated_strategy(strategy, autotune), scoring and replace(scoring, isolated=True)
