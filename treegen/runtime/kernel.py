"""Kernel: an attention kernel for a tree, and for the trees that come after it."""

from __future__ import annotations

from dataclasses import replace
from threading import RLock
from typing import Any, Literal, overload

import numpy.typing as npt
import torch

from treegen.backends import check_inputs, oracle
from treegen.backends.bound_call import Call, unbound
from treegen.backends.devices import backend_for, captures, default_device
from treegen.backends.kv_scales import Scales
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import workspace_bytes
from treegen.codegen.emit import emit, reads_bits
from treegen.codegen.kernel_signature import in_same_place
from treegen.cost.estimate import Estimate, account
from treegen.environment import checks_inputs
from treegen.ir.arrays import IntsLike
from treegen.ir.errors import InputError
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.ir.tree import Tree, check_is_tree
from treegen.report.explain import Entry, Explanation, explain
from treegen.runtime import torch_op
from treegen.runtime.copies import Copyable
from treegen.runtime.limits import Limits, WantedLimits
from treegen.runtime.prepared import KeptCall, Program, Served
from treegen.runtime.window import View
from treegen.scoring.options import Scoring
from treegen.search.auto import searched
from treegen.search.bucket import policy_bucket
from treegen.search.policies import serves_any_tree, suits_fixed_launches
from treegen.strategies import Choice, Strategy
from treegen.target.targets import Target
from treegen.timed import stage
from treegen.tuning.tune import tuned

_KEPT = "kept from an earlier tree of the same bucket: "
_NOT_COPIED = ("_backend", "_bucket", "_read", "_lock", "_handle", "_shown", "_captured", "_served")


