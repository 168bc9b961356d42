"""Layouts of a fixed capacity: one sequence of launches and one set of tables, which serve every tree that fits.

A captured CUDA graph holds grids and addresses. The first tree and the declared limits fix both, and later trees change
only the contents of tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from treegen.ir.arena import ArenaSizes
from treegen.ir.arrays import frozen
from treegen.ir.errors import InputError, PlanError, StrategyError
from treegen.ir.kernel_config import TileMask
from treegen.ir.plan import BIT_MASKS, Mask, MergePlace, Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.runtime.limits import GraphLimits, WantedLimits
from treegen.runtime.window import WindowedTree
from treegen.schedule.arrangement import Frame
from treegen.schedule.lower import lower
from treegen.schedule.pipeline import Lowering, lowered
from treegen.schedule.segment_runs import runs_of_groups
from treegen.strategies import Choice, Strategy
from treegen.target.tile_config import lanes_of

_HEADROOM = 2
"""Default headroom: each unspecified limit is 2x what the first tree needs, if that is not less than `_FEWEST`."""
_TABLE_HEADROOM = 4
"""The least room of a table of runs, as a multiple of what the first tree needs."""
_FEWEST = 16
"""The least rows and items of an unspecified limit."""
_LEAST_RUNS = 1024
"""The least entries of a table of runs."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """The first tree's use of tables without a limit of their own.

    items: work items of its largest launch. tiles: full tiles. packed_runs: its packed runs. listed: rows listed for
    groups of several intervals. A KV run counts twice, because it may grow to a full tile, or by a packed run.
    """

    items: int
    tiles: int
    packed_runs: int
    listed: int

    def room(self, needed: int, max_items: int) -> int:
        """Sizes a table for `max_items` items, where the first tree needs `needed` entries."""
        return math.ceil(needed * max(_TABLE_HEADROOM, _HEADROOM * max_items / self.items))

    def items_for(self, wanted: int, needed: int) -> int:
        """Returns the least `max_items` that give such a table room for `wanted` entries."""
        return math.ceil(wanted * self.items / (_HEADROOM * max(needed, 1)))


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """The choice of a strategy, the kernel configs and the room of all tables, which serve every tree of a kernel.

    Limits fix some sizes: each kernel config has room for `max_items` items, and each merge for `max_rows` rows. Full
    tiles, packed runs and listed rows have twice the room that `max_items` items like the first tree's would take (a
    run counted twice, so that it can grow), at least four times what the first tree takes, and at least 1,024 runs and
    `max_rows` rows. Lists of partial slots have room for all slots, and twice that where results are merged between
    rounds. With bounded page tables (limits.PageBounds) there is also room for all their tiles and runs.
    """

    choice: Choice
    limits: GraphLimits
    frame: Frame
    room: ArenaSizes
    _mask: Mask
    _merge: MergePlace
    _blocks: int
    _demand: _Demand

    def lowered(self, view: WindowedTree) -> Lowering:
        """Plans for another tree, and lowers the plan in this layout.

        Raises InputError, which names the limit to raise, for a tree that exceeds a limit, and PlanError for a tree
        that needs other launches.
        """
        rows = view.tree.num_rows
        if rows > self.limits.max_rows:
            raise _exceeded("max_rows", self.limits.max_rows, f"{rows} rows", rows)
        plan = view.planned(self.choice.strategy)
        if (plan.mask, plan.merge) != (self._mask, self._merge):
            value, reason = f"{plan.mask}, {plan.merge}", f"differs from {self._mask}, {self._merge} of the first tree"
            raise PlanError("mask, merge", value, reason, "let the strategy keep them, or compile another kernel")
        made = _framed(plan, view, self.frame, self._blocks)
        self._check(made.schedule)
        return made

    def _check(self, schedule: Schedule) -> None:
        """Raises InputError or PlanError unless the schedule fits."""
        size, room, limits, demand = schedule.size, self.room, self.limits, self._demand
        if max(size.items) > limits.max_items:
            raise _exceeded("max_items", limits.max_items, f"{max(size.items)} items in a launch", max(size.items))
        if size.slots > room.slots:
            raise _exceeded("max_slots", limits.max_slots, f"{size.slots} slots of partial results", size.slots)
        tables = (
            ("full tiles", size.tiles, room.tiles, demand.tiles, 0),
            ("packed runs", size.packed_runs, room.packed_runs, demand.packed_runs, 0),
            ("listed rows", size.rows, room.rows, demand.listed, limits.max_rows),
        )
        for what, wanted, there, needed, besides in tables:
            if wanted > there:
                enough = max(demand.items_for(wanted - besides, needed), limits.max_items + 1)
                raise _exceeded("max_items", limits.max_items, f"{wanted} {what}, with room for {there}", enough)
        for round, (wanted, there) in enumerate(zip(size.merges, room.merges, strict=True)):
            if wanted > there:
                reason = f"merges {wanted} rows after round {round}, where the first tree merged none"
                raise PlanError("tree", f"{wanted} merges", reason, "compile a kernel for such trees")


def layout_of(wanted: WantedLimits, choice: Choice, view: WindowedTree) -> GraphLayout:
    """Makes the layout for a first tree and the declared limits.

    Default headroom: each unspecified limit is 2x what the first tree needs, and more in proportion where `max_rows` is
    more than 2x. There are at least 16 rows and items, and a partial slot for each row. With bounded page tables,
    unspecified limits follow from the bounds instead.

    Args:
        wanted: The declared limits.
        choice: The strategy for all trees.
        view: The first tree, which has to fit like all others.

    Raises:
        StrategyError: The strategy runs unfused.
        InputError, PlanError: As of GraphLayout.lowered.
    """
    tree, shape, plan = view.tree, view.problem.shape, view.planned(choice.strategy)
    exact = lower(plan, view.problem, positions=view.positions)
    if not all(config.fused for config in exact.configs):
        reason = "runs unfused, with operations that follow the tree"
        raise StrategyError("strategy", str(choice.strategy), reason, "name another one, or declare no capacity")
    frame = _frame(plan, exact)
    first_plan, first = _framed(plan, view, frame, plan.blocks)
    most = max(first.size.items)
    runs = np.zeros(len(first_plan), np.int64)
    runs[: len(plan)] = runs_of_groups(plan, tree).counts
    listed = len(first.rows) - tree.num_rows
    growing = int(runs[first.column("group")].sum())
    demand = _Demand(max(most, 1), len(first.tiles) + growing, len(first.packed_runs) + growing, listed)
    if wanted.pages is None:
        max_rows = wanted.max_rows or max(_HEADROOM * tree.num_rows, _FEWEST)
        growth = max(_HEADROOM, max_rows / max(tree.num_rows, 1)) if tree.num_rows else _HEADROOM
        bound = GraphLimits(
            max_rows,
            max(math.ceil(growth * most), _FEWEST),
            max(math.ceil(growth * first.size.slots), max_rows),
        )
    else:
        bound = wanted.pages.limits(choice.strategy, frame.round_configs, shape)
    limits = GraphLimits(
        wanted.max_rows or bound.max_rows, wanted.max_items or bound.max_items, wanted.max_slots or bound.max_slots
    )
    room = _room(limits, demand, first, plan, _merges(choice.strategy), shape)
    if wanted.pages is not None:
        tiles, packed_runs = wanted.pages.entries(frame.round_configs, limits.max_items)
        room = replace(room, tiles=max(room.tiles, tiles), packed_runs=max(room.packed_runs, packed_runs))
    layout = GraphLayout(choice, limits, frame, room, plan.mask, plan.merge, plan.blocks, demand)
    layout.lowered(view)
    return layout


def _merges(strategy: Strategy) -> bool:
    """Says whether the strategy's plan of some tree may have partial results."""
    return not strategy.proven or strategy.traffic is None or strategy.traffic.partials != "none"


