"""The course of a decoding: bytes of KV, sharing and time of chosen steps, and the tree at each, for pages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from treegen.cost.account import Account, account
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.report.decode_io import WorkloadIO
from treegen.report.page.drawn_marks import fold
from treegen.report.page.html_page import html_page
from treegen.report.page.tree_marks import TreeMarks
from treegen.schedule.lower import lower
from treegen.search.size import is_too_large
from treegen.strategies import Strategy, strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import Target, target_from
from treegen.workloads.traces import Decode, Workload

PANELS = ("totals", "course")
"""The panels of a decoding's page, from the top down."""
MOST_STEPS = 40
"""The most steps of a decoding that a page shows."""
_MOST_MARKS = 400
"""The most marks of a drawing of a step's tree."""


def decode_html(found: WorkloadIO, course: Mapping[str, Any]) -> str:
    """Writes a page on a workload: one HTML file, which needs no other file and no network.

    Args:
        found: The workload's account.
        course: The course of its first decoding (`course_object`).
    """
    strategies = [{**asdict(entry), "kv_reduction": found.kv_reduction(entry)} for entry in found.strategies]
    many = f"{len(found.workload.decodes)} decodings, " if len(found.workload.decodes) > 1 else ""
    words = f"{many}{found.steps} steps; shape {found.shape}, {found.layers} layers"
    data = {"totals": {"words": words, "strategies": strategies}, "course": course}
    return html_page(found.workload.name, data, PANELS)


def course_object(
    workload: Workload,
    strategies: Sequence[str | Strategy],
    shape: Shape,
    target: str | Target | None = None,
    *,
    layers: int,
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Returns the course of a workload's first decoding, for JSON forms.

    - words: what it shows, in words;
    - steps: the numbers of the steps that it shows;
    - charts: what is drawn over the steps, each {title, unit, lines}, with a name and a value per step for each line;
      null where a plan is too large;
    - facts: what is told about a step besides, each {name, unit, values};
    - drawings: the tree at each step, as pages draw trees.

    Args:
        workload: The workload.
        strategies: Names of strategies, or strategies.
        shape: The attention shape.
        target: The target, by name or as an object; by default h200.
        layers: Attention layers.
        on_progress: Called with the part of a decoding that is done since its last call.

    Raises:
        TreegenError: A name is unknown, or a plan cannot be made.
    """
    on_target, made = target_from(target), [strategy_from(strategy) for strategy in strategies]
    decode = workload.decodes[0]
    steps, trees = _chosen(decode)
    found: list[list[Account | None]] = []
    for tree in trees:
        found.append([_account(strategy, Problem(tree, shape, on_target)) for strategy in made])
        if on_progress:
            on_progress(1 / len(trees))
    others = f", the first of {len(workload.decodes)} decodings" if len(workload.decodes) > 1 else ""
    shown = f"{len(steps)} of {steps[-1]:,} steps" if len(steps) < steps[-1] else f"{len(steps)} steps"
    return {
        "words": f"{decode.name}{others}: {shown}, {layers} layers, estimated times on {on_target.name}",
        "steps": steps,
        "charts": [
            _chart("KV read", "bytes", made, found, lambda e: layers * e.kv_hbm_bytes),
            _chart("Partials, scores and masks", "bytes", made, found, lambda e: layers * _beside(e)),
            _chart("Attention, estimated", "us", made, found, lambda e: layers * e.time_us),
        ],
        "facts": [
            {"name": "rows", "unit": "count", "values": [tree.num_rows for tree in trees]},
            {"name": "distinct tokens", "unit": "count", "values": [tree.unique_tokens for tree in trees]},
            {
                "name": "rows that see a token, on average",
                "unit": "ratio",
                "values": [_sharing(tree) for tree in trees],
            },
        ],
        "drawings": [_drawing(tree, shape) for tree in trees],
    }


def _chosen(decode: Decode) -> tuple[list[int], list[Tree]]:
    """Returns at most MOST_STEPS steps of a decoding, spread evenly, and their trees."""
    segments = list(decode.segments())
    every = np.concatenate([np.arange(segment.first, segment.last + 1) for segment in segments])
    steps = np.unique(
        every[np.linspace(0, len(every) - 1, min(MOST_STEPS, len(every))).round().astype(np.int64)]
    ).tolist()
    first = [segment.first for segment in segments]
    return steps, [segments[bisect_right(first, step) - 1].at(step) for step in steps]


def _account(strategy: Strategy, problem: Problem) -> Account | None:
    """Accounts for a strategy's plan; None where that is too large."""
    chosen = strategy.choose(problem).strategy
    if is_too_large(chosen, problem.tree, problem.shape):
        return None
    plan = chosen.plan(problem)
    return account(plan, lower(plan, problem), problem)


def _beside(estimate: Account) -> int:
    return estimate.partial_bytes + estimate.score_bytes + estimate.mask_bytes


def _sharing(tree: Tree) -> float:
    return round(tree.path_tokens / max(tree.unique_tokens, 1), 3)


def _chart(
    title: str,
    unit: str,
    made: Sequence[Strategy],
    found: Sequence[Sequence[Account | None]],
    figure: Callable[[Account], float],
) -> dict[str, Any]:
    """Makes a chart with a line for each strategy."""
    lines = []
    for number, strategy in enumerate(made):
        of_steps = (each[number] for each in found)
        values = [None if estimate is None else round(figure(estimate), 3) for estimate in of_steps]
        lines.append({"name": strategy.name, "values": values})
    return {"title": title, "unit": unit, "lines": lines}


def _drawing(tree: Tree, shape: Shape) -> dict[str, Any]:
    """Returns a small drawing of a tree."""
    boxes = TreeMarks.of(tree).boxes
    return TreeMarks(tree, boxes, fold(boxes, _MOST_MARKS)).to_object(shape)
