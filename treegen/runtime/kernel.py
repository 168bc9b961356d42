"""Kernel: an attention kernel for a tree, and for the trees that follow."""

from __future__ import annotations

from threading import RLock
from typing import Any, Literal, overload

import numpy.typing as npt
import torch

from treegen.backends import check_inputs, oracle
from treegen.backends.devices import backend_for, captures, default_device
from treegen.backends.scratch import workspace_bytes
from treegen.backends.triton_program import kernel_options
from treegen.codegen.emit import emit
from treegen.cost.estimate import Estimate, account
from treegen.environment import checks_inputs
from treegen.ir.arrays import IntsLike
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree, check_is_by_slot, check_is_tree
from treegen.report.explain import Explanation, explain
from treegen.report.explained_plan import ExplainedPlan
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
    """An attention kernel for one tree at a time. `treegen.compile` makes it.

    Threads: any number of threads may call one kernel, or several, at the same time. One thread at a time may change a
    kernel's tree (`update`, `append`, `step`, `branch`, `prune`). A call that runs meanwhile serves the old or the new
    tree. A kernel of fixed capacity must not be called meanwhile.

    Streams: calls run on the current stream of q's device. Calls on several streams may overlap, because each allocates
    its scratch memory on its stream. Before you change the tree, let the work of other streams finish, or make the
    current stream wait for it: the old tree's tables are freed or overwritten. Calls of a kernel of fixed capacity, and
    replays of graphs captured from them, share one workspace: never run two of them at the same time.

    torch.compile: a call is one operator, `treegen::attention`, without a graph break. The operator looks the kernel up
    at run time, so an `update` does not compile anew.

    Gradients: there is no backward pass. A call raises InputError when gradients are enabled and one of its tensors, or
    a tensor that the kernel was compiled with, requires them.

    CUDA graphs: call once before capturing, with q and out of `max_rows` rows, because the first call allocates memory
    and compiles kernels. Keep the kernel for as long as its graphs are replayed. A graph of a kernel without a capacity
    replays the plan of its capture, whose tables the kernel keeps. A replay reads the caches of its capture: trees with
    slots beyond the smallest of them are refused where the tables of replays would change.

    Copies: `copy`, `deepcopy` and `pickle` make a kernel with the same arguments, choice, capacity and tree, which
    plans anew and has its own tables. To be pickled, functions and strategies have to be defined at the top level of a
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
        """Computes attention of every row over the tokens that it sees.

        Under a fixed capacity q may have more rows than the tree, up to `max_rows`; out and lse keep what they held in
        the further rows.

        Args:
            q: `[rows, num_qo_heads, head_dim]`, in the tree's row order.
            k_cache: `[slots, num_kv_heads, head_dim]`, or `[pages, page_size, num_kv_heads, head_dim]`; pages also in
                the layout of the shape's kv_layout.
            v_cache: The same with head_dim_v.
            out: Where the result goes; by default a new tensor.
            return_lse: Whether to return the log-sum-exp as well.
            lse_base: "ln" for the natural logarithm, "log2" for base 2.

        Returns:
            out `[rows, num_qo_heads, head_dim_v]` of q's type; with return_lse also the log-sum-exp `[rows,
            num_qo_heads]` in float32. A row that sees nothing gives 0 and -inf.

        Raises:
            InputError: A tensor does not fit; before any launch.
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
        """Plans for another tree.

        Loaded kernels serve the new tree as well. A new kernel is loaded only if the tree needs another tile class:
        masked or not, few or many rows, short or long runs. `auto` keeps its choice for trees of the same bucket
        (`treegen cache why`) and chooses again for others.

        A kernel of fixed capacity keeps choice and tile classes for all trees. Its tables are overwritten on the
        current stream, after the calls and replays before, and without waiting for them.

        Args:
            tree: The tree that the next call serves.

        Raises:
            InputError: The tree exceeds the capacity (the message names the limit), or has slots beyond the smallest
                cache that a CUDA graph was captured with. The kernel then keeps its tree.
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
        """Makes rows see more tokens: the kernel's tree becomes `tree.appended(rows, tokens, slots)`.

        Plans anew, as `update`; threads, streams and errors are the same. In a kernel of fixed capacity graphs then see
        the new tokens. Requests that grow step after step are better served by `treegen.compile_batch`, which needs no
        host work while they grow.

        Args:
            rows: The rows that grow; by default all.
            tokens: New tokens of each row.
            slots: KV slots of the new tokens, `[rows, tokens]`, or flat for one token a row; by default the slots after
                the last one that each row sees.

        Raises:
            TreeError: As of Tree.appended.
        """
        with self._lock:
            self.update(self.tree.appended(rows, tokens, slots))

    def step(self, slots: npt.ArrayLike | None = None) -> None:
        """Makes every row see one more token, as `append` does.

        Args:
            slots: A KV slot for each row; by default the slot after the last one that it sees.
        """
        self.append(None, 1, slots)

    def branch(self, row: int, copies: int) -> None:
        """Makes a row `copies` rows, which share its tokens so far; the new ones follow all other rows.

        The kernel's tree becomes `tree.branched(row, copies)`. Plans anew, as `update`.

        Args:
            row: The row to copy.
            copies: Rows afterwards, the row itself included.

        Raises:
            TreeError: As of Tree.branched.
        """
        # For 256 rows the new tree takes a sixth of the time, its plan a quarter, and lowering the rest: each some
        # dozens of operations on whole arrays, which cost the same for the rows that changed alone.
        with self._lock:
            self.update(self.tree.branched(row, copies))

    def prune(self, rows: IntsLike) -> None:
        """Ends rows, and renumbers the rest in order: the kernel's tree becomes `tree.pruned(rows)`.

        Plans anew, as `update`.

        Args:
            rows: The rows to end.

        Raises:
            TreeError: As of Tree.pruned.
        """
        with self._lock:
            self.update(self.tree.pruned(rows))

    def workspace_size(self) -> int:
        """Counts the bytes of device memory that the kernel takes besides its inputs and outputs.

        These are tables, partial results, and the lse of calls that do not return it. A kernel of fixed capacity keeps
        them; any other keeps tables until the next update, and the rest during a call. Nothing is allocated for the
        answer, and no device is needed.

        Returns:
            The bytes for the given or assumed shape on the triton backend, without the scores of strategies that run
            unfused.
        """
        prepared, layout = self._prepared, self._prepared.layout
        shape = prepared.problem.shape
        if layout is None:
            return workspace_bytes(prepared.schedule, shape, prepared.tree.num_rows)
        return workspace_bytes(prepared.schedule, shape, layout.limits.max_rows, layout.room)

    def check_inputs(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Checks tensors as a call does, and that no value that the kernel reads is NaN.

        Waits for the device. With `TREEGEN_CHECK=1` in the environment every call does this.

        Args:
            q, k_cache, v_cache: As of a call.

        Raises:
            InputError: A tensor does not fit, or has a NaN.
        """
        with self._lock:
            self._checked(q, k_cache, v_cache)
        check_inputs.check_values(self.tree, q, k_cache, v_cache, self.shape.kv_layout)

    def verify(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> oracle.Verification:
        """Runs the kernel and compares out and lse with a float64 oracle.

        Args:
            q, k_cache, v_cache: As of a call.

        Returns:
            The largest errors and the tolerance; it is true if the result is right.

        Raises:
            InputError: A tensor does not fit.
        """
        out, lse = self(q, k_cache, v_cache, return_lse=True)
        q = q[: self.tree.num_rows]
        options = self._options
        expected_out, expected_lse = oracle.reference(
            self.tree,
            q,
            k_cache,
            v_cache,
            oracle.OracleOptions(
                options.sm_scale,
                self.shape.kv_layout,
                None if options.scales is None else options.scales.k,
                None if options.scales is None else options.scales.v,
                None if options.scoring is None else options.scoring.options,
            ),
        )
        errors = oracle.error(out[: len(q)], expected_out), oracle.error(lse[: len(q)], expected_lse)
        return oracle.Verification(*errors, oracle.TOLERANCE[self.shape.dtype])

    @property
    def tree(self) -> Tree:
        """The tree that the next call serves."""
        return self._prepared.tree

    @property
    def shape(self) -> Shape:
        """The attention shape. Without a given shape it is assumed until the first call."""
        return self._prepared.problem.shape

    @property
    def target(self) -> Target:
        """The device that the plan is made for."""
        return self._prepared.problem.target

    @property
    def plan(self) -> Plan:
        """The plan: which rows read which KV together."""
        return self._prepared.plan

    @property
    def schedule(self) -> Schedule:
        """The schedule: work items, tiles and merge lists as they are launched."""
        with self._lock:
            return self._prepared.schedule

    @property
    def capacity(self) -> Limits | None:
        """The limits of a kernel of fixed capacity; None for any other kernel."""
        layout = self._prepared.layout
        return None if layout is None else layout.limits

    @property
    def choice(self) -> Choice:
        """The strategy that made the plan, and the reason for it."""
        return self._prepared.choice

    @property
    def backend(self) -> str:
        """The backend that runs the schedule: "triton" or "torch"."""
        return self._backend

    @property
    def source(self) -> str:
        """The text of the emitted Triton modules, for a cache addressed by slot."""
        layout, given = self._prepared.layout, self._options
        capacity = None if layout is None else layout.room
        options = kernel_options(self.shape, self.target.capability, given.scales, given.scoring)
        emitted = emit(self.schedule, self.shape, capacity=capacity, options=options)
        return "\n\n".join(source.text for source in emitted)

    @property
    def estimate(self) -> Estimate:
        """The account of the plan: bytes, operations, launches and the estimated time."""
        prepared = self._prepared
        return account(prepared.plan, prepared.counted, prepared.view.problem, fixed=prepared.layout is not None)

    def explain(self, groups: int = 0, formulas: bool = False) -> str:
        """Describes the tree, the plan and its account.

        In batch-invariant mode the text also has the plan that `auto` would choose, and compares the estimated times.

        Args:
            groups: The most groups of the plan to list.
            formulas: Whether to print the formulas of the cost model.

        Returns:
            A text of several lines.
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
