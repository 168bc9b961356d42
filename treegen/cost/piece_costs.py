"""Costs of single pieces of work, by the terms that estimates use for whole launches (treegen.target.cost_terms)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from treegen.cost.analytic import Times
from treegen.cost.launch_work import LaunchWork, launch_work
from treegen.ir.arrays import Floats, offsets, ragged_ranges
from treegen.ir.schedule import Schedule
from treegen.target.cost_terms import ITEMS, term_values
from treegen.target.problem import Problem
from treegen.target.targets import starts_launches_early
from treegen.target.tile_config import MOST_RESIDENT, resident_blocks, tile_work


class CostedWork(NamedTuple):
    """The pieces of work of one launch, with their costs.

    Attributes:
        work: The pieces.
        lone_us: `[pieces]`; microseconds on an SM that runs nothing else.
        full_us: `[pieces]`; microseconds of a whole SM that a piece takes where the SM is full.
        join_us: `[pieces]`; microseconds of joining partials of earlier launches, at the end.
        resident: Thread blocks that an SM holds at a time.
        launch_us: Microseconds of the whole launch in the estimate.
        starts_early: Whether thread blocks may start before the launch before has ended, and wait for it only where
            they join its partials.
    """

    work: LaunchWork
    lone_us: Floats
    full_us: Floats
    join_us: Floats
    resident: int
    launch_us: float
    starts_early: bool


def costed_work(schedule: Schedule, problem: Problem, times: Times) -> Iterator[CostedWork]:
    """Yields the launches of a schedule in launch order, with the costs of their pieces.

    Args:
        schedule: The schedule that the account counts.
        problem: The tree, the attention shape and the target.
        times: The parts of its estimated time.
    """
    items_us = _shares(times.launch_terms.get("items_us"), times.items)
    merge_us = _shares(times.merge_terms.get("merge_us"), times.merges)
    for work in launch_work(schedule, problem.shape):
        if work.config < 0:
            yield _of_merges(schedule, work, problem, next(merge_us))
        else:
            yield _of_items(schedule, work, problem, next(items_us))


def _shares(terms: Floats | None, whole: float) -> Iterator[float]:
    """Divides the time of all launches of a kind in proportion to the model's terms."""
    if terms is not None and len(terms):
        yield from (terms * (whole / float(terms.sum()))).tolist()


def _of_items(schedule: Schedule, work: LaunchWork, problem: Problem, launch_us: float) -> CostedWork:
    """Costs a launch of work items: each piece as a launch of its own, alone, or on an SM that is full."""
    _, shape, target = problem
    config = schedule.configs[work.config]
    row0, rows, full, packed = (
        schedule.column(name).astype(np.int64) for name in ("row0", "rows", "tiles", "packed_tiles")
    )
    flops, loaded = tile_work(config, shape)
    ones, zeros = np.ones(len(rows)), np.zeros(len(rows))
    own_counts = {
        "pieces": ones,
        "even_pieces": ones,
        "full": full * ones,
        "packed": packed * ones,
        "longest_pieces": ones,
        "longest_full": full * ones,
        "longest_packed": packed * ones,
        "longest_merges": zeros,
        "tile_flops": flops * ones,
        "tile_bytes": loaded * ones,
        "tile_rows": config.rows * ones,
        "memory_bytes": zeros,
    }
    values = term_values(ITEMS, own_counts, target)
    lone, busy = values["chain"], values["throughput"] * target.sms
    join = np.zeros(len(rows))
    if config.epilogue_merge:
        counts = np.diff(schedule.epilogue_indptr)[ragged_ranges(row0, rows)]
        join[rows > 0] = np.maximum.reduceat(counts, offsets(rows)[:-1][rows > 0]) * target.constants.merge_step_us
    early = config.epilogue_merge and starts_launches_early(target.capability)
    resident = resident_blocks(config, shape, target)
    return CostedWork(work, lone[work.item], busy[work.item], join[work.item], resident, launch_us, early)


def _of_merges(schedule: Schedule, work: LaunchWork, problem: Problem, launch_us: float) -> CostedWork:
    """Costs a launch of a round's merges."""
    counts = np.diff(schedule.merge_indptr)[work.item].astype(np.float64)
    steps = np.maximum(counts, 1.0) * problem.target.constants.merge_step_us
    return CostedWork(work, steps, steps / MOST_RESIDENT, 0 * steps, MOST_RESIDENT, launch_us, False)
