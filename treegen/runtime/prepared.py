"""What a kernel serves: a tree with its plan and schedule, the programs that run it, and calls bound to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from treegen.backends.bound_call import Call
from treegen.backends.kv_scales import Scales
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import ProgramRoom, TritonProgram
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.tree import Tree
from treegen.runtime.graph_layout import Layout, layout_of
from treegen.runtime.limits import WantedLimits
from treegen.runtime.window import View
from treegen.schedule.pipeline import Lowering, launched, lowered
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
    tree; else they are of this tree alone. programs: by backend and device; calls: by the form of tensors and the base
    of the lse. last_slot: the highest slot of the tree, -1 without tokens.
    """

    problem: Problem
    view: View
    choice: Choice
    plan: Plan
    counted: Schedule
    scoring: Scoring | None = None
    layout: Layout | None = None
    programs: dict[tuple[str, torch.device], Program] = field(default_factory=dict)
    calls: dict[tuple[object, str], KeptCall] = field(default_factory=dict)
    last_slot: int = field(init=False)
    _launched: Schedule | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "last_slot", self.problem.tree.kv.last_slot)

    @classmethod
    def of(cls, problem: Problem, view: View, choice: Choice, scoring: Scoring | None) -> Prepared:
        """A problem with the plan that the choice makes of it."""
        with stage("plan"):
            plan = view.planned(choice.strategy)
        with stage("lower"):
            made = lowered(plan, view.problem, positions=view.positions)
        return cls(problem, view, choice, plan, made.schedule, scoring)

    @classmethod
    def in_layout(
        cls, problem: Problem, view: View, layout: Layout, scoring: Scoring | None, **served: Any
    ) -> Prepared:
        """A problem in a layout that holds more. served: `programs` and `calls` that the layout has already. Raises
        InputError or PlanError for a problem that exceeds it.
        """
        with stage("plan and lower"):
            made = layout.lowered(view)
        return cls(problem, view, layout.choice, made.plan, made.schedule, scoring, layout, **served)

    @classmethod
    def again(cls, problem: Problem, choice: Choice, layout: Layout | None, scoring: Scoring | None) -> Prepared:
        """A problem for which the choice, and in a fixed capacity the layout, were made before."""
        view = View.of(problem, scoring)
        if layout is None:
            return cls.of(problem, view, choice, scoring)
        return cls.in_layout(problem, view, layout, scoring)

    def successor(self, problem: Problem) -> Prepared:
        """Another tree in this one's layout, programs and calls. Raises before anything on a device changes."""
        assert self.layout is not None
        view, programs, calls = View.of(problem, self.scoring), self.programs, self.calls
        made = self.in_layout(problem, view, self.layout, self.scoring, programs=programs, calls=calls)
        for program in programs.values():
            program.load(made.schedule)
        return made

    @property
    def tree(self) -> Tree:
        """The caller's tree."""
        return self.problem.tree

    @property
    def schedule(self) -> Schedule:
        """What is launched. Made when it is first asked for."""
        if self.layout is not None:
            return self.counted
        if self._launched is None:
            made = launched(Lowering(self.plan, self.counted), self.view.problem)
            object.__setattr__(self, "_launched", made)
            return made
        return self._launched

    @property
    def neighbours(self) -> int:
        """Tokens whose places kernels count from that of the first, at most: those of a full tile, if there are any."""
        if self.layout is None and not self.counted.column("tiles").any():
            return 1
        return max((tile.tokens for tile in self.counted.classes), default=1)

    def make_program(self, backend: str, device: torch.device, scales: Scales | None = None) -> Program:
        """A new program for the schedule, with the scales of keys and values."""
        shape = self.problem.shape
        if backend != "triton":
            return TorchProgram(self.schedule, shape, device, scales, self.scoring)
        if self.layout is None:
            return TritonProgram(self.schedule, shape, device, scales=scales, scoring=self.scoring)
        room = ProgramRoom(self.layout.room, self.layout.limits.max_rows)
        return TritonProgram(self.schedule, shape, device, room, scales, self.scoring)

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
    shape_is_assumed: bool = False,
) -> Prepared:
    """A problem with the planner's choice for it; with `wanted` limits in the layout of all trees that follow.

    Raises what strategies, lowering and graph_layout.layout_of raise.
    """
    view = View.of(problem, scoring)
    if wanted is None:
        choice = planner.choose(view.problem, shape_is_assumed=shape_is_assumed)
        return Prepared.of(problem, view, choice, scoring)
    choice = planner.choose_fixed(view.problem, shape_is_assumed=shape_is_assumed)
    with stage("layout"):
        layout = layout_of(wanted, choice, view)
        return Prepared.in_layout(problem, view, layout, scoring)