def _frame(plan: Plan, exact: Schedule) -> Frame:
    """Makes the kernel configs of the plan's own schedule general enough for every tree.

    They have masks, the shortest packed runs of all rounds, and an epilogue that merges in the last round under "final"
    merge.
    """
    count = len(exact.configs) // exact.num_rounds
    rounds = max(int(plan.round.max(initial=0)) + 1, 2 if plan.merge == "final" else 1)
    mask: TileMask = "bits" if plan.mask in BIT_MASKS else "interval"
    round_configs = [
        replace(
            exact.configs[k],
            mask=mask,
            run_tokens=min(config.run_tokens for config in exact.configs[k::count]),
            epilogue_merge=False,
        )
        for k in range(count)
    ]
    last = [replace(config, epilogue_merge=plan.merge == "final") for config in round_configs]
    return Frame((*round_configs * (rounds - 1), *last), rounds)


def _framed(plan: Plan, view: WindowedTree, frame: Frame, blocks: int) -> Lowering:
    """Lowers a plan in a frame. Under "final" merge the plan's last round becomes the frame's last one."""
    latest = int(plan.round.max(initial=0))
    if latest >= frame.rounds:
        reason = f"needs more than the {frame.rounds} rounds of launches that the first tree had"
        raise PlanError("tree", f"{latest + 1} rounds", reason, "compile a kernel for such trees")
    if plan.merge == "final" and len(plan) and latest != frame.rounds - 1:
        plan = replace(plan, round=frozen(np.where(plan.round == latest, frame.rounds - 1, plan.round)))
    if plan.blocks > blocks:
        plan = replace(plan, blocks=blocks)
    return lowered(plan, view.problem, frame, view.positions)


def _room(limits: GraphLimits, demand: _Demand, first: Schedule, plan: Plan, merges: bool, shape: Shape) -> ArenaSizes:
    """Sizes all tables. See GraphLayout."""
    rounds, final = first.num_rounds, plan.merge == "final"
    # Rows are merged after each round but the first, and after that if the first tree's rows are.
    there = [s > 0 or first.size.merges[0] > 0 for s in range(rounds)]
    there = [merges and (s == rounds - 1 or (there[s] and not final)) for s in range(rounds)]
    slots = limits.max_slots if merges else 0
    config = first.configs[0]
    lanes = lanes_of(config, shape)
    rows = limits.max_rows + max(demand.room(demand.listed, limits.max_items), limits.max_rows)
    return ArenaSizes(
        items=(limits.max_items,) * len(first.configs),
        rows=rows,
        tiles=max(demand.room(demand.tiles, limits.max_items), _LEAST_RUNS),
        packed_runs=max(demand.room(demand.packed_runs, limits.max_items), _LEAST_RUNS),
        merges=tuple(limits.max_rows if merged else 0 for merged in there),
        merge_partials=slots * (2 if rounds > 1 and not final else 1),
        slots=slots,
        workers=plan.blocks,
        work=limits.max_items * lanes if config.work_list else 0,
        epilogue_rows=rows if final else 0,
        epilogue_partials=slots if final else 0,
        positions=limits.max_rows if len(first.row_positions) else 0,
    )


def _exceeded(limit: str, value: int, need: str, enough: int) -> InputError:
    return InputError(limit, value, f"the tree needs {need}", f"raise {limit} to at least {enough}")
