"""What a kernel serves: a tree with its plan, the programs that run it, and calls that are bound to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy.typing as npt
import torch

from treegen.backends.bound_call import Call
from treegen.backends.kv_scales import Scales
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import TritonProgram
from treegen.ir.arrays import IntsLike
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.runtime.append import Growth
from treegen.runtime.graph_layout import Layout, layout_of
from treegen.runtime.limits import WantedLimits
from treegen.runtime.window import View
from treegen.schedule.lower import lower
from treegen.schedule.passes.reserve import with_room
from treegen.scoring.options import Scoring
from treegen.strategies import Choice
from treegen.target.targets import Target
from treegen.timed import stage

Program: TypeAlias = "TritonProgram | TorchProgram"
KeptCall: TypeAlias = "tuple[Call, int]"
"""A bound call, and the number of slots of the caches that it serves."""

_MOST_FORMS = 64
"""Forms of tensors for which calls are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A tree, the choice of a strategy, its plan and schedule, and what serves them. Calls read it without a lock:
    another tree is another Served, in the kernel's place for this one.

    view: what the plan is of; scoring: what is done to scores. layout: of a kernel of fixed capacity, whose programs
    and calls go from tree to tree; else they are of this tree alone. growth: what rows have gained since, where there
    is room for it in the tables.
    programs: by backend and device; calls: by the form of tensors and the base of the lse.
    """

    tree: Tree
    view: View
    choice: Choice
    plan: Plan
    schedule: Schedule
    scoring: Scoring | None = None
    layout: Layout | None = None
    growth: Growth | None = None
    programs: dict[tuple[str, torch.device], Program] = field(default_factory=dict)
    calls: dict[tuple[object, str], KeptCall] = field(default_factory=dict)
    _planned_last_slot: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_planned_last_slot", self.tree.kv.last_slot)

    @classmethod
    def of(
        cls,
        tree: Tree,
        choice: Choice,
        shape: Shape,
        target: Target,
        scoring: Scoring | None = None,
        *,
        grows: bool = False,
    ) -> Served:
        """A tree with the plan that the choice makes of it; `grows` leaves room for rows to grow."""
        view = View.of(tree, scoring)
        with stage("plan"):
            plan = view.planned(choice.strategy, shape, target)
        with stage("lower"):
            schedule = lower(plan, view.tree, shape, target, positions=view.positions)
        return cls(tree, view, choice, plan, schedule, scoring, growth=_growth(tree, schedule, None) if grows else None)

    @classmethod
    def in_layout(
        cls,
        tree: Tree,
        layout: Layout,
        shape: Shape,
        target: Target,
        scoring: Scoring | None = None,
        *,
        grows: bool = False,
    ) -> Served:
        """A tree in a layout that holds more. Raises InputError or PlanError for one that exceeds it."""
        view = View.of(tree, scoring)
        with stage("plan and lower"):
            plan, schedule = layout.lowered(view, shape, target)
        growth = _growth(tree, schedule, layout) if grows else None
        return cls(tree, view, layout.choice, plan, schedule, scoring, layout, growth)

    @classmethod
    def first(
        cls,
        tree: Tree,
        wanted: WantedLimits,
        choice: Choice,
        shape: Shape,
        target: Target,
        scoring: Scoring | None = None,
        *,
        grows: bool = False,
    ) -> Served:
        """The first tree of a fixed capacity. Raises as capacity.layout_of does."""
        with stage("layout"):
            layout = layout_of(wanted, choice, View.of(tree, scoring), shape, target)
            return cls.in_layout(tree, layout, shape, target, scoring, grows=grows)

    def successor(self, tree: Tree, shape: Shape, target: Target, *, grows: bool = False) -> Served:
        """Another tree in this one's layout, programs and calls. Raises before anything on a device changes."""
        assert self.layout is not None
        made = replace(
            self.in_layout(tree, self.layout, shape, target, self.scoring, grows=grows),
            programs=self.programs,
            calls=self.calls,
        )
        for program in self.programs.values():
            program.load(made.launched)
        return made

    def take(self, rows: IntsLike | None, tokens: int, slots: npt.ArrayLike | None, captured: int | None) -> bool:
        """Lets rows grow in the tables that there are; False where that cannot be. See Growth.take."""
        return self.growth is not None and self.growth.take(rows, tokens, slots, self.programs.values(), captured)

    @property
    def last_slot(self) -> int:
        """The highest slot of the tree with what rows have gained, -1 without tokens."""
        return self._planned_last_slot if self.growth is None else self.growth.last_slot

    @property
    def grown(self) -> Tree:
        """The tree with what rows have gained."""
        return self.tree if self.growth is None else self.growth.tree

    def up_to_date(self, shape: Shape, target: Target) -> Served:
        """What is served, as a plan of the tree that it has grown to."""
        tree = self.grown
        if self.layout is None:
            return Served.of(tree, self.choice, shape, target, self.scoring)
        return Served.in_layout(tree, self.layout, shape, target, self.scoring)

    @property
    def launched(self) -> Schedule:
        """The schedule in the form in which programs have it, with room for growth."""
        return self.schedule if self.growth is None else self.growth.schedule

    @property
    def neighbours(self) -> int:
        """Tokens whose places kernels count from that of the first, at most: those of a full tile, if there are any."""
        schedule = self.launched
        if self.layout is None and not schedule.column("tiles").any():
            return 1
        return max((tile.tokens for tile in schedule.classes), default=1)

    def make_program(self, backend: str, shape: Shape, device: torch.device, scales: Scales | None = None) -> Program:
        """A new program for the schedule, with the scales of keys and values."""
        if backend != "triton":
            return TorchProgram(self.launched, shape, device, scales, self.scoring)
        if self.layout is None:
            return TritonProgram(self.launched, shape, device, scales=scales, scoring=self.scoring)
        room, most_rows = self.layout.room, self.layout.limits.max_rows
        return TritonProgram(self.launched, shape, device, room, most_rows, scales, self.scoring)

    def keep_call(self, form: tuple[object, ...], lse_base: str, call: KeptCall) -> None:
        """Keeps a call for tensors of its form; of too many the oldest goes."""
        self.calls[form, lse_base] = call
        if len(self.calls) > _MOST_FORMS:
            del self.calls[next(iter(self.calls))]


def _growth(tree: Tree, schedule: Schedule, layout: Layout | None) -> Growth | None:
    """Growth of a tree's rows, where there is room for it; none in fixed blocks, whose places follow from lengths."""
    if schedule.fixed:
        return None
    with stage("room"):
        room = with_room(schedule, tree)
        if room is None or (layout is not None and not layout.holds(room.schedule)):
            return None
        return Growth(tree, room)
