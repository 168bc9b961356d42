"""Kernel texts: explanations of plans, and the source of emitted kernels."""

from __future__ import annotations

import numpy as np

from treegen.backends.triton_program import kernel_options
from treegen.codegen.emit import emit
from treegen.ir.errors import InputError
from treegen.ir.positions import windowed_requests
from treegen.report.explain import Explanation, explain
from treegen.report.explained_plan import ExplainedPlan
from treegen.runtime.batch_plans import BatchPlan
from treegen.runtime.prepared_calls import PreparedCalls
from treegen.schedule.pipeline import lowered
from treegen.scoring.options import Scoring
from treegen.strategies import Choice


def describe(calls: PreparedCalls) -> str:
    """Names a kernel's strategy, tree, shape, target, backend and capacity on one line."""
    prepared = calls.prepared
    _, shape, target = prepared.problem
    limits = "" if prepared.limits is None else f", at most {prepared.limits.max_rows} rows"
    assumed = " (assumed)" if calls.shape_is_assumed else ""
    made_for = f"{shape}{assumed}, {target.name}, {calls.backend}{limits}"
    return f"{prepared.choice.strategy}: {prepared.tree.size_text}; {made_for}"


def explanation_of(calls: PreparedCalls) -> tuple[str, Explanation]:
    """Returns the scores of a kernel in words, and the explanation of its plan."""
    prepared, scoring = calls.prepared, calls.options.scoring
    problem, choice, fixed = prepared.view.problem, prepared.choice, prepared.layout is not None
    entry = ExplainedPlan.from_plan(
        choice.strategy, choice.reason, prepared.plan, prepared.counted, problem, fixed=fixed
    )
    tree, shape, target = problem
    beside = explain(tree, ("auto",), shape, target).entries if prepared.plan.invariant_block else ()
    best = Choice(beside[0].strategy, beside[0].reason) if beside else choice
    explanation = Explanation(tree, shape, calls.shape_is_assumed, target, (entry, *beside), best)
    return _heading(scoring, prepared.tree.unique_tokens, tree.unique_tokens), explanation


def _heading(scoring: Scoring | None, tokens: int, seen: int) -> str:
    """Returns the scores in words. tokens: tokens of the tree. seen: those that some row's window reaches."""
    return "" if scoring is None else f"{scoring.options.text(tokens, seen)}\n"


def batch_explanation(planned: BatchPlan | None, scoring: Scoring | None) -> tuple[str, Explanation]:
    """Returns the scores of a kernel in words, and the explanation of its plan for a running batch.

    Raises InputError without a plan.
    """
    if planned is None:
        raise InputError("kernel", "a kernel without a plan", "has nothing to explain", "call update first")
    problem, choice, plan = planned.problem, planned.choice, planned.plan
    counted = lowered(plan, problem).schedule
    entry = ExplainedPlan.from_plan(choice.strategy, choice.reason, plan, counted, problem, fixed=True)
    tree, shape, target = problem
    assert tree.requests is not None
    tokens = int((tree.requests.length - tree.requests.shared_tokens).sum(dtype=np.int64))
    seen = tokens
    if scoring is not None and scoring.options.window_left >= 0:
        seen = windowed_requests(tree, scoring.options.window_left, 1).unique_tokens
    return _heading(scoring, tokens, seen), Explanation(tree, shape, False, target, (entry,), choice)


def kernel_source(calls: PreparedCalls) -> str:
    """Joins the texts of a kernel's Triton modules, for a cache addressed by slot."""
    prepared, options = calls.prepared, calls.options
    _, shape, target = prepared.problem
    capacity = None if prepared.layout is None else prepared.layout.room
    wanted = kernel_options(shape, target.capability, options.scales, options.scoring)
    emitted = emit(prepared.schedule, shape, capacity=capacity, options=wanted)
    return "\n\n".join(source.text for source in emitted)
