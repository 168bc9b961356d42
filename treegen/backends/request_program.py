"""The triton backend of running batches: tables of a plan on a device, step kernels, and attention launches."""

from __future__ import annotations

from typing import Any

import torch

from treegen.backends.batch_form import NO_REQUESTS, BatchForm, empty_schedule, no_plan
from treegen.backends.devices import kernel_capability, on_device
from treegen.backends.kept_tensors import for_kept_tensors
from treegen.backends.launch_tables import LaunchTables, Turns
from treegen.backends.staging import Upload
from treegen.backends.step_launches import counters_of, step_launches
from treegen.backends.triton_program import ProgramRoom, TritonProgram
from treegen.codegen.kernel_signature import ItemTables, MergeTables
from treegen.compiled.batch_tables import BatchTables
from treegen.compiled.table_words import TableWords
from treegen.ir.arena import SURPLUS_MERGE, ArenaSizes
from treegen.ir.arrays import Ints
from treegen.ir.request_tables import RUNNING_FIELDS
from treegen.ir.work_items import ITEM_FIELDS
from treegen.target.targets import takes_turns
from treegen.target.tile_config import lanes_of

_MERGES_AT_ONCE = 2
"""Thread blocks that take merges, for each one of four warps or more that takes items: an SM holds about eight of them.
"""


class RequestProgram:
    """Launches for running batches on one device, whose grids and addresses never change.

    `load` takes a plan and the running requests, `seat` these alone, each by a copy on the current stream that is not
    waited for. `step` reads the page table and lengths, once before the attention calls of a decode step. `bind` is
    TritonProgram.bind, for these calls.

    form: the sizes and options that the program is made for. tables: the tables on the device, by their names in
    RequestTables. running: int32 `[RUNNING_FIELDS, seats]` on the device, the running requests.
    """

    @for_kept_tensors()
    def __init__(self, form: BatchForm) -> None:
        room, shape = form.room, form.shape
        self.form, self._words = form, TableWords(room)
        self._places = self._words.places
        device = form.pages.table.device
        table = torch.zeros(self._places.words, dtype=torch.int32, device=device)
        running = table[self._places.running :][: len(RUNNING_FIELDS) * room.seats]
        self.running = running.view(-1, room.seats)
        self._head_upload, self._running_upload = Upload(table[: self._places.copied]), Upload(running)
        at = {name: table[place:] for name, place in self._places._asdict().items() if name not in ("copied", "words")}
        unused = table
        items = ItemTables(
            at["items"], at["rows"], at["tiles"], at["packed_runs"], unused, unused, unused, unused, at["positions"]
        )
        merges = MergeTables(
            at["merge_rows"], at["merge_indptr"], at["lone_partials" if room.chunk else "merge_partials"]
        )
        second = max(self._places.planned, self._places.alone) // len(ITEM_FIELDS)
        in_turns = takes_turns(kernel_capability(device))
        items_at_once = room.at_once if in_turns else self._places.running // len(ITEM_FIELDS)
        item_blocks = room.at_once * lanes_of(form.config, shape)
        merge_blocks = -(-_MERGES_AT_ONCE * item_blocks * min(form.config.num_warps, 4) // 4)
        turns = Turns(in_turns, second, merge_blocks, room.rows, room.lone_merges)
        capacity = ArenaSizes(
            items=(items_at_once,), rows=0, tiles=0, packed_runs=0, merges=(room.merges,),
            merge_partials=room.merge_partials, slots=room.slots + room.lone_partials,
        )  # fmt: skip
        self._attention = TritonProgram(
            empty_schedule((form.config,), fixed=room.chunk > 0), shape, device, ProgramRoom(capacity, room.rows),
            form.scales, form.scoring, LaunchTables(table, [items], [merges], shape.page_size, turns),
        )  # fmt: skip
        self.bind = self._attention.bind
        self.tables, self._device = at, device
        self._step = step_launches(form, at, self.running, self._attention.capability)
        at["merge_rows"][: room.merges].fill_(SURPLUS_MERGE)  # so that nothing is merged before the first step
        self._bound: list[Any] | None = None
        self.load(None, NO_REQUESTS)

    def load(self, made: BatchTables | None, requests: Ints) -> None:
        """Takes a plan for the next steps, and the running requests as `seat` does. With None each is served alone."""
        words, room = self._head_upload.words(), self.form.room
        self._words.write(made or no_plan(room), words)
        self._places.write_running(requests, room, words[self._places.running :])
        self._head_upload.send()

    def seat(self, requests: Ints) -> None:
        """Takes the running requests, `[RUNNING_FIELDS, seats]`."""
        room = self.form.room
        if requests.shape[1] == room.seats:
            self._running_upload.send_words(requests)
            return
        self._places.write_running(requests, room, self._running_upload.words())
        self._running_upload.send()

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
                compiled = launch.run()
                if compiled is not None:
                    bound.append((compiled[launch.grid[0], 1, 1], launch.settled))
            self._bound = bound or None

    @property
    def counters(self) -> torch.Tensor:
        """The number of steps, and of requests by state over all steps, as int64 on the device."""
        return counters_of(self.tables)

    @property
    def plan_age(self) -> torch.Tensor:
        """The number of steps since the last plan, as int32 `[1]` on the device."""
        return self.tables["age"][:1]
