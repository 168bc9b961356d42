"""What all calls of a kernel have in common, whatever its tree: how tensors are checked, and calls bound."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from treegen.backends import check_inputs
from treegen.backends.bound_call import Call, unbound
from treegen.backends.devices import backend_for, default_device
from treegen.backends.kv_scales import Scales
from treegen.backends.torch_program import TorchProgram
from treegen.codegen.kernel_signature import in_same_place
from treegen.ir.errors import InputError
from treegen.ir.shape import Shape
from treegen.runtime.prepared import Prepared, Program
from treegen.scoring.options import Scoring
from treegen.timed import stage


@dataclass(frozen=True, eq=False)
class CallOptions:
    """What was given to treegen.compile for calls. backend: the wanted one; sm_scale: None for that of the shape.

    Raises BackendError for a backend that is unknown, or that this machine cannot run.
    """

    backend: str | None = None
    sm_scale: float | None = None
    scales: Scales | None = None
    scoring: Scoring | None = None

    def __post_init__(self) -> None:
        backend_for(default_device(), self.backend)

    @property
    def read(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Tensors that every launch reads besides those of its call, by their names."""
        return tuple(item for part in (self.scales, self.scoring) if part for item in part.tensors.items())

    def named(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[tuple[str, torch.Tensor | None], ...]:
        """All tensors of a call, by their names."""
        return ("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out), *self.read

    def checked(
        self,
        prepared: Prepared,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        shape_is_assumed: bool = False,
    ) -> tuple[Shape, int]:
        """The shape of tensors that fit what is prepared, and the slots of their caches. With an assumed shape they may
        have another one. Raises InputError or ShapeError.
        """
        shape = prepared.problem.shape
        found = check_inputs.shape_of(q, k_cache, v_cache, shape.kv_layout)
        shared = in_same_place(k_cache, v_cache)
        if shape.shared_kv and not shared:
            fix = f"give k_cache[..., :{shape.head_dim_v}], or compile for a shape without shared_kv"
            raise InputError("v_cache", str(found), "is not the beginning of k_cache, as shared_kv says", fix)
        # Who gives no shape may well call with one tensor for both at first, to see something run, and then with two.
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
        prepared: Prepared,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse_base: str,
    ) -> Call:
        """A call of what is prepared for tensors that have the form of these. Raises InputError."""
        if not len(q):
            return _do_nothing
        shape = prepared.problem.shape
        scale = shape.head_dim**-0.5 if self.sm_scale is None else self.sm_scale
        program = self.program(prepared, q.device)
        if isinstance(program, TorchProgram):
            return unbound(program, scale, check_inputs.lse_scale(lse_base))
        check_inputs.check_strides(prepared.neighbours, k_cache, v_cache, shape.kv_layout)
        with stage("bind"):
            return program.bind(q, k_cache, v_cache, out, scale, check_inputs.lse_scale(lse_base))

    def program(self, prepared: Prepared, device: torch.device) -> Program:
        """The program of what is prepared on a device; made when it is first asked for. Raises BackendError."""
        backend = backend_for(device, self.backend)
        program = prepared.programs.get((backend, device))
        if program is None:
            with stage(f"prepare {backend}"):
                program = prepared.make_program(backend, device, self.scales)
            prepared.programs[backend, device] = program
        return program


def _do_nothing(*_: object) -> None:
    """The call for a q without rows."""
