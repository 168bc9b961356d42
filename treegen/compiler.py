"""compile(): a tree becomes a callable attention kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, overload

import torch

from treegen import inputs, oracle
from treegen.bound import Call, unbound
from treegen.bucket import policy_bucket
from treegen.devices import backend_for, default_device, resolve_target
from treegen.emit import emit
from treegen.environment import checks_inputs
from treegen.estimate import Estimate, account
from treegen.explain import Entry, Explanation
from treegen.ir.errors import InputError, TreeError
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.ir.tree import Tree
from treegen.ir.verify import verify
from treegen.lower import lower
from treegen.search.policies import serves_any_tree
from treegen.strategies import Choice, Strategy, strategy_from
from treegen.targets import Target
from treegen.torch_backend import TorchProgram
from treegen.trace import stage
from treegen.triton_backend import TritonProgram
from treegen.tune import check_tuning, tuned

_LSE_SCALE = {"ln": 1.0, "log2": 1 / math.log(2)}
_KEPT = "kept from an earlier tree of the same bucket: "
_MOST_FORMS = 64
"""Forms of tensors for which calls are kept."""


def compile(
    tree: Tree,
    *,
    strategy: str | Strategy = "auto",
    shape: Shape | None = None,
    target: str | Target | None = None,
    backend: str | None = None,
    sm_scale: float | None = None,
    autotune: bool = False,
) -> Kernel:
    """A kernel for `tree`.

    strategy: a registered name or a Strategy. shape: the attention shape; without one, 32:8 heads of head_dim 128 in
    bf16 are assumed until the first call shows the real one, which replans once. target: what to plan for, by default
    the current GPU, else h200. backend: "triton" or "torch", by default what the tensors' device can run. sm_scale:
    the scores' factor, by default `1 / sqrt(head_dim)`. autotune: `auto` measures its best candidates on the current
    GPU, for every bucket of trees that the cache does not know, as soon as the shape is known (treegen.tune). Raises a
    TreegenError for any argument that cannot be served.
    """
    if not isinstance(tree, Tree):
        raise TreeError("tree", tree, "is not a Tree", "make one with treegen.Tree.from_parents or its siblings")
    if shape is not None and not isinstance(shape, Shape):
        raise InputError("shape", shape, "is not a Shape", "give treegen.Shape(num_qo_heads, num_kv_heads, head_dim)")
    if sm_scale is not None and not (isinstance(sm_scale, int | float) and math.isfinite(sm_scale)):
        raise InputError("sm_scale", sm_scale, "is not finite", "give a number, or None for 1/sqrt(head_dim)")
    made, on_target = strategy_from(strategy), resolve_target(target)
    if autotune:
        check_tuning(made, on_target)
    return Kernel(tree, made, shape, on_target, backend, sm_scale, autotune)


@dataclass(frozen=True, slots=True)
class Verification:
    """A kernel's output measured against the float64 oracle: `max |out - ref| / max |ref|`, for out and for lse."""

    out_error: float
    lse_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether both errors are within the tolerance of q's type."""
        return self.out_error <= self.tolerance and self.lse_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"{verdict}: out error {self.out_error:.2e}, lse error {self.lse_error:.2e}, tolerance {self.tolerance:.1e}"
        )


