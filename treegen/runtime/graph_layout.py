"""Plans of a declared capacity: one launch sequence and one layout of tables, which serve every tree that fits.

A captured CUDA graph holds grids and addresses. What these follow from is settled once, by the first tree and the
declared limits; another tree then only changes what the tables hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from treegen.ir.arena import Capacity
from treegen.ir.arrays import frozen
from treegen.ir.errors import InputError, PlanError, StrategyError
from treegen.ir.plan import BIT_MASKS, Mask, Merge, Plan
from treegen.ir.schedule import Schedule, TileMask
from treegen.ir.shape import Shape
from treegen.runtime.limits import Limits, WantedLimits
from treegen.runtime.window import View
from treegen.schedule.arrangement import Frame
from treegen.schedule.lower import lower
from treegen.schedule.pipeline import Lowering, lowered
from treegen.schedule.segment_runs import runs_of_groups
from treegen.strategies import Choice, Strategy
from treegen.target.tile_config import lanes_of

_HEADROOM = 2
"""What a limit that is not given leaves room for: so many times what the first tree needs."""
_TABLE_HEADROOM = 4
"""Room of tables of runs over what the first tree needs, at least."""
_FEWEST = 16
"""Rows and items that a limit which is not given allows, at least."""
_LEAST_RUNS = 1024
"""Entries of a table of runs, at least."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """What the first tree's schedule takes of tables that have no limit of their own, for `items` items in its largest
    launch: full tiles, packed runs, and rows listed for groups of several intervals. Runs count twice: each may grow to
    a tile, or to one more block.
    """

    items: int
    tiles: int
    blocks: int
    listed: int

    def room(self, needed: int, max_items: int) -> int:
        """Room of a table of which the first tree takes `needed`, for so many items."""
        return math.ceil(needed * max(_TABLE_HEADROOM, _HEADROOM * max_items / self.items))

    def items_for(self, wanted: int, needed: int) -> int:
        """The least `max_items` that give such a table room for `wanted`."""
        return math.ceil(wanted * self.items / (_HEADROOM * max(needed, 1)))


@dataclass(frozen=True, slots=True)
class Layout:
    """What a kernel of fixed capacity keeps for all its trees: the choice of a strategy, the tile classes of its
    launches, and the room of every table.

    Room that no limit names: every tile class takes `max_items` items, every merge `max_rows` rows. Full tiles, packed
    runs and listed rows: twice what `max_items` items like the first tree's would take (a run counted twice, so that it
    can grow), at least four times what the first tree takes, and at least 1,024 runs and `max_rows` rows. Lists of
    slots have room for all slots, twice where results are merged between stages. Where page tables are bounded
    (limits.PageBounds), there is also room for all tiles and runs that these may hold.
    """

    choice: Choice
    limits: Limits
    frame: Frame
    room: Capacity
    _mask: Mask
    _merge: Merge
    _blocks: int
    _demand: _Demand

    def lowered(self, view: View) -> Lowering:
        """The plan of another tree, and its schedule in this layout.

        Raises InputError that names the limit which the tree exceeds, and PlanError for a tree that calls for launches
        which are not there.
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
            ("packed runs", size.blocks, room.blocks, demand.blocks, 0),
            ("listed rows", size.rows, room.rows, demand.listed, limits.max_rows),
        )
        for what, wanted, there, needed, besides in tables:
            if wanted > there:
                enough = max(demand.items_for(wanted - besides, needed), limits.max_items + 1)
                raise _exceeded("max_items", limits.max_items, f"{wanted} {what}, with room for {there}", enough)
        for stage, (wanted, there) in enumerate(zip(size.merges, room.merges, strict=True)):
            if wanted > there:
                reason = f"merges {wanted} rows behind stage {stage}, where the first tree merged none"
                raise PlanError("tree", f"{wanted} merges", reason, "compile a kernel for such trees")


