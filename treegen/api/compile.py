"""compile(): makes a callable attention kernel for a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from treegen.backends.devices import resolve_target
from treegen.backends.kv_scales import Scales
from treegen.environment import check_switches
from treegen.ir.errors import InputError
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.ir.tree import Tree, check_is_by_slot, check_is_tree
from treegen.runtime.call_options import CallOptions, check_sm_scale
from treegen.runtime.kernel import Kernel
from treegen.runtime.limits import WantedLimits
from treegen.runtime.planner import Planner
from treegen.runtime.prepared import prepare
from treegen.runtime.prepared_calls import PreparedCalls
from treegen.scoring.options import ScoreOptions, Scoring
from treegen.strategies import Strategy, strategy_from
from treegen.strategies.batch_invariant import invariant_strategy
from treegen.strategies.isolated import isolated_strategy
from treegen.target.problem import Problem
from treegen.target.targets import Target
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
    """Makes an attention kernel for a tree.

    Plans at once; kernels are compiled when the first call shows the tensors.

    Score options are applied in this order: the soft cap, ALiBi, `score_mod`, then masks. A score below -1e24 hides its
    token, as -inf does, so masks of `torch.finfo(dtype).min` work for fp32 and bf16. Without score options the bound
    applies to the product of q and k, before `sm_scale`. A sink below the bound is ignored.

    Any of `max_rows`, `max_items` and `max_slots` makes a kernel of fixed capacity, for CUDA graphs. It keeps its
    launches and the addresses of its tables for all trees: a graph that was captured from a call replays the plan of
    the latest `update`. Default headroom: each limit that is left out is twice what `tree` needs, and at least 16 rows
    and items. `Kernel.capacity` has the limits. `auto` chooses once, for `tree`.

    An infinity or NaN in K or V reaches every row that shares a work item with a row that sees its token, also rows of
    other requests: kernels multiply all values of a tile by the weights of all its rows, and 0 times infinity is NaN.
    In an isolated kernel it reaches only rows that see the token, and their results are NaN. Isolated plans put rows
    into one work item only for tokens that all of them see, which takes more time where many rows see few tokens alone.
    Isolated kernels also protect a row from tokens that `mask_mod`, `score_mod` or `window_left` hide from it. A
    `score_mod` has to hide them by `torch.where`, because arithmetic on a NaN gives NaN.

    Args:
        tree: The tree that the first call serves.
        strategy: The name of a registered strategy, or a Strategy.
        shape: The attention shape. Without one, 32:8 heads of head_dim 128 in bf16 are assumed until the first call
            shows the real shape, for which the kernel plans once more.
        target: The device to plan for: a name, a file or a Target. By default the current GPU; without a GPU, the h200.
        backend: "triton" or "torch"; by default "triton" where the tensors' device can run it.
        sm_scale: The factor of scores, 0 or more. By default `1 / sqrt(head_dim)`. For absorbed MLA give it, from the
            head_dim before absorption.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)` returns the new score, as in PyTorch's FlexAttention. `score`
            is already multiplied by `sm_scale`; b is the row, h the query head, q_idx and kv_idx are the positions of
            row and token along the row's path, from 0. The function is traced once, on symbols: it may use arithmetic,
            comparisons, torch.where and functions like torch.tanh, numbers, and single entries of tensors. Every launch
            reads these tensors, so they may be overwritten; an index out of bounds takes the last entry.
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)` returns whether a row sees a token; traced in the same way.
        logits_soft_cap: Scores become `cap * tanh(score / cap)`; None or 0 for no cap.
        window_left: A row sees its own token and at most this number of tokens before it; -1 for all. Tokens that no
            row sees are not read.
        alibi_slopes: `[num_qo_heads]`; adds `slopes[h] * (kv_idx - q_idx)` to scores.
        sinks: `[num_qo_heads]`; adds a score per head to each row's softmax and lse, without a value.
        k_scale: The factor of keys, above 0, as fp8 caches need it: a number, or a float32 tensor `[num_kv_heads]` on
            the tensors' device. Every launch reads the tensor, so it may be overwritten.
        v_scale: The same for values.
        autotune: Whether `auto` measures its best candidates on the current GPU, with plain scores, for each bucket of
            trees that the policy cache does not know, as soon as the attention shape is known.
        max_rows: The most query rows of a tree.
        max_items: The most work items of one launch.
        max_slots: The most partial slots.
        batch_invariant: Whether a row's bits are independent of the other rows of the batch, of the tree, and of the
            place of its KV in the cache. `treegen.strategies.batch_invariant()` then plans; give that strategy instead
            to set its options.
        isolated: Whether infinities and NaN reach only rows that see their tokens. Refused with `autotune`.

    Returns:
        A kernel, which is called with q and the caches.

    Raises:
        TreegenError: An argument is not supported, or two arguments exclude each other.
    """
    _check(tree, shape, sm_scale, autotune=autotune, batch_invariant=batch_invariant, isolated=isolated)
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
        scoring = replace(scoring, prunes=False)  # pruning by the windows of other rows moves tokens between tiles
    if autotune:
        check_tuning(chosen, problem.target)
    limits, scales = WantedLimits(max_rows, max_items, max_slots), Scales.of(k_scale, v_scale)
    wanted, assumed = limits if limits.any else None, shape is None

    calls, planner = CallOptions(backend, sm_scale, scales, scoring), Planner(chosen, autotune=autotune)
    prepared = prepare(problem, planner, scoring, wanted, shape_is_assumed=assumed)  # choice, plan, schedule
    return Kernel(PreparedCalls(prepared, planner, calls, wanted, shape_is_assumed=assumed))


def _check(tree: Tree, shape: Shape | None, sm_scale: float | None, **modes: bool) -> None:
    """Raises TreeError or InputError for arguments of wrong types, and for the environment. modes: switches by name."""
    check_switches()
    check_is_tree("tree", tree)
    check_is_by_slot("tree", tree)
    if shape is not None and not isinstance(shape, Shape):
        raise InputError("shape", shape, "is not a Shape", "give treegen.Shape(num_qo_heads, num_kv_heads, head_dim)")
    check_sm_scale(sm_scale)
    for name, mode in modes.items():
        if not isinstance(mode, bool):
            fix = "give True or False"
            fix += "; strategy=treegen.strategies.batch_invariant(...) has options" * (name == "batch_invariant")
            raise InputError(name, mode, "is not a bool", fix)


def in_isolation(
    strategy: Strategy, scoring: Scoring | None, autotune: bool = False
) -> tuple[Strategy, Scoring | None]:
    """Returns the strategy and the scoring of an isolated kernel. Raises StrategyError for `autotune`."""
    return isolated_strategy(strategy, autotune), scoring and replace(scoring, isolated=True)
