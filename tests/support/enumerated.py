"""The best of a large space of plans, by enumeration: what the choices of `auto` are compared with.

Every plan is made, lowered and accounted for, so this is exact by the cost model, and slow: a second for a tree of 60
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

import numpy as np

from treegen.ir.errors import ShapeError
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.search.auto import time_of
from treegen.search.walk_layout import named_config
from treegen.strategies import Strategy, strategy_from, strategy_names
from treegen.strategies.cohort import Cohort, seen_below_and_above
from treegen.target.problem import Problem
from treegen.target.targets import Target

HEAD_ROWS = (64, 32, 16, 1)
SPLITS = (None, 4096, 2048, 1024, 512, 256, 128)
MOST_EDGES = 4
"""Edges up to which paths are cut at every set of nodes; else at thresholds on rows."""
_THRESHOLDS = 3
_LEFT_OUT = ("medusa", "specinfer")  # which no kernel of treegen serves well, whatever the model says


def policies_of(shape: Shape, target: Target) -> tuple[list[Cohort], list[Cohort]]:
    """Policies for whole paths without a split, and with every split."""
    whole = [Cohort(head_rows) for head_rows in HEAD_ROWS]
    config = named_config(shape, target)
    if config is not None:
        whole.append(Cohort(16, tile=(config.rows, config.tokens)))
    return whole, [replace(policy, split=split) for policy in whole for split in SPLITS[1:]]


def optimum(problem: Problem) -> tuple[Strategy, float]:
    """The strategy whose plan takes least, and its microseconds."""
    found: list[tuple[float, int, Strategy]] = []
    for place, strategy in enumerate(_space(problem)):
        with suppress(ShapeError):  # FastTree's tiles do not fit every shape
            found.append((time_of(strategy, problem), place, strategy))
    time_us, _, best = min(found)
    return best, time_us


def _space(problem: Problem) -> Iterator[Strategy]:
    tree, shape, target = problem
    yield from (strategy_from(name) for name in strategy_names() if name not in _LEFT_OUT)
    spans = tree.topology.spans
    longest = int(np.bincount(spans.lo, spans.lengths).sum()) if len(spans) else 0
    for policy in policies_of(shape, target)[0]:
        for cut in (policy, *_with_cuts(policy, tree)):
            yield from (replace(cut, split=split) for split in SPLITS if split is None or split < longest)


def _with_cuts(policy: Cohort, tree: Tree) -> Iterator[Cohort]:
    """The policy with paths cut, merged in a launch of its own and by the last items."""
    nodes = np.flatnonzero(tree.parent >= 0).tolist()
    if len(nodes) <= MOST_EDGES:
        cuts = [cut for size in range(1, len(nodes) + 1) for cut in combinations(nodes, size)]
        ways = [replace(policy, cut_nodes=cut) for cut in cuts]
    else:
        above = seen_below_and_above(tree)[1]
        values = np.unique(above[above > 1])
        picked = np.linspace(0, len(values) - 1, min(_THRESHOLDS, len(values))).astype(int)
        ways = [replace(policy, split_shared_rows=int(value)) for value in values[picked]]
    for way in ways:
        yield from (way, replace(way, merge="final"))
