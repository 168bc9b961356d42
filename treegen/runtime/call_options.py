"""Call options: the arguments that all calls of a kernel have in common; they check tensors and bind calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from treegen.backends import check_inputs
from treegen.backends.bound_call import Call, unbound
from treegen.backends.devices import backend_for, default_device
from treegen.backends.kv_scales import Scales
from treegen.backends.oracle import OracleOptions
from treegen.backends.torch_program import TorchProgram
from treegen.codegen.kernel_signature import in_same_place
from treegen.ir.errors import InputError
from treegen.ir.scalars import is_finite
from treegen.ir.shape import Shape
from treegen.runtime.prepared import PreparedPlan, Program
from treegen.scoring.options import Scoring
from treegen.strategies import Strategy
from treegen.strategies.batch_invariant import BatchInvariant
from treegen.timed import phase


@dataclass(frozen=True, eq=False)
class CallOptions:
    """The arguments of treegen.compile that calls use.

    backend: the wanted backend; None for what the tensors' device can run. sm_scale: the factor of scores; None for
    `1 / sqrt(head_dim)`. scales: the scales of keys and values. scoring: the score options. Raises BackendError for a
    backend that is unknown, or that this machine cannot run.
    """

    backend: str | None = None
    sm_scale: float | None = None
    scales: Scales | None = None
    scoring: Scoring | None = None

    def __post_init__(self) -> None:
        backend_for(default_device(), self.backend)

    @property
    def read(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """The tensors of scales and score options, by their names. Every launch reads them."""
        return read_tensors(self.scales, self.scoring)

    def named(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[tuple[str, torch.Tensor | None], ...]:
        """Names all tensors of a call, and those that every launch reads."""
        return ("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out), *self.read

    def checked(
        self,
        prepared: PreparedPlan,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        shape_is_assumed: bool = False,
    ) -> tuple[Shape, int]:
        """Checks tensors; returns their shape and the KV slots of their caches.

        With an assumed shape the tensors may have another one. Raises InputError or ShapeError.
        """
        shape = prepared.problem.shape
        found = check_inputs.shape_of(q, k_cache, v_cache, shape.kv_layout)
        shared = in_same_place(k_cache, v_cache)
        if shape.shared_kv and not shared:
            fix = f"give k_cache[..., :{shape.head_dim_v}], or compile for a shape without shared_kv"
            raise InputError("v_cache", str(found), "is not the beginning of k_cache, as shared_kv says", fix)
        # A caller who gives no shape may first try the kernel with one tensor for both caches, and then use two.
        shares = shared and found.head_dim_v < found.head_dim if shape_is_assumed else shape.shared_kv
        found = replace(found, partial_dtype=shape.partial_dtype, shared_kv=shares)
        most_rows = None if prepared.layout is None else prepared.layout.limits.max_rows
        check_inputs.check_fits(prepared.tree, found if shape_is_assumed else shape, q, found, most_rows)
        if self.scoring is not None:
            self.scoring.check(found, q.device)
        if out is not None:
            check_inputs.check_output(out, q, found.head_dim_v)
        check_inputs.refuse_gradients(check_inputs.needing_gradients(self.named(q, k_cache, v_cache, out)))
        return found, check_inputs.check_slots(prepared.last_slot, k_cache, found.kv_layout)

    def bound(
        self,
        prepared: PreparedPlan,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse_base: str,
    ) -> Call:
        """Binds a call of a prepared tree to tensors of the same form as these. Raises InputError."""
        if not len(q):
            return _do_nothing
        shape = prepared.problem.shape
        scale = shape.head_dim**-0.5 if self.sm_scale is None else self.sm_scale
        program = self.program(prepared, q.device)
        if isinstance(program, TorchProgram):
            return unbound(program, scale, check_inputs.lse_scale(lse_base))
        check_inputs.check_strides(prepared.neighbours, k_cache, v_cache, shape.kv_layout)
        with phase("bind"):
            return program.bind(q, k_cache, v_cache, out, scale, check_inputs.lse_scale(lse_base))

    def program(self, prepared: PreparedPlan, device: torch.device) -> Program:
        """Returns the program of a prepared tree on a device, made at the first use. Raises BackendError."""
        backend = backend_for(device, self.backend)
        program = prepared.programs.get((backend, device))
        if program is None:
            with phase(f"prepare {backend}"):
                program = prepared.make_program(backend, device, self.scales)
            prepared.programs[backend, device] = program
        return program

    def of_oracle(self, kv_layout: str) -> OracleOptions:
        """Returns the same options for the oracle."""
        k_scale, v_scale = (None, None) if self.scales is None else (self.scales.k, self.scales.v)
        scores = None if self.scoring is None else self.scoring.options
        return OracleOptions(self.sm_scale, kv_layout, k_scale, v_scale, scores)


@dataclass(frozen=True, eq=False)
class BatchOptions:
    """The arguments of treegen.compile_batch that plans and calls use.

    strategy: plans for the batch, unless `update` names another one. The other fields are those of CallOptions.
    """

    strategy: Strategy
    backend: str | None = None
    sm_scale: float | None = None
    scales: Scales | None = None
    scoring: Scoring | None = None

    @property
    def chunk(self) -> int:
        """Tokens of a chunk in batch-invariant mode, else 0."""
        return self.strategy.chunk if isinstance(self.strategy, BatchInvariant) else 0

    @property
    def read(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """The tensors of scales and score options, by their names. Every launch reads them."""
        return read_tensors(self.scales, self.scoring)


def read_tensors(scales: Scales | None, scoring: Scoring | None) -> tuple[tuple[str, torch.Tensor], ...]:
    """Names the tensors of scales and score options."""
    return tuple(item for part in (scales, scoring) if part for item in part.tensors.items())


def _do_nothing(*_: object) -> None:
    """Serves a q without rows."""


def check_sm_scale(sm_scale: object) -> None:
    """Raises InputError unless this is None, or a finite number of at least 0."""
    if sm_scale is not None and not (is_finite(sm_scale) and sm_scale >= 0):  # type: ignore[operator]
        reason = "is not a finite number of at least 0"
        raise InputError("sm_scale", sm_scale, reason, "give such a number (negate q for a negative one), or None")
