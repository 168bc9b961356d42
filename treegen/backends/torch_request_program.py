"""The torch backend of running batches: each step expands the plan on the host."""

from __future__ import annotations

import numpy as np
import torch

from treegen.backends.batch_form import BatchForm, no_plan
from treegen.backends.bound_call import Call, unbound
from treegen.backends.kept_tensors import for_kept_tensors
from treegen.backends.torch_program import TorchProgram
from treegen.compiled.batch_tables import BatchTables
from treegen.ir.arrays import Ints
from treegen.ir.errors import InputError
from treegen.ir.request_tables import NO_REQUEST
from treegen.schedule.expand import RunningRequests, expanded


class TorchRequestProgram:
    """RequestProgram on the torch backend: each step makes the schedule of the batch (treegen.schedule.expand)."""

    @for_kept_tensors()
    def __init__(self, form: BatchForm) -> None:
        self._form = form
        self._made, self.running = no_plan(form.room), NO_REQUEST.repeat(form.room.seats, 1)
        self._program: TorchProgram | None = None
        self.counters = torch.zeros(6, dtype=torch.int64, device="cpu")
        self.plan_age = torch.zeros(1, dtype=torch.int32, device="cpu")

    def load(self, made: BatchTables | None, requests: Ints) -> None:
        """See RequestProgram."""
        self._made = no_plan(self._form.room) if made is None else made.schedule
        self.plan_age.zero_()
        self.seat(requests)

    def seat(self, requests: Ints) -> None:
        """See RequestProgram."""
        seats = self._form.room.seats
        count = min(requests.shape[1], seats)
        taken = NO_REQUEST.repeat(seats, 1)
        taken[:, :count] = requests[:, :count]
        self.running = taken

    @for_kept_tensors()
    def step(self) -> None:
        """Reads the page table and lengths, and makes the schedule of this step."""
        form = self._form
        pages, shape = form.pages, form.shape
        requests = RunningRequests(
            self.running, pages.lengths(), pages.of_rows(), pages.num_pages, form.most_tokens, shape.page_size,
            pages.queries(), form.room.rows,
        )  # fmt: skip
        schedule, states = expanded(
            self._made, form.config, requests, form.window_left, form.room.chunk, positions=form.positions
        )
        if self._program is None:
            self._program = TorchProgram(schedule, shape, pages.table.device, form.scales, form.scoring)
        else:
            self._program.load(schedule)
        counts = np.bincount(states, minlength=6)
        counts[0] = 1
        self.counters += torch.from_numpy(counts)
        self.plan_age += 1

    def bind(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        sm_scale: float,
        lse_scale: float,
    ) -> Call:
        """See TritonProgram.bind."""
        return unbound(self._call, sm_scale, lse_scale)

    def _call(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        sm_scale: float,
        lse_scale: float,
    ) -> None:
        if self._program is None:
            fix = "call kernel.step() once per decode step"
            raise InputError("kernel", "a call", "comes before the first step", fix)
        self._program(q, k_cache, v_cache, out, lse, sm_scale, lse_scale)
