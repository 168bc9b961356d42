"""The space that `auto` searches.

A policy is a `cohort` strategy: edge assignment x cohort rows (`heights_of`) x split x tile class x merge. An edge is
walked (its upper end belongs to the path that the cohort below walks) or cut (what lies above is walked apart, by
cohorts of its own, and results are merged). Where edges are cut, results are merged in a launch of their own
("reduce"), or by the items that walk the lowest parts of paths, in a second launch ("final"). On small trees every
assignment of edges is in the space; on large ones those that a threshold on rows gives, and what single moves make of
the best of them. The named strategies are in it as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache

from treegen.ir.errors import ShapeError
from treegen.ir.shape import Shape
from treegen.strategies.cohort import Cohort
from treegen.strategies.strategy import Strategy
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.tile_config import SMALL_ROWS, rows_per_tile, tile_class, wanted_class

HEAD_ROWS = (64, 32, 16, 1)
"""Query head rows of a cohort; 1 stands for one query row, which is plain per-row decoding."""
SPLITS = (None, 4096, 2048, 1024, 512, 256, 128)
"""KV tokens per work item; None: all that a cohort sees."""
MOST_EDGES = 10
"""Edges up to which every assignment is searched."""


def heights_of(group: int) -> tuple[int, ...]:
    """HEAD_ROWS, and where so many head rows hold query rows whose number is no power of two, what so many hold that is
    one: cohorts then end where subtrees do more often.
    """
    heights = list(HEAD_ROWS)
    for head_rows in HEAD_ROWS[:-1]:
        rows = rows_per_tile(head_rows, group)
        even = 1 << rows.bit_length() - 1
        if even < rows:
            heights.insert(heights.index(head_rows) + 1, even * group)
    return tuple(heights)


@cache
def policies_of(shape: Shape, target: Target) -> tuple[tuple[Cohort, ...], tuple[Cohort, ...]]:
    """Policies without cut or split, and behind them the same with every split, policy by policy.

    Every cohort height in the tile class that suits it, and cohorts that suit the small class also in the large one.
    """
    whole = []
    for head_rows in heights_of(shape.group):
        whole.append(Cohort(head_rows))
        if head_rows == SMALL_ROWS and shape.group <= SMALL_ROWS:
            large = tile_class(shape, target, SMALL_ROWS + 1)
            with suppress(ShapeError):
                wanted_class(large.rows, large.tokens, shape, target)
                whole.append(Cohort(head_rows, tile=(large.rows, large.tokens)))
    split = (replace(policy, split=tokens) for policy in whole for tokens in SPLITS[1:])
    return tuple(whole), tuple(split)


def between_splits(found: Iterable[Strategy], problem: Problem) -> Iterator[Cohort]:
    """The first of these that splits, with the splits halfway to the next smaller and larger of the space, where they
    cut anything.
    """
    for strategy in found:
        if isinstance(strategy, Cohort) and strategy.split is not None:
            whole = replace(strategy, split=None).plan(problem)
            for split in (strategy.split * 3 // 4, strategy.split * 3 // 2):
                other = replace(strategy, split=split)
                if split > SPLITS[-1] and len(other.plan(problem)) > len(whole):
                    yield other
            return
