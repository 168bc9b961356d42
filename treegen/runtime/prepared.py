"""What a kernel serves: a tree with its plan and schedule, the programs that run it, and calls bound to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from treegen.backends.bound_call import Call
from treegen.backends.kv_scales import Scales
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import TritonProgram
from treegen.ir.arrays import IntsLike
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.tree import Tree
from treegen.runtime.append import Growth
from treegen.runtime.graph_layout import Layout, layout_of
from treegen.runtime.limits import WantedLimits
from treegen.runtime.window import View
from treegen.schedule.pipeline import RESERVE, Lowering, launched, lowered
from treegen.scoring.options import Scoring
from treegen.strategies import Choice
from treegen.target.problem import Problem
from treegen.timed import stage
from treegen.tuning.planner import Planner

Program: TypeAlias = "TritonProgram | TorchProgram"
KeptCall: TypeAlias = "tuple[Call, int]"
"""A bound call, and the number of slots of the caches that it serves."""

_MOST_FORMS = 64
"""Forms of tensors for which calls are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A problem, the choice of a strategy, its plan and schedule, and what serves them. Calls read it without a lock:
    another tree is another Prepared, in the kernel's place for this one.

    problem: with the caller's whole tree; view: what the plan is of; counted: the schedule that accounts count;
    scoring: what is done to scores. layout: of a kernel of fixed capacity, whose programs and calls go from tree to
    tree; else they are of this tree alone. growth: what rows have gained since, where there is room for it in the
    tables. programs: by backend and device; calls: by the form of tensors and the base of the lse.
    """

    problem: Problem
    view: View
    choice: Choice
    plan: Plan
    counted: Schedule
    scoring: Scoring | None = None
    layout: Layout | None = None
    growth: Growth | None = None
    programs: dict[tuple[str, torch.device], Program] = field(default_factory=dict)
    calls: dict[tuple[object, str], KeptCall] = field(default_factory=dict)
    _launched: Schedule | None = field(init=False, default=None)
    _planned_last_slot: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_planned_last_slot", self.problem.tree.kv.last_slot)

    @classmethod
    def of(cls, problem: Problem, view: View, choice: Choice, scoring: Scoring | None, *, grows: bool) -> Prepared:
        """A problem with the plan that the choice makes of it; `grows` leaves room for rows to grow."""
        with stage("plan"):
            plan = view.planned(choice.strategy)
        with stage("lower"):
            made = lowered(plan, view.problem, positions=view.positions)
        growth = _growth(problem, made, None) if grows else None
        return cls(problem, view, choice, plan, made.schedule, scoring, growth=growth)

    @classmethod
    def in_layout(
        cls, problem: Problem, view: View, layout: Layout, scoring: Scoring | None, *, grows: bool, **served: Any
    ) -> Prepared:
        """A problem in a layout that holds more. served: `programs` and `calls` that the layout has already. Raises
        InputError or PlanError for a problem that exceeds it.
        """
        with stage("plan and lower"):
            made = layout.lowered(view)
        growth = _growth(problem, made, layout) if grows else None
        return cls(problem, view, layout.choice, made.plan, made.schedule, scoring, layout, growth, **served)

    @classmethod
    def again(
        cls, problem: Problem, choice: Choice, layout: Layout | None, scoring: Scoring | None, *, grows: bool
    ) -> Prepared:
        """A problem for which the choice, and in a fixed capacity the layout, were made before."""
        view = View.of(problem, scoring)
        if layout is None:
            return cls.of(problem, view, choice, scoring, grows=grows)
        return cls.in_layout(problem, view, layout, scoring, grows=grows)

    def successor(self, problem: Problem, *, grows: bool) -> Prepared:
        """Another tree in this one's layout, programs and calls. Raises before anything on a device changes."""
        assert self.layout is not None
        view, programs, calls = View.of(problem, self.scoring), self.programs, self.calls
        made = self.in_layout(problem, view, self.layout, self.scoring, grows=grows, programs=programs, calls=calls)
        for program in programs.values():
            program.load(made.schedule)
        return made

    def take(self, rows: IntsLike | None, tokens: int, slots: npt.ArrayLike | None, captured: int | None) -> bool:
        """Lets rows grow in the tables that there are; False where that cannot be. See Growth.take."""
        if self.growth is None or not self.growth.take(rows, tokens, slots, self.programs.values(), captured):
            return False
        for program in self.programs.values():  # of the torch backend: they have no table that could be changed
            if isinstance(program, TorchProgram):
                program.load(self.schedule)
        return True

    @property
    def tree(self) -> Tree:
        """The caller's tree, as it was planned for."""
        return self.problem.tree

    @property
    def last_slot(self) -> int:
        """The highest slot of the tree with what rows have gained, -1 without tokens."""
        return self._planned_last_slot if self.growth is None else self.growth.last_slot

    @property
    def grown(self) -> Tree:
        """The tree with what rows have gained."""
        return self.problem.tree if self.growth is None else self.growth.tree

    def up_to_date(self) -> Prepared:
        """What is served, as a plan of the tree that it has grown to."""
        problem = self.problem.with_tree(self.grown)
        return Prepared.again(problem, self.choice, self.layout, self.scoring, grows=False)

    @property
    def schedule(self) -> Schedule:
        """What is launched, with room for growth and what rows have gained in it. Made when it is first asked for."""
        if self.growth is not None:
            return self._as_launched()
        if self._launched is None:
            object.__setattr__(self, "_launched", self._as_launched())
        assert self._launched is not None
        return self._launched

    def _as_launched(self) -> Schedule:
        """The passes between what is counted and what is launched, now."""
        schedule = self.counted if self.growth is None else self.growth.schedule
        if self.layout is not None:
            return schedule
        return launched(Lowering(self.plan, schedule), self.view.problem)

    @property
    def neighbours(self) -> int:
        """Tokens whose places kernels count from that of the first, at most: those of a full tile, if there are any."""
        schedule = self.counted if self.growth is None else self.growth.schedule
        if self.layout is None and not schedule.column("tiles").any():
            return 1
        return max((tile.tokens for tile in schedule.classes), default=1)

    def make_program(self, backend: str, device: torch.device, scales: Scales | None = None) -> Program:
        """A new program for the schedule, with the scales of keys and values."""
        shape = self.problem.shape
        if backend != "triton":
            return TorchProgram(self.schedule, shape, device, scales, self.scoring)
        if self.layout is None:
            return TritonProgram(self.schedule, shape, device, scales=scales, scoring=self.scoring)
        room, most_rows = self.layout.room, self.layout.limits.max_rows
        return TritonProgram(self.schedule, shape, device, room, most_rows, scales, self.scoring)

    def keep_call(self, form: tuple[object, ...], lse_base: str, call: KeptCall) -> None:
        """Keeps a call for tensors of its form; of too many the oldest goes."""
        self.calls[form, lse_base] = call
        if len(self.calls) > _MOST_FORMS:
            del self.calls[next(iter(self.calls))]


def prepare(
    problem: Problem,
    planner: Planner,
    scoring: Scoring | None = None,
    wanted: WantedLimits | None = None,
    *,
    grows: bool = False,
    shape_is_assumed: bool = False,
) -> Prepared:
    """A problem with the planner's choice for it; with `wanted` limits in the layout of all trees that follow.

    grows leaves room for rows to grow. Raises what strategies, lowering and graph_layout.layout_of raise.
    """
    view = View.of(problem, scoring)
    if wanted is None:
        choice = planner.choose(view.problem, shape_is_assumed=shape_is_assumed)
        return Prepared.of(problem, view, choice, scoring, grows=grows)
    choice = planner.choose_fixed(view.problem, shape_is_assumed=shape_is_assumed)
    with stage("layout"):
        layout = layout_of(wanted, choice, view)
        return Prepared.in_layout(problem, view, layout, scoring, grows=grows)


def _growth(problem: Problem, made: Lowering, layout: Layout | None) -> Growth | None:
    """Growth of a tree's rows, where there is room for it; none in fixed blocks, whose places follow from lengths."""
    with stage("room"):
        room = RESERVE.apply(made, problem).room
        if room is None or (layout is not None and not layout.holds(room.schedule)):
            return None
        return Growth(problem.tree, room)
