"""What a kernel serves: a tree with its plan, the programs that run it, and calls that are bound to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from treegen.bound import Call
from treegen.capacity import Layout, WantedLimits, layout_of, planned
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.lower import lower
from treegen.strategies import Choice
from treegen.targets import Target
from treegen.torch_backend import TorchProgram
from treegen.trace import stage
from treegen.triton_backend import TritonProgram

Program: TypeAlias = "TritonProgram | TorchProgram"

_MOST_FORMS = 64
"""Forms of tensors for which calls are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A tree, the choice of a strategy, its plan and schedule, and what serves them. Calls read it without a lock:
    another tree is another Served, in the kernel's place for this one.

    layout: of a kernel of fixed capacity, whose programs and calls go from tree to tree; else they are of this tree
    alone. programs: by backend and device; calls: by the form of tensors and the base of the lse.
    """

    tree: Tree
    choice: Choice
    plan: Plan
    schedule: Schedule
    layout: Layout | None = None
    programs: dict[tuple[str, torch.device], Program] = field(default_factory=dict)
    calls: dict[tuple[object, str], Call] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: Tree, choice: Choice, shape: Shape, target: Target) -> Served:
        """A tree with the plan that the choice makes of it."""
        with stage("plan"):
            plan = planned(choice.strategy, tree, shape, target)
        with stage("lower"):
            schedule = lower(plan, tree, shape, target)
        return cls(tree, choice, plan, schedule)

    @classmethod
    def in_layout(cls, tree: Tree, layout: Layout, shape: Shape, target: Target) -> Served:
        """A tree in a layout that holds more. Raises InputError or PlanError for one that exceeds it."""
        with stage("plan and lower"):
            plan, schedule = layout.lowered(tree, shape, target)
        return cls(tree, layout.choice, plan, schedule, layout)

    @classmethod
    def first(cls, tree: Tree, wanted: WantedLimits, choice: Choice, shape: Shape, target: Target) -> Served:
        """The first tree of a fixed capacity. Raises as capacity.layout_of does."""
        with stage("layout"):
            return cls.in_layout(tree, layout_of(wanted, choice, tree, shape, target), shape, target)

    def successor(self, tree: Tree, shape: Shape, target: Target) -> Served:
        """Another tree in this one's layout, programs and calls. Raises before anything on a device changes."""
        assert self.layout is not None
        made = self.in_layout(tree, self.layout, shape, target)
        for program in self.programs.values():
            program.load(made.schedule)
        return Served(tree, made.choice, made.plan, made.schedule, self.layout, self.programs, self.calls)

    def make_program(self, backend: str, shape: Shape, device: torch.device) -> Program:
        """A new program for the schedule."""
        if backend != "triton":
            return TorchProgram(self.schedule, shape, device)
        if self.layout is None:
            return TritonProgram(self.schedule, shape, device)
        return TritonProgram(self.schedule, shape, device, self.layout.room, self.layout.limits.max_rows)

    def keep_call(self, form: tuple[object, ...], lse_base: str, call: Call) -> None:
        """Keeps a call for tensors of its form; of too many the oldest goes."""
        self.calls[form, lse_base] = call
        if len(self.calls) > _MOST_FORMS:
            del self.calls[next(iter(self.calls))]