class Kernel:
    """An attention kernel for one tree at a time. Made by `treegen.compile`."""

    def __init__(
        self,
        tree: Tree,
        strategy: Strategy,
        shape: Shape | None,
        target: Target,
        backend: str | None,
        sm_scale: float | None,
        autotune: bool = False,
    ) -> None:
        self._autotune = autotune
        self._strategy = strategy
        self._target = target
        self._wanted_backend = backend
        self._backend = backend_for(default_device(), backend)
        self._sm_scale = sm_scale
        self._shape = shape or DEFAULT_SHAPE
        self._shape_is_assumed = shape is None
        self._replan(tree)

    def _replan(self, tree: Tree, kept: Choice | None = None) -> None:
        if self._autotune and not self._shape_is_assumed and tree.num_rows and kept is None:
            with stage("tune"):
                tuned(tree, self._shape, self._target)
        with stage("plan"):
            choice = kept or self._strategy.choose(tree, self._shape, self._target)
            plan = choice.strategy.plan(tree, self._shape, self._target)
            if not choice.strategy.proven:
                verify(plan, tree)
        with stage("lower"):
            schedule = lower(plan, tree, self._shape, self._target)
        self._tree, self._choice, self._plan, self._schedule = tree, choice, plan, schedule
        self._programs: dict[tuple[str, torch.device], TritonProgram | TorchProgram] = {}
        self._calls: dict[tuple[object, str], Call] = {}

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
        page_size, num_kv_heads, head_dim]`. Returns out like q (into `out` if given), and with `return_lse` also the
        float32 log-sum-exp [rows, num_qo_heads], natural or base 2 (`lse_base` "ln" or "log2"). A row that sees nothing
        gives 0 and -inf. Raises InputError before any launch.
        """
        form = inputs.form_of(q, k_cache, v_cache, out)
        call = self._calls.get((form, lse_base))
        if call is None:
            call = self._prepared(q, k_cache, v_cache, out, lse_base)
            if form is not None:
                self._calls[form, lse_base] = call
                if len(self._calls) > _MOST_FORMS:
                    del self._calls[next(iter(self._calls))]
        if checks_inputs():
            inputs.check_values(self._tree, q, k_cache, v_cache)
        if out is None:
            out = self._empty_out(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        with stage("launch"):
            call(q, k_cache, v_cache, out, lse)
        return out if lse is None else (out, lse)

    def _prepared(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None,
        lse_base: str,
    ) -> Call:
        """Checks tensors, and settles what calls with all tensors of their form have in common."""
        if lse_base not in _LSE_SCALE:
            raise InputError("lse_base", lse_base, "is unknown", f"use one of {', '.join(_LSE_SCALE)}")
        self._fit(q, k_cache, v_cache)
        if out is not None:
            inputs.check_output(out, q, self._shape.head_dim_v)
        if not len(q):
            return _do_nothing
        scale = self._shape.head_dim**-0.5 if self._sm_scale is None else self._sm_scale
        program = self._program(q.device)
        if isinstance(program, TorchProgram):
            return unbound(program, scale, _LSE_SCALE[lse_base])
        out = self._empty_out(q) if out is None else out
        with stage("bind"):
            return program.bind(q, k_cache, v_cache, out, scale, _LSE_SCALE[lse_base])

    def _empty_out(self, q: torch.Tensor) -> torch.Tensor:
        return torch.empty(*q.shape[:2], self._shape.head_dim_v, dtype=q.dtype, device=q.device)

    def _fit(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        found = inputs.shape_of(q, k_cache, v_cache)
        if self._shape_is_assumed:
            self._shape_is_assumed = False
            if found != self._shape or self._autotune:
                self._shape = found
                self._replan(self._tree)
        inputs.check_fits(self._tree, self._shape, q, found)

    def _program(self, device: torch.device) -> TritonProgram | TorchProgram:
        backend = backend_for(device, self._wanted_backend)
        program = self._programs.get((backend, device))
        if program is None:
            make = TritonProgram if backend == "triton" else TorchProgram
            with stage(f"prepare {backend}"):
                program = make(self._schedule, self._shape, device)
            self._programs[backend, device] = program
            self._backend = backend
        return program

    def update(self, tree: Tree) -> None:
        """Plans for another tree. Kernels are specialised for nothing of a tree: those that are loaded serve it as
        well.

        Only a tree that calls for another tile class (masked or not, few or many rows, short or long runs) loads one
        more. `auto` keeps its choice for trees of the same bucket (`treegen cache why`) and searches for others.
        """
        if not isinstance(tree, Tree):
            raise TreeError("tree", tree, "is not a Tree", "make one with treegen.Tree.from_parents or its siblings")
        self._replan(tree, self._choice_for(tree))

    def _choice_for(self, tree: Tree) -> Choice | None:
        """The choice made for the tree before, where it holds for `tree` as well; None where it has to be made."""
        chosen = self._choice.strategy
        if chosen == self._strategy or not serves_any_tree(chosen) or policy_bucket(tree) != policy_bucket(self._tree):
            return None
        return Choice(chosen, f"{_KEPT}{self._choice.reason.removeprefix(_KEPT)}")

    def check_inputs(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Raises InputError when tensors do not fit, a slot is outside the cache, or a value that is read is NaN.

        Synchronises with the device; `TREEGEN_CHECK=1` does this on every call.
        """
        self._fit(q, k_cache, v_cache)
        inputs.check_values(self._tree, q, k_cache, v_cache)

    def verify(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> Verification:
        """Runs the kernel on the caller's data and measures it against the float64 oracle."""
        out, lse = self(q, k_cache, v_cache, return_lse=True)
        expected_out, expected_lse = oracle.reference(self._tree, q, k_cache, v_cache, sm_scale=self._sm_scale)
        tolerance = oracle.TOLERANCE[self._shape.dtype]
        return Verification(oracle.error(out, expected_out), oracle.error(lse, expected_lse), tolerance)

    @property
    def tree(self) -> Tree:
        """The tree that the next call serves."""
        return self._tree

    @property
    def shape(self) -> Shape:
        """The attention shape; assumed until the first call when none was given."""
        return self._shape

    @property
    def plan(self) -> Plan:
        """Who reads which KV together."""
        return self._plan

    @property
    def schedule(self) -> Schedule:
        """Work items, tiles and merge lists."""
        return self._schedule

    @property
    def choice(self) -> Choice:
        """The strategy that made the plan, and why it was taken."""
        return self._choice

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
        return "\n\n".join(source.text for source in emit(self._schedule, self._shape))

    @property
    def estimate(self) -> Estimate:
        """What the plan reads, writes and computes."""
        return account(self._plan, self._schedule, self._tree, self._shape, self._target)

    def explain(self) -> str:
        """The tree, the plan and its account as text."""
        choice, target = self._choice, self._target
        entry = Entry.from_plan(
            choice.strategy, choice.reason, self._plan, self._schedule, self._tree, self._shape, target
        )
        assumed = self._shape_is_assumed
        return str(Explanation(self._tree, self._shape, assumed, target, (entry,), best=choice.strategy))


def _do_nothing(*_: object) -> None:
    """The call for a tree without rows."""