class Kernel(Copyable):
    """An attention kernel for one tree at a time. Made by `treegen.compile`.

    Threads: any number may call one kernel, or several, at the same time. One thread at a time may `update` a kernel,
    or change its tree (`append`, `step`, `branch`, `prune`); a call that runs meanwhile serves either tree, except in a
    kernel of fixed capacity, or whose rows grow, which is not to be called then.

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
        tree: Tree,
        strategy: Strategy,
        shape: Shape | None,
        target: Target,
        backend: str | None,
        sm_scale: float | None,
        autotune: bool = False,
        wanted: WantedLimits | None = None,
        scales: Scales | None = None,
        scoring: Scoring | None = None,
    ) -> None:
        self._autotune = autotune
        self._scales = scales
        self._scoring = scoring
        self._strategy = strategy
        self._target = target
        self._wanted_backend = backend
        self._sm_scale = sm_scale
        self._shape = shape or DEFAULT_SHAPE
        self._shape_is_assumed = shape is None
        self._wanted = wanted
        self._grows = False
        self._begin(tree)
        self._served = self._planned(tree)

    def _begin(self, tree: Tree) -> None:
        """Sets what every kernel has for itself."""
        self._backend = backend_for(default_device(), self._wanted_backend)
        self._bucket = tree, policy_bucket(tree)  # a tree's: that of the last update, unless it failed
        self._read = tuple(item for part in (self._scales, self._scoring) if part for item in part.tensors.items())
        self._lock = RLock()  # held where calls are prepared and trees replaced; calls that are bound need none
        self._handle = torch_op.handle_of(self)
        self._shown: Served | None = None  # the plan of a tree that has grown since it was planned for
        # Programs whose tables graphs read, whatever is served now, and the slots of the smallest cache they read.
        self._captured: dict[Program, int] = {}

    def _state(self) -> dict[str, Any]:
        with self._lock:
            own = {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}
            return {**own, "tree": self.tree, "choice": self.choice, "layout": self._served.layout}

    def _restore(self, state: dict[str, Any]) -> None:
        tree, choice, layout = (state.pop(name) for name in ("tree", "choice", "layout"))
        vars(self).update(state)
        self._begin(tree)
        of_kernel = self._shape, self._target, self._scoring
        if layout is None:
            self._served = Served.of(tree, choice, *of_kernel, grows=self._grows)
        else:
            self._served = Served.in_layout(tree, layout, *of_kernel, grows=self._grows)

    def _given(self) -> dict[str, object]:
        functions = {} if self._scoring is None else self._scoring.options.functions
        return {"strategy": self._strategy, "choice": self.choice, **functions}

    def __repr__(self) -> str:
        limits = "" if self.capacity is None else f", at most {self.capacity.max_rows} rows"
        assumed = " (assumed)" if self._shape_is_assumed else ""
        made_for = f"{self._shape}{assumed}, {self._target.name}, {self._backend}{limits}"
        return f"<treegen.Kernel {self.choice.strategy}: {self.tree.size_text}; {made_for}>"

    def _chosen(self, tree: Tree) -> Choice:
        """The strategy's choice for a tree."""
        seen = View.of(tree, self._scoring).tree
        if self._autotune and not self._shape_is_assumed and tree.num_rows:
            with stage("tune"):
                tuned(seen, self._shape, self._target)
        with stage("choose"):
            return self._strategy.choose(seen, self._shape, self._target)

    def _planned(self, tree: Tree) -> Served:
        """The tree with its plan, in a kernel of fixed capacity with the layout for all that follow."""
        choice = self._chosen(tree)
        if self._wanted is None:
            return Served.of(tree, choice, self._shape, self._target, self._scoring, grows=self._grows)
        if choice.strategy != self._strategy and not suits_fixed_launches(choice.strategy):
            seen, isolated = View.of(tree, self._scoring).tree, self._strategy.isolated
            choice = searched(seen, self._shape, self._target, for_any_tree=True, isolated=isolated)
        return Served.first(tree, self._wanted, choice, self._shape, self._target, self._scoring, grows=self._grows)

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
            gradients = check_inputs.needing_gradients(self._named(q, k_cache, v_cache, out))
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
        served = self._served
        form = check_inputs.form_of(q, k_cache, v_cache, out, self._read)
        try:
            kept = served.calls.get((form, lse_base))
        except TypeError:  # no hash: `_prepared` says what is wrong with lse_base
            kept = None
        if kept is None:
            served, kept = self._prepared(form, q, k_cache, v_cache, out, lse_base)
        call, slots = kept
        if served.last_slot >= slots:
            check_inputs.check_slots(served.last_slot, k_cache, self._shape.kv_layout)
        if served.layout is not None:
            check_inputs.check_rows(served.tree, q)
        if captures(q):
            for program in tuple(served.programs.values()):
                self._captured[program] = min(slots, self._captured.get(program, slots))
        if checks_inputs():
            check_inputs.check_values(served.grown, q, k_cache, v_cache, self._shape.kv_layout)
        if out is None:
            out = self._empty_out(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        with stage("launch"):
            call(q, k_cache, v_cache, out, lse)
        return out, lse

    def _prepared(
        self,
        form: tuple[object, ...] | None,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None,
        lse_base: str,
    ) -> tuple[Served, KeptCall]:
        """Checks tensors, and settles what calls with all tensors of their form have in common."""
        check_inputs.lse_scale(lse_base)
        with self._lock:
            before = self._shape, self._shape_is_assumed, self._served
            try:
                found, slots = self._checked(q, k_cache, v_cache, out)
                if self._shape_is_assumed:
                    self._adopt(found)
                served = self._served
                call = self._bound(served, q, k_cache, v_cache, self._empty_out(q) if out is None else out, lse_base)
            except Exception:
                self._shape, self._shape_is_assumed, self._served = before
                raise
            if form is not None:
                served.keep_call(form, lse_base, (call, slots))
        return served, (call, slots)

    def _adopt(self, shape: Shape) -> None:
        """Takes a shape that was found in place of the assumed one, and plans anew where that changes something."""
        self._shape_is_assumed = False
        if shape != self._shape or self._autotune:
            self._shape = shape
            self._served = self._planned(self.tree)

    def _bound(
        self,
        served: Served,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse_base: str,
    ) -> Call:
        if not len(q):
            return _do_nothing
        scale = self._shape.head_dim**-0.5 if self._sm_scale is None else self._sm_scale
        program = self._program(served, q.device)
        if isinstance(program, TorchProgram):
            return unbound(program, scale, check_inputs.lse_scale(lse_base))
        check_inputs.check_strides(served.neighbours, k_cache, v_cache, self._shape.kv_layout)
        with stage("bind"):
            return program.bind(q, k_cache, v_cache, out, scale, check_inputs.lse_scale(lse_base))

    def _empty_out(self, q: torch.Tensor) -> torch.Tensor:
        return torch.empty(*q.shape[:2], self._shape.head_dim_v, dtype=q.dtype, device=q.device)

    def _checked(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[Shape, int]:
        """The shape of tensors that fit the kernel, and the slots of their caches. Raises InputError or ShapeError."""
        found = check_inputs.shape_of(q, k_cache, v_cache, self._shape.kv_layout)
        shared = in_same_place(k_cache, v_cache)
        if self._shape.shared_kv and not shared:
            fix = f"give k_cache[..., :{self._shape.head_dim_v}], or compile for a shape without shared_kv"
            raise InputError("v_cache", str(found), "is not the beginning of k_cache, as shared_kv says", fix)
        # Who gives no shape may well call with one tensor for both at first, to see something run, and then with two.
        shares = shared and found.head_dim_v < found.head_dim if self._shape_is_assumed else self._shape.shared_kv
        found = replace(found, partial_dtype=self._shape.partial_dtype, shared_kv=shares)
        served = self._served
        most_rows = None if served.layout is None else served.layout.limits.max_rows
        check_inputs.check_fits(served.grown, found if self._shape_is_assumed else self._shape, q, found, most_rows)
        if self._scoring is not None:
            self._scoring.check(found, q.device)
        if out is not None:
            check_inputs.check_output(out, q, found.head_dim_v)
        check_inputs.refuse_gradients(check_inputs.needing_gradients(self._named(q, k_cache, v_cache, out)))
        return found, check_inputs.check_slots(served.last_slot, k_cache, found.kv_layout)

    def _named(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[tuple[str, torch.Tensor | None], ...]:
        """All tensors of a call, by their names."""
        return ("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out), *self._read

    def _program(self, served: Served, device: torch.device) -> Program:
        backend = backend_for(device, self._wanted_backend)
        program = served.programs.get((backend, device))
        if program is None:
            with stage(f"prepare {backend}"):
                program = served.make_program(backend, self._shape, device, self._scales)
            served.programs[backend, device] = program
            self._backend = backend
        return program

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
        with self._lock:
            self._replan(tree, grows=self._grows)

    def _replan(self, tree: Tree, *, grows: bool) -> None:
        """See update; `grows` leaves room for rows to grow."""
        served = self._served
        if served.layout is None:
            choice = self._choice_for(tree) or self._chosen(tree)
            self._served = Served.of(tree, choice, self._shape, self._target, self._scoring, grows=grows)
        else:
            check_inputs.check_captured(tree.kv.last_slot, self._captured_slots())
            self._served = served.successor(tree, self._shape, self._target, grows=grows)
        self._grows = grows

    def _captured_slots(self) -> int | None:
        """Slots of the smallest cache that graphs read by the tables of what is served; None without graphs."""
        programs = self._served.programs.values()
        return min((self._captured[program] for program in programs if program in self._captured), default=None)

    def append(self, rows: IntsLike | None = None, tokens: int = 1, slots: npt.ArrayLike | None = None) -> None:
        """The kernel's tree becomes `tree.appended(rows, tokens, slots)`, which see: rows grow by tokens.

        The first time this plans anew, as `update` does, and from then on every plan leaves room in the tables for each
        row that is alone at its leaf and sees all of it: 16 tokens at least. As long as they last, such rows grow
        without a new plan. A few numbers in the tables on the device are raised, behind the calls and replays before on
        the current stream and without waiting for them; in a kernel of fixed capacity graphs then see the new tokens.
        Any slots that hold no token of the tree will do, with less room where they do not follow one another. `plan`,
        `schedule` and what follows from them are made for the grown tree when they are asked for; the launches stay
        those of the last plan. On the torch backend the tables are made anew every time. In batch-invariant mode, and
        where scores depend on positions, every call plans anew.

        Threads, streams and errors as for `update`, and TreeError as of Tree.appended.
        """
        with self._lock:
            if not self._served.take(rows, tokens, slots, self._captured_slots()):
                grows = self._scoring is None or not self._scoring.positions
                self._replan(self.tree.appended(rows, tokens, slots), grows=grows)

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

    def _choice_for(self, tree: Tree) -> Choice | None:
        """The choice made for the tree of the last plan, where it holds for `tree` as well; None where it has to be
        made.
        """
        chosen = self.choice.strategy
        if chosen == self._strategy or not serves_any_tree(chosen):
            return None
        known, before = self._bucket
        if known is not self._served.tree:
            before = policy_bucket(self._served.tree)
        self._bucket = tree, policy_bucket(tree)
        if self._bucket[1] != before:
            return None
        return Choice(chosen, f"{_KEPT}{self.choice.reason.removeprefix(_KEPT)}")

    def workspace_size(self) -> int:
        """Bytes of device memory that the kernel takes beside its inputs and outputs: tables, partial results, and the
        lse of calls that do not return it. Nothing is allocated for the answer, and no device is needed.

        For good, in a kernel of fixed capacity; else tables until the next update, and the rest during a call. It is
        that of the shape that is given or assumed, on the triton backend, without the scores of strategies that run
        unfused.
        """
        served, layout = self._served, self._served.layout
        if layout is None:
            return workspace_bytes(served.launched, self._shape, served.tree.num_rows)
        return workspace_bytes(served.launched, self._shape, layout.limits.max_rows, layout.room)

    def check_inputs(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Raises InputError when tensors do not fit, as a call does, or a value that is read is NaN.

        Synchronises with the device; `TREEGEN_CHECK=1` does this on every call.
        """
        with self._lock:
            self._checked(q, k_cache, v_cache)
        check_inputs.check_values(self.tree, q, k_cache, v_cache, self._shape.kv_layout)

    def verify(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> oracle.Verification:
        """Runs the kernel on the caller's data and measures it against the float64 oracle."""
        out, lse = self(q, k_cache, v_cache, return_lse=True)
        q = q[: self.tree.num_rows]
        expected_out, expected_lse = oracle.reference(
            self.tree,
            q,
            k_cache,
            v_cache,
            sm_scale=self._sm_scale,
            options=None if self._scoring is None else self._scoring.options,
            kv_layout=self._shape.kv_layout,
            k_scale=None if self._scales is None else self._scales.k,
            v_scale=None if self._scales is None else self._scales.v,
        )
        errors = oracle.error(out[: len(q)], expected_out), oracle.error(lse[: len(q)], expected_lse)
        return oracle.Verification(*errors, oracle.TOLERANCE[self._shape.dtype])

    @property
    def tree(self) -> Tree:
        """The tree that the next call serves."""
        return self._served.grown

    @property
    def shape(self) -> Shape:
        """The attention shape; assumed until the first call when none was given."""
        return self._shape

    @property
    def plan(self) -> Plan:
        """Who reads which KV together."""
        return self._current().plan

    @property
    def schedule(self) -> Schedule:
        """Work items, tiles and merge lists, without the room that is left for growth."""
        return self._current().schedule

    def _current(self) -> Served:
        """What is served, planned for the tree that it has grown to."""
        with self._lock:
            served = self._served
            if served.grown is served.tree:
                return served
            if self._shown is None or self._shown.tree is not served.grown:
                self._shown = served.up_to_date(self._shape, self._target)
            return self._shown

    @property
    def capacity(self) -> Limits | None:
        """What trees may need at most, of a kernel of fixed capacity; None of any other."""
        layout = self._served.layout
        return None if layout is None else layout.limits

    @property
    def choice(self) -> Choice:
        """The strategy that made the plan, and why it was taken."""
        return self._served.choice

    @property
    def target(self) -> Target:
        """What the plan is made for."""
        return self._target

    @property
    def backend(self) -> str:
        """What runs the schedule: "triton" or "torch"."""
        return self._backend

    @property
    def source(self) -> str:
        """The emitted Triton modules, for a cache addressed by slot."""
        layout = self._served.layout
        scoring = self._scoring
        emitted = emit(
            self.schedule,
            self._shape,
            capacity=None if layout is None else layout.room,
            scoring=None if scoring is None else scoring.code,
            scaled=self._scales is not None,
            by_bits=reads_bits(self._shape, self._target.capability),
            sinks=scoring is not None and scoring.sinks is not None,
            guarded=scoring is not None and scoring.guarded,
        )
        return "\n\n".join(source.text for source in emitted)

    @property
    def estimate(self) -> Estimate:
        """What the plan reads, writes and computes."""
        served = self._current()
        fixed = served.layout is not None
        return account(served.plan, served.schedule, served.view.tree, self._shape, self._target, fixed=fixed)

    def explain(self, groups: int = 0, formulas: bool = False) -> str:
        """The tree, the plan and its account as text; in batch-invariant mode also those of what `auto` would choose,
        and how their estimated times compare.

        groups: how many groups of the plan are listed at most; formulas: whether those of the cost model are.
        """
        served, shape, target = self._current(), self._shape, self._target
        strategy, reason = served.choice.strategy, served.choice.reason
        tree = served.view.tree
        fixed = served.layout is not None
        entry = Entry.from_plan(strategy, reason, served.plan, served.schedule, tree, shape, target, fixed=fixed)
        beside = explain(tree, ("auto",), shape, target).entries if served.plan.fixed_block else ()
        best = Choice(beside[0].strategy, beside[0].reason) if beside else served.choice
        made = Explanation(tree, shape, self._shape_is_assumed, target, (entry, *beside), best)
        text = made.text(groups, formulas)
        if self._scoring is None:
            return text
        return f"{self._scoring.options.text(served.tree.unique_tokens, tree.unique_tokens)}\n{text}"


def _do_nothing(*_: object) -> None:
    """The call for a q without rows."""
