"""Prepared calls: a kernel's calls, checked, bound to its present plan and launched; and the change to another tree."""

from __future__ import annotations

from threading import RLock
from typing import Any

import torch

from treegen.backends import check_inputs
from treegen.backends.devices import backend_for, captures, default_device
from treegen.environment import checks_inputs
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree, check_is_by_slot, check_is_tree
from treegen.runtime import torch_op
from treegen.runtime.call_options import CallOptions
from treegen.runtime.captured_graphs import CapturedGraphs
from treegen.runtime.limits import WantedLimits
from treegen.runtime.planner import Planner
from treegen.runtime.prepared import KeptCall, PreparedPlan, prepare
from treegen.runtime.window import WindowedTree
from treegen.target.problem import Problem
from treegen.timed import phase


class PreparedCalls:
    """The calls of a kernel, and the tree, plan and programs that serve them.

    Bound calls read `prepared` without a lock: another tree is another PreparedPlan in its place. The lock is held
    while a call is bound, or the tree changes.

    prepared: what serves the next call. planner: chooses strategies. options: the options of all calls. wanted: the
    limits that the caller declared; None without a fixed capacity. shape_is_assumed: whether the shape was assumed, and
    no call has shown the real one. backend: the backend of the last call that was bound, before that the default one.
    handle: the number that stands for the kernel in compiled code (torch_op). lock: see above.
    """

    def __init__(
        self,
        prepared: PreparedPlan,
        planner: Planner,
        options: CallOptions,
        wanted: WantedLimits | None = None,
        *,
        shape_is_assumed: bool = False,
    ) -> None:
        self.prepared = prepared
        self.planner = planner
        self.options = options
        self.wanted = wanted
        self.shape_is_assumed = shape_is_assumed
        self.backend = backend_for(default_device(), options.backend)
        self.handle = torch_op.handle_of(self)
        self.lock = RLock()
        self._read = options.read
        self._graphs = CapturedGraphs()

    def state(self) -> dict[str, Any]:
        """Returns the arguments of `again`, for a copy that plans anew."""
        with self.lock:
            prepared, asked = self.prepared, (self.planner, self.options, self.wanted)
            made = {"problem": prepared.problem, "choice": prepared.choice, "layout": prepared.layout}
            return {**made, "asked": asked, "shape_is_assumed": self.shape_is_assumed}

    def given(self) -> dict[str, object]:
        """Returns what callers gave and pickle may refuse, by the names of arguments."""
        scoring = self.options.scoring
        functions = {} if scoring is None else scoring.options.functions
        return {"strategy": self.planner.strategy, "choice": self.prepared.choice, **functions}

    @classmethod
    def again(cls, state: dict[str, Any]) -> PreparedCalls:
        """Makes calls of a state: with the same choice and layout, and a plan and tables of their own."""
        planner, options, wanted = state["asked"]
        prepared = PreparedPlan.again(state["problem"], state["choice"], state["layout"], options.scoring)
        return cls(prepared, planner, options, wanted, shape_is_assumed=state["shape_is_assumed"])

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Serves a call outside of compiled code; returns out, and the lse or None. See Kernel.__call__."""
        prepared = self.prepared
        form = check_inputs.form_of(q, k_cache, v_cache, out, self._read)
        try:
            kept = prepared.calls.get((form, lse_base))
        except TypeError:  # lse_base has no hash; `_bind` raises the error
            kept = None
        if kept is None:
            prepared, kept = self._bind(form, q, k_cache, v_cache, out, lse_base)
        call, slots = kept
        if prepared.last_slot >= slots:
            check_inputs.check_slots(prepared.last_slot, k_cache, prepared.problem.shape.kv_layout)
        if prepared.layout is not None:
            check_inputs.check_rows(prepared.tree, q)
        if captures(q):
            self._graphs.note(prepared.programs.values(), slots)
        if checks_inputs():
            check_inputs.check_values(prepared.tree, q, k_cache, v_cache, prepared.problem.shape.kv_layout)
        if out is None:
            out = _empty_out(prepared, q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        with phase("launch"):
            call(q, k_cache, v_cache, out, lse)
        return out, lse

    def _bind(
        self,
        form: tuple[object, ...] | None,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None,
        lse_base: str,
    ) -> tuple[PreparedPlan, KeptCall]:
        """Checks tensors, and binds a call for all tensors of their form.

        The first call of a kernel that was compiled without a shape plans anew for the shape of its tensors.
        """
        check_inputs.lse_scale(lse_base)
        with self.lock:
            before = self.shape_is_assumed, self.prepared
            try:
                found, slots = self.checked(q, k_cache, v_cache, out)
                if self.shape_is_assumed:
                    self._adopt(found)
                prepared = self.prepared
                into = _empty_out(prepared, q) if out is None else out
                call = self.options.bound(prepared, q, k_cache, v_cache, into, lse_base)
            except BaseException:  # also when somebody stops it in the middle
                self.shape_is_assumed, self.prepared = before
                raise
            self.backend = backend_for(q.device, self.options.backend)
            if form is not None:
                prepared.calls.keep(form, lse_base, (call, slots))
        return prepared, (call, slots)

    def checked(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[Shape, int]:
        """Checks tensors; returns their shape and the KV slots of their caches. Raises InputError or ShapeError."""
        with self.lock:
            return self.options.checked(self.prepared, q, k_cache, v_cache, out, shape_is_assumed=self.shape_is_assumed)

    def _adopt(self, shape: Shape) -> None:
        """Replaces the assumed shape by the real one, and plans anew where that makes a difference."""
        self.shape_is_assumed = False
        problem = self.prepared.problem
        if shape != problem.shape or self.planner.autotune:
            again = Problem(problem.tree, shape, problem.target)
            self.prepared = prepare(again, self.planner, self.options.scoring, self.wanted)

    def replace_tree(self, tree: Tree) -> None:
        """Plans for another tree, which later calls serve. See Kernel.update."""
        # When one of 256 rows branches, the new tree takes a sixth of the time, its plan a quarter, and lowering the
        # rest. Each is some dozens of operations on whole arrays, which would take as long for the changed rows alone.
        check_is_tree("tree", tree)
        check_is_by_slot("tree", tree)
        with self.lock:
            prepared, scoring = self.prepared, self.options.scoring
            problem = prepared.problem.with_tree(tree)
            if prepared.layout is None:
                view = WindowedTree.of(problem, scoring)
                choice = self.planner.keep(prepared.choice, prepared.tree, tree)
                choice = choice or self.planner.choose(view.problem, shape_is_assumed=self.shape_is_assumed)
                self.prepared = PreparedPlan.of(problem, view, choice, scoring)
            else:
                check_inputs.check_captured(tree.kv.last_slot, self._graphs.least_slots(prepared.programs.values()))
                following = prepared.successor(problem)
                try:
                    following.load()
                    self.prepared = following
                except BaseException:  # also when somebody stops it in the middle
                    self.prepared.load()
                    raise


def _empty_out(prepared: PreparedPlan, q: torch.Tensor) -> torch.Tensor:
    return torch.empty(*q.shape[:2], prepared.problem.shape.head_dim_v, dtype=q.dtype, device=q.device)
