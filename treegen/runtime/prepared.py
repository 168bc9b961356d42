"""Prepared trees: a tree with its plan and schedule, the programs that run it, and calls that are bound to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from treegen.backends.bound_call import Call
from treegen.backends.kv_scales import Scales
from treegen.backends.scratch import workspace_bytes
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import ProgramRoom, TritonProgram
from treegen.cost.account import Account, account
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.tree import Tree
from treegen.runtime.graph_layout import GraphLayout, layout_of
from treegen.runtime.kept_calls import KeptCalls
from treegen.runtime.limits import GraphLimits, WantedLimits
from treegen.runtime.planner import Planner
from treegen.runtime.window import WindowedTree
from treegen.schedule.pipeline import Lowering, device_schedule, lowered
from treegen.scoring.options import Scoring
from treegen.strategies import Choice
from treegen.target.problem import Problem
from treegen.timed import phase

Program: TypeAlias = "TritonProgram | TorchProgram"
KeptCall: TypeAlias = "tuple[Call, int]"
"""A bound call, and the KV slots of the caches that it serves."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPlan:
    """A tree with everything that serves it. It never changes, so calls read it without a lock.

    problem: the caller's whole tree, the attention shape and the target. view: the tree that the plan is made for.
    choice: the strategy, and the reason for it. plan: its plan. counted: the schedule that accounts count. scoring: the
    score options. layout: that of a kernel of fixed capacity, whose programs and calls serve one tree after another;
    None for programs and calls of this tree alone. programs: by backend and device. calls: by the form of tensors and
    the base of the lse. last_slot: the tree's highest KV slot, -1 without tokens.
    """

    problem: Problem
    view: WindowedTree
    choice: Choice
    plan: Plan
    counted: Schedule
    scoring: Scoring | None = None
    layout: GraphLayout | None = None
    programs: dict[tuple[str, torch.device], Program] = field(default_factory=dict)
    calls: KeptCalls[KeptCall] = field(default_factory=KeptCalls)
    last_slot: int = field(init=False)
    _launched: Schedule | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "last_slot", self.problem.tree.kv.last_slot)

    @classmethod
    def of(cls, problem: Problem, view: WindowedTree, choice: Choice, scoring: Scoring | None) -> PreparedPlan:
        """Plans for a problem with the chosen strategy."""
        with phase("plan"):
            plan = view.planned(choice.strategy)
        with phase("lower"):
            made = lowered(plan, view.problem, positions=view.positions)
        return cls(problem, view, choice, plan, made.schedule, scoring)

    @classmethod
    def in_layout(
        cls, problem: Problem, view: WindowedTree, layout: GraphLayout, scoring: Scoring | None, **served: Any
    ) -> PreparedPlan:
        """Plans for a problem in a layout. served: the layout's present `programs` and `calls`.

        Raises InputError or PlanError for a problem that exceeds the layout.
        """
        with phase("plan and lower"):
            made = layout.lowered(view)
        return cls(problem, view, layout.choice, made.plan, made.schedule, scoring, layout, **served)

    @classmethod
    def again(
        cls, problem: Problem, choice: Choice, layout: GraphLayout | None, scoring: Scoring | None
    ) -> PreparedPlan:
        """Plans for a problem whose choice, and in a fixed capacity whose layout, was made before."""
        view = WindowedTree.of(problem, scoring)
        if layout is None:
            return cls.of(problem, view, choice, scoring)
        return cls.in_layout(problem, view, layout, scoring)

    def successor(self, problem: Problem) -> PreparedPlan:
        """Plans for another tree in the same layout, for the same programs and calls; `load` makes these serve it."""
        assert self.layout is not None
        view, programs, calls = WindowedTree.of(problem, self.scoring), self.programs, self.calls
        return self.in_layout(problem, view, self.layout, self.scoring, programs=programs, calls=calls)

    def load(self) -> None:
        """Has the programs execute this plan."""
        for program in self.programs.values():
            program.load(self.schedule)

    @property
    def tree(self) -> Tree:
        """The caller's whole tree."""
        return self.problem.tree

    @property
    def schedule(self) -> Schedule:
        """The schedule that is launched, made at the first use."""
        if self.layout is not None:
            return self.counted
        if self._launched is None:
            made = device_schedule(Lowering(self.plan, self.counted), self.view.problem)
            object.__setattr__(self, "_launched", made)
            return made
        return self._launched

    @property
    def neighbours(self) -> int:
        """The most tokens whose offsets kernels compute from that of the first: those of a full tile, if any."""
        if self.layout is None and not self.counted.column("tiles").any():
            return 1
        return max((config.tokens for config in self.counted.configs), default=1)

    @property
    def limits(self) -> GraphLimits | None:
        """The limits of a fixed capacity; None without one."""
        return None if self.layout is None else self.layout.limits

    @property
    def estimate(self) -> Account:
        """The account of the plan."""
        return account(self.plan, self.counted, self.view.problem, fixed=self.layout is not None)

    def workspace_size(self) -> int:
        """Counts the bytes of tables and scratch memory. See Kernel.workspace_size."""
        shape = self.problem.shape
        if self.layout is None:
            return workspace_bytes(self.schedule, shape, self.tree.num_rows)
        return workspace_bytes(self.schedule, shape, self.layout.limits.max_rows, self.layout.room)

    def make_program(self, backend: str, device: torch.device, scales: Scales | None = None) -> Program:
        """Makes a program for the schedule."""
        shape = self.problem.shape
        if backend != "triton":
            return TorchProgram(self.schedule, shape, device, scales, self.scoring)
        if self.layout is None:
            return TritonProgram(self.schedule, shape, device, scales=scales, scoring=self.scoring)
        room = ProgramRoom(self.layout.room, self.layout.limits.max_rows)
        return TritonProgram(self.schedule, shape, device, room, scales, self.scoring)


def prepare(
    problem: Problem,
    planner: Planner,
    scoring: Scoring | None = None,
    wanted: WantedLimits | None = None,
    *,
    shape_is_assumed: bool = False,
) -> PreparedPlan:
    """Plans for a problem with the planner's choice.

    With `wanted` limits the plan is made in a layout, which serves all later trees. Errors are those of strategies,
    lowering and graph_layout.layout_of.
    """
    view = WindowedTree.of(problem, scoring)
    if wanted is None:
        choice = planner.choose(view.problem, shape_is_assumed=shape_is_assumed)
        return PreparedPlan.of(problem, view, choice, scoring)
    choice = planner.choose_fixed(view.problem, shape_is_assumed=shape_is_assumed)
    with phase("layout"):
        layout = layout_of(wanted, choice, view)
        return PreparedPlan.in_layout(problem, view, layout, scoring)