def layout_of(wanted: WantedLimits, choice: Choice, view: View) -> Layout:
    """The layout that follows from the first tree and the limits that are declared.

    Of limits that are not given, rows are twice the tree's, items and slots twice what it needs, and more in proportion
    where max_rows is; there are at least 16 rows and items, and a slot per row. Where page tables are bounded, limits
    follow from these bounds instead. Raises StrategyError for a strategy that runs unfused; the first tree has to fit,
    as all others (Layout.lowered).
    """
    tree, shape, plan = view.tree, view.problem.shape, view.planned(choice.strategy)
    exact = lower(plan, view.problem, positions=view.positions)
    if not all(tile.fused for tile in exact.classes):
        reason = "runs unfused, with operations that follow the tree"
        raise StrategyError("strategy", str(choice.strategy), reason, "name another one, or declare no capacity")
    frame = _frame(plan, exact)
    first_plan, first = _framed(plan, view, frame, plan.blocks)
    most = max(first.size.items)
    runs = np.zeros(len(first_plan), np.int64)
    runs[: len(plan)] = runs_of_groups(plan, tree).counts
    listed = len(first.rows) - tree.num_rows
    growing = int(runs[first.column("group")].sum())
    demand = _Demand(max(most, 1), len(first.tiles) + growing, len(first.blocks) + growing, listed)
    if wanted.pages is None:
        max_rows = wanted.max_rows or max(_HEADROOM * tree.num_rows, _FEWEST)
        growth = max(_HEADROOM, max_rows / max(tree.num_rows, 1)) if tree.num_rows else _HEADROOM
        bound = Limits(
            max_rows,
            max(math.ceil(growth * most), _FEWEST),
            max(math.ceil(growth * first.size.slots), max_rows),
        )
    else:
        bound = wanted.pages.limits(choice.strategy, frame.sizes, shape)
    limits = Limits(
        wanted.max_rows or bound.max_rows, wanted.max_items or bound.max_items, wanted.max_slots or bound.max_slots
    )
    room = _room(limits, demand, first, plan, _merges(choice.strategy), shape)
    if wanted.pages is not None:
        tiles, blocks = wanted.pages.entries(frame.sizes, limits.max_items)
        room = replace(room, tiles=max(room.tiles, tiles), blocks=max(room.blocks, blocks))
    layout = Layout(choice, limits, frame, room, plan.mask, plan.merge, plan.blocks, demand)
    layout.lowered(view)
    return layout


def _merges(strategy: Strategy) -> bool:
    """Whether some tree's plan may have partial results."""
    return not strategy.proven or strategy.traffic is None or strategy.traffic.partials != "none"


def _frame(plan: Plan, exact: Schedule) -> Frame:
    """The classes of the plan's own schedule, each as general as it can be: with masks, with packed runs as short as
    some stage calls for, and merging wherever the policy merges last.
    """
    count = len(exact.classes) // exact.num_stages
    stages = max(int(plan.stage.max(initial=0)) + 1, 2 if plan.merge == "final" else 1)
    mask: TileMask = "bits" if plan.mask in BIT_MASKS else "interval"
    sizes = [
        replace(exact.classes[k], mask=mask, block=min(tile.block for tile in exact.classes[k::count]), merging=False)
        for k in range(count)
    ]
    last = [replace(tile, merging=plan.merge == "final") for tile in sizes]
    return Frame((*sizes * (stages - 1), *last), stages)


def _framed(plan: Plan, view: View, frame: Frame, blocks: int) -> Lowering:
    """The plan and its schedule in a frame. Under "final" merge the plan's last stage is the frame's."""
    latest = int(plan.stage.max(initial=0))
    if latest >= frame.stages:
        reason = f"needs more than the {frame.stages} stages of launches that the first tree had"
        raise PlanError("tree", f"{latest + 1} stages", reason, "compile a kernel for such trees")
    if plan.merge == "final" and len(plan) and latest != frame.stages - 1:
        plan = replace(plan, stage=frozen(np.where(plan.stage == latest, frame.stages - 1, plan.stage)))
    if plan.blocks > blocks:
        plan = replace(plan, blocks=blocks)
    return lowered(plan, view.problem, frame, view.positions)


def _room(limits: Limits, demand: _Demand, first: Schedule, plan: Plan, merges: bool, shape: Shape) -> Capacity:
    """See Layout."""
    stages, final = first.num_stages, plan.merge == "final"
    # Between stages rows merge behind every one but the first, and there if the first tree's do.
    there = [s > 0 or first.size.merges[0] > 0 for s in range(stages)]
    there = [merges and (s == stages - 1 or (there[s] and not final)) for s in range(stages)]
    slots = limits.max_slots if merges else 0
    tile = first.classes[0]
    lanes = lanes_of(tile, shape)
    rows = limits.max_rows + max(demand.room(demand.listed, limits.max_items), limits.max_rows)
    return Capacity(
        items=(limits.max_items,) * len(first.classes),
        rows=rows,
        tiles=max(demand.room(demand.tiles, limits.max_items), _LEAST_RUNS),
        blocks=max(demand.room(demand.blocks, limits.max_items), _LEAST_RUNS),
        merges=tuple(limits.max_rows if merged else 0 for merged in there),
        merge_slots=slots * (2 if stages > 1 and not final else 1),
        slots=slots,
        workers=plan.blocks,
        work=limits.max_items * lanes if tile.dealt else 0,
        epilogue_rows=rows if final else 0,
        epilogue_slots=slots if final else 0,
        positions=limits.max_rows if len(first.row_positions) else 0,
    )


def _exceeded(limit: str, value: int, need: str, enough: int) -> InputError:
    return InputError(limit, value, f"the tree needs {need}", f"raise {limit} to at least {enough}")
