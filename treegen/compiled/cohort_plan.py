"""Plans of `cohort` and `query` for running batches, made in C."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import numpy as np

import treegen.compiled.c_library as c_library
from treegen.ir.arrays import MOST_MADE, frozen, int32_ramp
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree
from treegen.strategies.baselines import query
from treegen.strategies.cohort import Cohort
from treegen.strategies.context_cuts import LATE, LATE_TOKENS, MOST_PARTS, SHARE_ROOM, SPLIT_STEP
from treegen.strategies.groupings import by_row
from treegen.strategies.strategy import Pipeline, Strategy
from treegen.target.problem import Problem
from treegen.target.tile_config import rows_per_tile

_PER_NODE, _PER_PART, _MOST_EXPECTED = 12, 10, 1 << 14
"""Words of a plan for each node and each part, and parts, roughly. Where they are too few, C tells how many it needs.
"""
_PlanFacts = ctypes.c_int64 * 2


class _EvenShares(ctypes.Structure):
    _fields_ = (
        ("room", ctypes.c_double),
        ("step", ctypes.c_int64),
        ("most_parts", ctypes.c_int64),
        ("late_tokens", ctypes.c_int64),
        ("late", ctypes.c_double),
    )


_SHARING = _EvenShares(SHARE_ROOM, SPLIT_STEP, MOST_PARTS, LATE_TOKENS, LATE)


class _PlannedPolicy(NamedTuple):
    """What C has to know of a strategy; 0 for options that are left out."""

    tiles: tuple[tuple[int, int], ...]
    rows: int
    split_shared_rows: int
    split: int
    shares: float


def plan_of(strategy: Strategy, problem: Problem) -> Plan:
    """Makes `strategy.plan(problem)`, in C where that is possible. Raises what that raises."""
    library, policy, tree = c_library.library(), _policy_of(strategy, problem.shape.group), problem.tree
    if library is None or policy is None or not _is_known(tree):
        return strategy.plan(problem)
    spans, nodes, facts = tree.topology.spans.table, len(tree.parent), _PlanFacts()
    parts = policy.shares or (tree.topology.unique_tokens // policy.split if policy.split else 0)
    words = _PER_NODE * nodes + _PER_PART * int(min(parts, _MOST_EXPECTED)) + 1
    while True:
        made = np.empty(words, np.int32)
        needed = library.cohort_plan(
            *(spans.ctypes.data, tree.parent.ctypes.data, nodes, tree.num_rows, policy.rows),
            *(policy.split_shared_rows, policy.split, policy.shares, ctypes.byref(_SHARING), MOST_MADE),
            *(made.ctypes.data, words, facts),
        )
        if needed <= 0:
            return strategy.plan(problem)
        if needed <= words:
            break
        words = needed
    groups, segments = facts
    made, row_hi, rows, indptr = frozen(made[:needed]), groups, 2 * groups, 3 * groups
    table = indptr + groups + 1
    return Plan.trusted(
        strategy.text if isinstance(strategy, Cohort) else str(strategy),
        int32_ramp(groups + 1),
        made[:row_hi],
        made[row_hi:rows],
        made[indptr:table],
        made[table:].reshape(5, segments),
        made[rows:indptr],
        tiles=policy.tiles,
    )


def _is_known(tree: Tree) -> bool:
    """Says whether C knows trees of this form: by request, with one row for each, and so one span for each node."""
    requests = tree.requests
    return requests is not None and requests.queries is None and 0 < len(tree.parent) == len(tree.topology.spans)


def _policy_of(strategy: Strategy, group: int) -> _PlannedPolicy | None:
    is_pipeline = isinstance(strategy, Pipeline) and strategy.grouping is by_row and strategy.name == "query"
    if not (is_pipeline or type(strategy) is Cohort):
        return None
    try:
        return _known_policy(strategy, group)
    except TypeError:  # a caller's own pipeline, with passes that cannot be hashed
        return None


@lru_cache(256)
def _known_policy(strategy: Strategy, group: int) -> _PlannedPolicy | None:
    """Returns what C has to know of a strategy; None if it does not know such strategies. group: rows of a KV head."""
    if isinstance(strategy, Pipeline):
        split = strategy.options.get("split", 0)
        if isinstance(split, int) and split >= 0 and strategy == query(split or None):
            return _PlannedPolicy((), 1, 0, split, 0.0)
        return None
    if not isinstance(strategy, Cohort) or strategy.cut_nodes or strategy.merges_last:
        return None
    tiles, rows = () if strategy.tile is None else (strategy.tile,), rows_per_tile(strategy.head_rows, group)
    shared_rows, shares = strategy.split_shared_rows or 0, float(strategy.shares or 0)
    return _PlannedPolicy(tiles, rows, shared_rows, strategy.split or 0, shares)
