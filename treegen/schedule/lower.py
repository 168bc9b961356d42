"""Lowering: makes the schedule of a plan, for a tree by KV slot and an attention shape.

No Python loop over items or tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, offsets
from treegen.ir.errors import PlanError
from treegen.ir.kernel_config import KernelConfig, TileMask
from treegen.ir.plan import BIT_MASKS, Plan
from treegen.ir.positions import Positions
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.schedule.arrangement import Arranged, Frame, Items, arrange, config_offsets, row_table_of
from treegen.schedule.merge_lists import NO_EPILOGUE, Epilogue
from treegen.schedule.pack_runs import (
    PackedTables,
    cut_runs,
    cut_runs_at_places,
    cut_runs_to_pack,
    places_along_paths,
    table,
    tabulate,
    usual_run_tokens,
)
from treegen.schedule.row_results import row_results
from treegen.schedule.segment_runs import Runs, bit_words, masked_launches
from treegen.strategies.makespan import assign
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.task_costs import task_costs, task_rows
from treegen.target.tile_config import lanes_of


class _Work(NamedTuple):
    """The work lists of a Schedule."""

    indptr: Ints
    entries: Ints


_NO_WORK = _Work(frozen(np.zeros(1)), frozen(np.empty(0)))
_NO_POSITIONS = frozen(np.empty(0))


def lower(
    plan: Plan,
    problem: Problem,
    frame: Frame | None = None,
    positions: Positions | None = None,
) -> Schedule:
    """Makes the schedule of a plan: work items in launch order, the tables that they read, and merge lists.

    An item whose rows have no other item writes final output. All other items write partial slots, which are merged.
    Under "final" merge an item of the plan's last round writes final output, too: it merges the partials that earlier
    rounds left for its rows.

    Args:
        plan: The groups of rows and the segments that they read.
        problem: The tree, the attention shape and the target.
        frame: Kernel configs to use instead of those that suit the plan best; the plan's rounds keep their numbers.
        positions: The tree's positions, for kernels whose scores depend on them.

    Raises:
        ShapeError: No kernel config fits the shape.
        PlanError: A plan that runs unfused has rows to merge, a row has several items that could merge its partials, or
            a batch-invariant plan's runs do not fill its packed runs.
    """
    arranged = arrange(plan, problem, frame, positions)
    if plan.invariant_block:
        configs = arranged.configs
        tables = _tabulate_fixed(plan, problem.tree, configs[0], arranged.items, arranged.runs)
    else:
        configs, tables = _tabulate_configs(plan, arranged, fixed=frame is not None or plan.invariant_block > 0)
    return scheduled(plan, problem, arranged, configs, tables, positions, framed=frame is not None)


def scheduled(
    plan: Plan,
    problem: Problem,
    arranged: Arranged,
    configs: tuple[KernelConfig, ...],
    tables: PackedTables,
    positions: Positions | None = None,
    *,
    framed: bool,
) -> Schedule:
    """Makes the schedule of arranged items and their tables. framed: whether the kernel configs come from a frame."""
    tree, shape, target = problem
    items, num_rounds, launches = arranged.items, arranged.num_rounds, len(arranged.bounds) - 1
    row_table, row0 = row_table_of(plan, tree)
    row0 = row0[items.group] + items.begin
    results = row_results(plan, items, row_table, row0, tree.num_rows, num_rounds, launches)
    if framed or plan.invariant_block:
        if any(config.epilogue_merge for config in configs) and not len(results.epilogue.slots):
            results = results._replace(epilogue=Epilogue(frozen(np.zeros(len(row_table) + 1)), NO_EPILOGUE.slots))
    elif results.merging is not None:
        configs = tuple(
            replace(config, epilogue_merge=own) for config, own in zip(configs, results.merging, strict=True)
        )
    dealt = _deal(plan, configs, items.rows, arranged.work, shape, target)
    return Schedule.trusted(
        configs=configs,
        config_indptr=config_offsets(tuple(arranged.bounds)),
        items=table(row0, items.rows, *tables.walk, results.partial0, items.group),
        rows=row_table,
        tiles=tables.tiles,
        packed_runs=tables.packed_runs,
        merge_rows=results.merges.rows,
        merge_indptr=results.merges.indptr,
        merge_partials=results.merges.slots,
        round_indptr=_round_indptr(num_rounds, launches),
        merge_round_indptr=results.merges.round_indptr,
        work_indptr=dealt.indptr,
        work=dealt.entries,
        epilogue_indptr=results.epilogue.indptr,
        epilogue_partials=results.epilogue.slots,
        row_positions=_NO_POSITIONS if positions is None else positions.row,
        fixed=plan.invariant_block > 0,
    )


@cache
def _launched_config(config: KernelConfig, mask: TileMask, run_tokens: int, dealt: bool) -> KernelConfig:
    """Specialises a kernel config for the runs of one launch."""
    return replace(config, mask=mask, run_tokens=run_tokens, work_list=dealt)


@cache
def _round_indptr(rounds: int, launches: int) -> Ints:
    """Makes the offsets of rounds that have the same number of launches each."""
    return frozen(np.arange(rounds + 1) * (launches // rounds))


def _tabulate_configs(plan: Plan, arranged: Arranged, *, fixed: bool) -> tuple[tuple[KernelConfig, ...], PackedTables]:
    """Gives each launch's kernel config the mask and packed runs that it needs, and makes the tables of all launches.

    fixed: whether configs keep their masks and packed runs, as those of a fixed capacity do.
    """
    configs, tokens, items, runs, work, bounds, _ = arranged
    if fixed and plan.mask in BIT_MASKS:
        runs.table[:, 2], runs.table[:, 3] = bit_words(runs.table[:, 2], runs.table[:, 3])
    if fixed or not configs[0].fused:
        cut = cut_runs(runs, items.config, tokens, tuple(config.run_tokens for config in configs))
        return configs, tabulate(runs, cut, items.config, tokens)
    cut = cut_runs_to_pack(runs, work, items.config, tokens, usual_run_tokens(plan))
    mask: TileMask = "bits" if plan.mask in BIT_MASKS else "interval"
    of_runs = [0, len(runs.table)] if len(configs) == 1 else runs.indptr[bounds].tolist()
    masked = masked_launches(runs, items.rows, of_runs)
    if mask == "bits":
        for is_masked, (begin, end) in zip(masked, pairwise(of_runs), strict=True):
            if is_masked:
                of_config = runs.table[begin:end]
                of_config[:, 2], of_config[:, 3] = bit_words(of_config[:, 2], of_config[:, 3])
    dealt = plan.blocks > 0
    launched = [
        _launched_config(config, mask if is_masked else "none", run_tokens, dealt)
        for config, run_tokens, is_masked in zip(configs, cut.run_tokens, masked, strict=True)
    ]
    return tuple(launched), tabulate(runs, cut, items.config, tokens)


def _tabulate_fixed(plan: Plan, tree: Tree, config: KernelConfig, items: Items, runs: Runs) -> PackedTables:
    """Makes the tables of a batch-invariant plan. Each of its groups is one work item."""
    if len(items.group) and int(items.begin.max()):
        rows = int(plan.group_rows.max())
        raise PlanError(
            "invariant_block", f"a group of {rows} rows", f"exceeds a tile of {config.rows} head rows", "divide it"
        )
    places = places_along_paths(plan, tree, items.group, runs)
    return tabulate(
        runs, cut_runs_at_places(runs, places, config.tokens, config.run_tokens), items.config, (config.tokens,)
    )


def _deal(
    plan: Plan, configs: tuple[KernelConfig, ...], rows: Longs, work: Longs, shape: Shape, target: Target
) -> _Work:
    """Deals items to the plan's thread blocks, the costliest first (treegen.strategies.makespan).

    rows, work: rows and KV tokens of each item. Without thread blocks in the plan the lists are empty. Raises PlanError
    for a plan of several kernel configs.
    """
    if not plan.blocks:
        return _NO_WORK
    if len(configs) > 1 or not configs[0].fused:
        raise PlanError(
            "blocks", plan.blocks, "needs a single kernel config", "use one tile size, round and fused mask"
        )
    lanes = lanes_of(configs[0], shape)
    costs = task_costs(shape, target)(task_rows(rows, configs[0], shape), work)
    worker = assign(np.repeat(costs, lanes), min(plan.blocks, max(len(rows) * lanes, 1)))
    counts = np.bincount(worker, minlength=1)
    return _Work(frozen(offsets(counts)), frozen(np.argsort(worker, kind="stable")))
