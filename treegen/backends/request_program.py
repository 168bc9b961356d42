"""The triton backend of batches that live: a plan's tables on a device, step kernels, and attention launches."""

from __future__ import annotations

from typing import Any

import torch

from treegen.backends.batch_form import BatchForm, empty_schedule, no_plan
from treegen.backends.step_launches import counters_of, step_launches
from treegen.backends.triton_program import LaunchTables, TritonProgram, on_device
from treegen.codegen.kernel_signature import ItemTables, MergeTables
from treegen.ir.arena import SURPLUS_MERGE, Capacity
from treegen.ir.arrays import Ints
from treegen.ir.request_schedule import RequestSchedule, RequestTables


class RequestProgram:
    """Launches for batches that live, on one device: addresses of its memory, and grids, stay as they are.

    `load` gives it a plan that the room holds, and `seat` says who is running: copies on the current stream, which wait
    for nothing. `step` looks at the page table and at lengths, once before the attention calls of a decode step. `bind`
    is TritonProgram.bind, for those calls. `tables` are those on the device, by their names in RequestTables.
    """

    def __init__(self, form: BatchForm) -> None:
        room, shape = form.room, form.shape
        self.form, self._places = form, RequestTables.of(room)
        device = form.pages.table.device
        table = torch.zeros(self._places.words, dtype=torch.int32, device=device)
        self._head = table[self._places.planned : self._places.copied]
        self._seats = torch.full((2, room.seats), -1, dtype=torch.int32, device=device)
        at = {name: table[place:] for name, place in self._places._asdict().items() if name not in ("copied", "words")}
        unused = table
        items = ItemTables(
            at["items"], at["rows"], at["tiles"], at["blocks"], unused, unused, unused, unused, at["positions"]
        )
        merges = MergeTables(at["merge_rows"], at["merge_indptr"], at["lone_slots" if room.chunk else "merge_slots"])
        capacity = Capacity(
            items=(room.lone_items + room.items,), rows=0, tiles=0, blocks=0, merges=(room.merges,),
            merge_slots=room.merge_slots, slots=room.slots + room.lone_slots,
        )  # fmt: skip
        self._attention = TritonProgram(
            empty_schedule((form.tile,), fixed=room.chunk > 0), shape, device, capacity, room.rows,
            form.scales, form.scoring, LaunchTables(table, [items], [merges]), shape.page_size,
        )  # fmt: skip
        self.bind = self._attention.bind
        self.tables, self._device = at, device
        self._step = step_launches(form, at, self._seats, self._attention.capability)
        at["merge_rows"][: room.merges].fill_(SURPLUS_MERGE)  # until the first step nothing is merged
        self._bound: list[Any] | None = None
        self.load(None)

    def load(self, made: RequestSchedule | None) -> None:
        """Takes another plan, which steps use from now on; None for none, so that every request is walked alone."""
        head = _staging(self._head)
        words: Ints = head.numpy()
        self._places.write(made or no_plan(self.form.room), self.form.room, words)
        self._head.copy_(head, non_blocking=True)

    def seat(self, requests: Ints) -> None:
        """Takes who is in which seat: rows of the batch and epochs [2, seats], -1 for free seats."""
        seats = _staging(self._seats)
        words: Ints = seats.numpy()
        count = min(requests.shape[1], words.shape[1])
        words[:, count:] = -1
        words[:, :count] = requests[:, :count]
        self._seats.copy_(seats, non_blocking=True)

    def step(self) -> None:
        """Launches the step kernels."""
        if self._bound is not None:
            stream = torch.cuda.current_stream(self._device).cuda_stream
            for run, arguments in self._bound:
                run(*arguments, stream=stream)
            return
        with on_device(self._device):
            bound = []
            for launch in self._step:
                compiled = launch.kernel[launch.grid](*launch.arguments, **launch.options)
                if compiled is not None:
                    settled = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in launch.arguments]
                    bound.append((compiled[launch.grid[0], 1, 1], tuple(settled)))
            self._bound = bound or None

    @property
    def counters(self) -> torch.Tensor:
        """Steps, and of all of them requests by their state (treegen.backends.step_kernels), on the device."""
        return counters_of(self.tables)


def _staging(table: torch.Tensor) -> torch.Tensor:
    """Host memory in the form of a table, from which a copy to it need not be waited for (triton_program._copy)."""
    return torch.empty(table.shape, dtype=torch.int32, pin_memory=table.device.type == "cuda")
