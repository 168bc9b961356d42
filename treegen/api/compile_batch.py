"""compile_batch(): makes an attention kernel for the running batches of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from treegen.backends.devices import resolve_target
from treegen.backends.kv_scales import Scales
from treegen.backends.page_table import PAGE_SIZES, PageTable
from treegen.environment import check_switches
from treegen.ir.arrays import INT32_MAX
from treegen.ir.errors import InputError, StrategyError
from treegen.ir.scalars import plain_number
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.batch_plans import check_strategy
from treegen.runtime.call_options import BatchOptions, check_sm_scale
from treegen.scoring.options import ScoreOptions, Scoring
from treegen.strategies import Strategy, strategy_from
from treegen.strategies.batch_invariant import BatchInvariant, chunk_for, invariant_strategy
from treegen.target.targets import Target


def compile_batch(
    shape: Shape,
    pages: PageTable,
    *,
    max_tokens: int,
    max_rows: int | None = None,
    strategy: str | Strategy = "auto",
    batch_invariant: bool = False,
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
) -> BatchKernel:
    """Makes an attention kernel for the running batches of a server.

    Requests come, grow, fork and go. The kernel reads the engine's page table and lengths on the device in every step.
    In score functions `b` is the row of q.

    Args:
        shape: The attention shape, with the engine's page_size (a power of two up to 128) and kv_layout.
        pages: The page table and lengths on the device. Their sizes bound the number of requests.
        max_tokens: The most tokens of a request. Tables take memory in proportion (`BatchKernel.workspace_size`).
        max_rows: The most query rows of all requests together, where `pages` has a qo_indptr; by default one for each
            length. Tables and partial results take memory in proportion.
        strategy: "auto", which takes a measured policy or weighs a fixed list of policies; or a strategy whose plans
            have one round and row intervals, such as `cohort`, or `query`, which shares nothing.
        batch_invariant: Whether the bits of a row's out and lse depend on its own request alone. Requests then share
            reads of whole chunks, whose size follows from `max_tokens`, or from the option of the strategy
            `treegen.strategies.batch_invariant(chunk=...)`. Partial results take memory for all chunks of all requests,
            twice. Refused with a qo_indptr.
        target, backend, sm_scale, score_mod, mask_mod: As in treegen.compile.
        logits_soft_cap, window_left, alibi_slopes, sinks, k_scale, v_scale: As in treegen.compile.

    Returns:
        A kernel that has no requests until its first `prepare`, `seat` or `update`. After `seat` alone it serves every
        request alone.

    Raises:
        TreegenError: An argument cannot be served.
    """
    check_switches()
    max_tokens, max_rows = plain_number(max_tokens), plain_number(max_rows)
    _check_sizes(shape, pages, max_tokens, max_rows)
    check_sm_scale(sm_scale)
    if not isinstance(batch_invariant, bool):
        raise InputError("batch_invariant", batch_invariant, "is not a bool", "give True or False")
    scores = ScoreOptions(score_mod, mask_mod, logits_soft_cap, alibi_slopes, window_left, sinks)
    scores.check(shape)
    chosen = strategy_from(strategy)
    if batch_invariant:
        chosen = (
            BatchInvariant(chunk_for(max_tokens)) if chosen.automatic else invariant_strategy(chosen, autotune=False)
        )
    if isinstance(chosen, BatchInvariant):
        _check_invariant(chosen, pages)
    on_target = resolve_target(target)
    check_strategy(chosen, shape, on_target)
    options = BatchOptions(chosen, backend, sm_scale, Scales.of(k_scale, v_scale), Scoring.of(scores))
    return BatchKernel(shape, pages, on_target, options, max_tokens, max_rows)


def check_served(strategy: str | Strategy) -> None:
    """Raises StrategyError unless there is such a strategy, and `compile_batch` serves it."""
    check_strategy(strategy_from(strategy), replace(DEFAULT_SHAPE, page_size=16), resolve_target(None))


def check_page_sizes(shapes: Iterable[Shape]) -> None:
    """Raises InputError for pages of another size than those of kernels for running batches."""
    for shape in shapes:
        if shape.page_size not in PAGE_SIZES:
            fix = f"use one of {', '.join(map(str, PAGE_SIZES))}, or treegen.compile with a tree by slot"
            raise InputError("shape.page_size", shape.page_size, "is not a power of two up to 128", fix)


def _check_sizes(shape: Shape, pages: PageTable, max_tokens: int, max_rows: int | None) -> None:
    """Raises InputError for sizes that kernels for running batches do not have, or that do not go together."""
    if not isinstance(shape, Shape):
        raise InputError("shape", shape, "is not a Shape", "give treegen.Shape(num_qo_heads, num_kv_heads, head_dim)")
    check_page_sizes([shape])
    if not isinstance(pages, PageTable):
        fix = "give treegen.PageTable(table, seq_lens, num_pages)"
        raise InputError("pages", type(pages).__name__, "is not a PageTable", fix)
    if pages.num_pages * shape.page_size > INT32_MAX:
        found = f"{pages.num_pages} pages of {shape.page_size}"
        raise InputError("pages.num_pages", found, "have KV slots beyond 2^31 - 1", "use several smaller caches")
    if type(max_tokens) is not int or not 1 <= max_tokens <= INT32_MAX // 2:
        fix = "give the tokens of the longest request"
        raise InputError("max_tokens", max_tokens, f"is not a number of 1..{INT32_MAX // 2}", fix)
    if max_rows is not None and pages.qo_indptr is None:
        fix = "give PageTable a qo_indptr, or leave max_rows out"
        raise InputError("max_rows", max_rows, "is used only with a qo_indptr", fix)
    if max_rows is not None and (type(max_rows) is not int or not 1 <= max_rows <= INT32_MAX):
        fix = "give the query rows of all requests together"
        raise InputError("max_rows", max_rows, f"is not a number of 1..{INT32_MAX}", fix)


def _check_invariant(strategy: BatchInvariant, pages: PageTable) -> None:
    """Raises StrategyError or InputError for options that batch-invariant mode does not serve."""
    if strategy.block != 1 or strategy.isolated:
        reason = "has options for trees by slot"
        raise StrategyError("strategy", str(strategy), reason, "give batch_invariant(chunk=...)")
    if pages.qo_indptr is not None:
        reason = "says that requests have several query rows, which batch-invariant mode does not serve"
        raise InputError("pages.qo_indptr", "a tensor", reason, "leave one of them out")
