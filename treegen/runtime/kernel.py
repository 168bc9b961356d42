"""Kernel: an attention kernel for a tree, and for the trees that come after it."""

from __future__ import annotations

from threading import RLock
from typing import Any, Literal, overload

import numpy.typing as npt
import torch

from treegen.backends import check_inputs, oracle
from treegen.backends.devices import backend_for, captures, default_device
from treegen.backends.triton_program import kernel_options, workspace_bytes
from treegen.codegen.emit import emit
from treegen.cost.estimate import Estimate, account
from treegen.environment import checks_inputs
from treegen.ir.arrays import IntsLike
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree, check_is_by_slot, check_is_tree
from treegen.report.explain import ExplainedPlan, Explanation, explain
from treegen.runtime import torch_op
from treegen.runtime.call_options import CallOptions
from treegen.runtime.copies import Copyable
from treegen.runtime.limits import Limits, WantedLimits
from treegen.runtime.prepared import KeptCall, Prepared, Program, prepare
from treegen.runtime.window import View
from treegen.strategies import Choice
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.timed import stage
from treegen.tuning.planner import Planner

_NOT_COPIED = ("_backend", "_read", "_lock", "_handle", "_captured", "_prepared")


class Kernel(Copyable):
    """An attention kernel for one tree at a time. Made by `treegen.compile`.

    Threads: any number may call one kernel, or several, at the same time. One thread at a time may `update` a kernel,
    or change its tree (`append`, `step`, `branch`, `prune`); a call that runs meanwhile serves either tree, except in a
    kernel of fixed capacity, which is not to be called then.

    Streams: calls run on the current stream of q's device. Calls on several streams may overlap, for each allocates its
    scratch memory on its stream. Before `update` and its like, let the work that other streams have in flight
    finish, or make the current stream wait for it: the old tree's tables are given back, or overwritten. Calls of a
    kernel of fixed capacity, and replays of graphs captured from them, share one workspace: never run two of them at
    the same time.

    torch.compile: a call is one operator, `treegen::attention`, without a graph break; the kernel is looked up at run
    time, so an `update` does not compile anew.

    Gradients: there is no backward pass. A call raises InputError when gradients are enabled and one of its tensors, or
    a tensor that the kernel was compiled with, requires them.

    CUDA graphs: call once before capturing (memory is allocated and kernels are compiled then), with q and out of
    `max_rows` rows, and keep the kernel for as long as its graphs are replayed. Graphs of a kernel without a capacity
    replay the plan that they were captured with, whose tables the kernel keeps. A replay reads the caches of the
    capture: trees with slots beyond the smallest of these are refused where the tables that replays read would change.

    Copies: `copy`, `deepcopy` and `pickle` make a kernel with the same arguments, choice, capacity and tree, which
    plans anew and has tables of its own. A pickle needs functions and strategies that are defined at the top level of a
    module.
    """

    def __init__(
        self,
        prepared: Prepared,
        planner: Planner,
        options: CallOptions,
        wanted: WantedLimits | None = None,
        *,
        shape_is_assumed: bool = False,
    ) -> None:
        self._prepared = prepared
        self._planner = planner
        self._options = options
        self._wanted = wanted
        self._shape_is_assumed = shape_is_assumed
        self._begin()

    def _begin(self) -> None:
        """Sets what every kernel has for itself."""
        self._backend = backend_for(default_device(), self._options.backend)
        self._read = self._options.read
        self._lock = RLock()  # held where calls are prepared and trees replaced; calls that are bound need none
        self._handle = torch_op.handle_of(self)
        # Programs whose tables graphs read, whatever is served now, and the slots of the smallest cache they read.
        self._captured: dict[Program, int] = {}

    def _state(self) -> dict[str, Any]:
        with self._lock:
            own = {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}
            prepared = self._prepared
            return {**own, "problem": prepared.problem, "choice": prepared.choice, "layout": prepared.layout}

    def _restore(self, state: dict[str, Any]) -> None:
        problem, choice, layout = (state.pop(name) for name in ("problem", "choice", "layout"))
        vars(self).update(state)
        self._begin()
        self._prepared = Prepared.again(problem, choice, layout, self._options.scoring)

    def _given(self) -> dict[str, object]:
        scoring = self._options.scoring
        functions = {} if scoring is None else scoring.options.functions
        return {"strategy": self._planner.strategy, "choice": self.choice, **functions}

    def __repr__(self) -> str:
        limits = "" if self.capacity is None else f", at most {self.capacity.max_rows} rows"
        assumed = " (assumed)" if self._shape_is_assumed else ""
        made_for = f"{self.shape}{assumed}, {self.target.name}, {self._backend}{limits}"
        return f"<treegen.Kernel {self.choice.strategy}: {self.tree.size_text}; {made_for}>"

    @overload
    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: Literal[False] = False,
        lse_base: str = "ln",
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: Literal[True],
        lse_base: str = "ln",
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "ln",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of every row over the tokens that it sees.

        q [rows, num_qo_heads, head_dim] in the tree's row order; caches `[slots, num_kv_heads, head_dim]` or `[pages,
        page_size, num_kv_heads, head_dim]` (pages also as the shape's kv_layout says), that of V with head_dim_v.
        Returns out [rows, num_qo_heads, head_dim_v] of q's type (into `out` if given), and with `return_lse` also the
        float32 log-sum-exp [rows, num_qo_heads], natural or base 2 (`lse_base` "ln" or "log2"). A row that sees nothing
        gives 0 and -inf. Under a fixed capacity q may have more rows than the tree, `max_rows` at most; what they hold
        in out and lse is left as it is. Raises InputError before any launch.
        """
        if torch.compiler.is_compiling():
            gradients = check_inputs.needing_gradients(self._options.named(q, k_cache, v_cache, out))
            result, sums = torch_op.call(self._handle, q, k_cache, v_cache, out, return_lse, lse_base, gradients)
        else:
            result, sums = self.attend(q, k_cache, v_cache, out, return_lse, lse_base)
        return result if sums is None else (result, sums)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A call outside of compiled code: out, and the lse or None."""
        prepared = self._prepared
        form = check_inputs.form_of(q, k_cache, v_cache, out, self._read)
        try:
            kept = prepared.calls.get((form, lse_base))
        except TypeError:  # no hash: `_keep_call` says what is wrong with lse_base
            kept = None
        if kept is None:
            prepared, kept = self._keep_call(form, q, k_cache, v_cache, out, lse_base)
        call, slots = kept
        if prepared.last_slot >= slots:
            check_inputs.check_slots(prepared.last_slot, k_cache, prepared.problem.shape.kv_layout)
        if prepared.layout is not None:
            check_inputs.check_rows(prepared.tree, q)
        if captures(q):
            for program in tuple(prepared.programs.values()):
                self._captured[program] = min(slots, self._captured.get(program, slots))
        if checks_inputs():
            check_inputs.check_values(prepared.tree, q, k_cache, v_cache, prepared.problem.shape.kv_layout)
        if out is None:
            out = _empty_out(prepared, q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        with stage("launch"):
            call(q, k_cache, v_cache, out, lse)
        return out, lse

    def _keep_call(
        self,
        form: tuple[object, ...] | None,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None,
        lse_base: str,
    ) -> tuple[Prepared, KeptCall]:
        """Checks tensors, and settles what calls with all tensors of their form have in common. The first call of a
        kernel that was compiled without a shape prepares anew for the shape of its tensors.
        """
        check_inputs.lse_scale(lse_base)
        with self._lock:
            before = self._shape_is_assumed, self._prepared
            try:
                found, slots = self._checked(q, k_cache, v_cache, out)
                if self._shape_is_assumed:
                    self._adopt(found)
                prepared = self._prepared
                into = _empty_out(prepared, q) if out is None else out
                call = self._options.bound(prepared, q, k_cache, v_cache, into, lse_base)
            except Exception:
                self._shape_is_assumed, self._prepared = before
                raise
            self._backend = backend_for(q.device, self._options.backend)
            if form is not None:
                prepared.keep_call(form, lse_base, (call, slots))
        return prepared, (call, slots)

    def _checked(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[Shape, int]:
        """The shape of tensors that fit the kernel, and the slots of their caches. Raises InputError or ShapeError."""
        return self._options.checked(self._prepared, q, k_cache, v_cache, out, shape_is_assumed=self._shape_is_assumed)

    def _adopt(self, shape: Shape) -> None:
        """Takes a shape that was found in place of the assumed one, and plans anew where that changes something."""
        self._shape_is_assumed = False
        if shape != self.shape or self._planner.autotune:
            problem = Problem(self.tree, shape, self.target)
            self._prepared = prepare(problem, self._planner, self._options.scoring, self._wanted)

    def update(self, tree: Tree) -> None:
        """Plans for another tree. Kernels are specialised for nothing of a tree: those that are loaded serve it as
        well.

        Only a tree that calls for another tile class (masked or not, few or many rows, short or long runs) loads one
        more. `auto` keeps its choice for trees of the same bucket (`treegen cache why`) and searches for others.

        A kernel of fixed capacity keeps choice and tile classes for all trees. Its tables are overwritten, behind the
        calls and replays before on the current stream and without waiting for them. Raises InputError, which names the
        limit to raise, for a tree that exceeds the capacity, and for one with slots beyond the smallest cache that a
        CUDA graph was captured with: the kernel then goes on serving the tree that it has.
        """
        check_is_tree("tree", tree)
        check_is_by_slot("tree", tree)
        with self._lock:
            prepared, scoring = self._prepared, self._options.scoring
            problem = prepared.problem.with_tree(tree)
            if prepared.layout is None:
                view = View.of(problem, scoring)
                choice = self._planner.keep(prepared.choice, prepared.tree, tree)
                choice = choice or self._planner.choose(view.problem, shape_is_assumed=self._shape_is_assumed)
                self._prepared = Prepared.of(problem, view, choice, scoring)
            else:
                check_inputs.check_captured(tree.kv.last_slot, self._captured_slots())
                self._prepared = prepared.successor(problem)

    def _captured_slots(self) -> int | None:
        """Slots of the smallest cache that graphs read by the tables of what is served; None without graphs."""
        programs = self._prepared.programs.values()
        return min((self._captured[program] for program in programs if program in self._captured), default=None)

    def append(self, rows: IntsLike | None = None, tokens: int = 1, slots: npt.ArrayLike | None = None) -> None:
        """The kernel's tree becomes `tree.appended(rows, tokens, slots)`, which see: rows grow by tokens.

        Plans anew, as `update`; in a kernel of fixed capacity graphs then see the new tokens. Requests that run step
        after step are better served by `treegen.compile_batch`, which needs no host work while they grow.

        Threads, streams and errors as for `update`, and TreeError as of Tree.appended.
        """
        with self._lock:
            self.update(self.tree.appended(rows, tokens, slots))

    def step(self, slots: npt.ArrayLike | None = None) -> None:
        """`append` of one token to every row."""
        self.append(None, 1, slots)

    def branch(self, row: int, copies: int) -> None:
        """The kernel's tree becomes `tree.branched(row, copies)`: the row and `copies - 1` new ones behind all rows,
        which share what it sees so far.

        Plans anew, as `update`. For 256 rows the new tree takes a sixth of that, its plan a quarter, and the rest is
        lowering: each some dozens of operations on whole arrays, which cost the same for the rows that changed alone.
        """
        with self._lock:
            self.update(self.tree.branched(row, copies))

    def prune(self, rows: IntsLike) -> None:
        """The kernel's tree becomes `tree.pruned(rows)`: the other rows keep their order and close up. Plans anew, as
        `branch`.
        """
        with self._lock:
            self.update(self.tree.pruned(rows))

    def workspace_size(self) -> int:
        """Bytes of device memory that the kernel takes beside its inputs and outputs: tables, partial results, and the
        lse of calls that do not return it. Nothing is allocated for the answer, and no device is needed.

        For good, in a kernel of fixed capacity; else tables until the next update, and the rest during a call. It is
        that of the shape that is given or assumed, on the triton backend, without the scores of strategies that run
        unfused.
        """
        prepared, layout = self._prepared, self._prepared.layout
        shape = prepared.problem.shape
        if layout is None:
            return workspace_bytes(prepared.schedule, shape, prepared.tree.num_rows)
        return workspace_bytes(prepared.schedule, shape, layout.limits.max_rows, layout.room)

    def check_inputs(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Raises InputError when tensors do not fit, as a call does, or a value that is read is NaN.

        Synchronises with the device; `TREEGEN_CHECK=1` does this on every call.
        """
        with self._lock:
            self._checked(q, k_cache, v_cache)
        check_inputs.check_values(self.tree, q, k_cache, v_cache, self.shape.kv_layout)

    def verify(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> oracle.Verification:
        """Runs the kernel on the caller's data and measures it against the float64 oracle."""
        out, lse = self(q, k_cache, v_cache, return_lse=True)
        q = q[: self.tree.num_rows]
        options = self._options
        expected_out, expected_lse = oracle.reference(
            self.tree,
            q,
            k_cache,
            v_cache,
            sm_scale=options.sm_scale,
            options=None if options.scoring is None else options.scoring.options,
            kv_layout=self.shape.kv_layout,
            k_scale=None if options.scales is None else options.scales.k,
            v_scale=None if options.scales is None else options.scales.v,
        )
        errors = oracle.error(out[: len(q)], expected_out), oracle.error(lse[: len(q)], expected_lse)
        return oracle.Verification(*errors, oracle.TOLERANCE[self.shape.dtype])

    @property
    def tree(self) -> Tree:
        """The tree that the next call serves."""
        return self._prepared.tree

    @property
    def shape(self) -> Shape:
        """The attention shape; assumed until the first call when none was given."""
        return self._prepared.problem.shape

    @property
    def target(self) -> Target:
        """What the plan is made for."""
        return self._prepared.problem.target

    @property
    def plan(self) -> Plan:
        """Who reads which KV together."""
        return self._prepared.plan

    @property
    def schedule(self) -> Schedule:
        """Work items, tiles and merge lists as they are launched."""
        with self._lock:
            return self._prepared.schedule

    @property
    def capacity(self) -> Limits | None:
        """What trees may need at most, of a kernel of fixed capacity; None of any other."""
        layout = self._prepared.layout
        return None if layout is None else layout.limits

    @property
    def choice(self) -> Choice:
        """The strategy that made the plan, and why it was taken."""
        return self._prepared.choice

    @property
    def backend(self) -> str:
        """What runs the schedule: "triton" or "torch"."""
        return self._backend

    @property
    def source(self) -> str:
        """The emitted Triton modules, for a cache addressed by slot."""
        layout, given = self._prepared.layout, self._options
        capacity = None if layout is None else layout.room
        options = kernel_options(self.shape, self.target.capability, given.scales, given.scoring)
        emitted = emit(self.schedule, self.shape, capacity=capacity, options=options)
        return "\n\n".join(source.text for source in emitted)

    @property
    def estimate(self) -> Estimate:
        """What the plan reads, writes and computes."""
        prepared = self._prepared
        return account(prepared.plan, prepared.counted, prepared.view.problem, fixed=prepared.layout is not None)

    def explain(self, groups: int = 0, formulas: bool = False) -> str:
        """The tree, the plan and its account as text; in batch-invariant mode also those of what `auto` would choose,
        and how their estimated times compare.

        groups: how many groups of the plan are listed at most; formulas: whether those of the cost model are.
        """
        prepared, scoring = self._prepared, self._options.scoring
        problem, choice, fixed = prepared.view.problem, prepared.choice, prepared.layout is not None
        entry = ExplainedPlan.from_plan(
            choice.strategy, choice.reason, prepared.plan, prepared.counted, problem, fixed=fixed
        )
        tree, shape, target = problem
        beside = explain(tree, ("auto",), shape, target).entries if prepared.plan.fixed_block else ()
        best = Choice(beside[0].strategy, beside[0].reason) if beside else choice
        made = Explanation(tree, shape, self._shape_is_assumed, target, (entry, *beside), best)
        text = made.text(groups, formulas)
        if scoring is None:
            return text
        return f"{scoring.options.text(prepared.tree.unique_tokens, tree.unique_tokens)}\n{text}"


def _empty_out(prepared: Prepared, q: torch.Tensor) -> torch.Tensor:
    return torch.empty(*q.shape[:2], prepared.problem.shape.head_dim_v, dtype=q.dtype, device=q.device)
