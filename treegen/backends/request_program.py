"""The triton backend of batches that live: a plan's tables on a device, step kernels, and attention launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from treegen.backends.bound_call import Call, unbound
from treegen.backends.kv_scales import Scales
from treegen.backends.page_table import PageTable
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import LaunchTables, TritonProgram, on_device
from treegen.codegen.compile_counter import watch_compiles
from treegen.codegen.kernel_signature import ItemTables, MergeTables, depends_on_launches
from treegen.ir.arena import SURPLUS_MERGE, Capacity
from treegen.ir.arrays import Ints, frozen
from treegen.ir.errors import InputError
from treegen.ir.request_schedule import SEAT_FIELDS, RequestRoom, RequestSchedule, RequestTables, SharedChunks
from treegen.ir.schedule import ITEM_FIELDS, RUN_FIELDS, Schedule, TileClass
from treegen.ir.shape import Shape
from treegen.schedule.by_request import block_of
from treegen.schedule.expand import RunningRequests, expanded
from treegen.scoring.options import Scoring
from treegen.target.tile_config import rows_per_tile

_CHECKED, _SCANNED = 256, 256
"""Pages that a program checks, and states that it looks through, at a time."""
_ENTRIES, _TILES = 8, 16
"""Entries, and tiles of them, that a program expands at a time."""
_EXPAND_PARTS, _MANY_ITEMS = 4, 1024
"""Programs that expand an item, one its blocks and the others its tiles; and the items from which on there is but one
program each. On an H200 256 requests of 13,000 tokens take 10.8 us in four parts and 13.9 in one; 4,096 requests of
1,000 tokens take 31.7 us in four and 15.9 in one.
"""
_WARPS = 1
"""Of step kernels, which wait for memory most of their time."""


class BatchForm(NamedTuple):
    """What programs for batches are made for: the tile class of all launches, what there is room for, the attention
    shape, the engine's page table, tokens of a request at most, scales of keys and values, and what is done to scores.
    """

    tile: TileClass
    room: RequestRoom
    shape: Shape
    pages: PageTable
    most_tokens: int
    scales: Scales | None = None
    scoring: Scoring | None = None

    @property
    def positions(self) -> bool:
        """Whether kernels need those of rows and tokens."""
        return self.scoring is not None and self.scoring.positions

    @property
    def window_left(self) -> int:
        """Tokens before its own that a row sees, -1 for all."""
        return -1 if self.scoring is None else self.scoring.options.window_left


class _StepLaunch(NamedTuple):
    """A step kernel on its grid, with its arguments."""

    kernel: Any
    grid: tuple[int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class RequestProgram:
    """Launches for batches that live, on one device: addresses of its memory, and grids, stay as they are.

    `load` gives it a plan that the room holds, and `seat` says who is running: copies on the current stream, which wait
    for nothing. `step` looks at the page table and at lengths, once before the attention calls of a decode step. `bind`
    is TritonProgram.bind, for those calls.
    """

    def __init__(self, form: BatchForm) -> None:
        room, shape = form.room, form.shape
        self._room, self._places = room, RequestTables.of(room)
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
            _empty_schedule((form.tile,), fixed=room.chunk > 0), shape, device, capacity, room.rows,
            form.scales, form.scoring, LaunchTables(table, [items], [merges]), shape.page_size,
        )  # fmt: skip
        self.bind = self._attention.bind
        self._at, self._device = at, device
        self._step = self._step_launches(form)
        at["merge_rows"][: room.merges].fill_(SURPLUS_MERGE)  # until the first step nothing is merged
        self._bound: list[Any] | None = None
        self.load(None)

    def load(self, made: RequestSchedule | None) -> None:
        """Takes another plan, which steps use from now on; None for none, so that every request is walked alone."""
        head = _staging(self._head)
        words: Ints = head.numpy()
        self._places.write(made or _no_plan(self._room), self._room, words)
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
        return self._at["counters"][:12].view(torch.int64)

    def _step_launches(self, form: BatchForm) -> tuple[_StepLaunch, _StepLaunch]:
        """The launches of both step kernels."""
        from treegen.backends import chunk_kernels, step_kernels

        watch_compiles()
        tile, room, shape, pages, at = form.tile, form.room, form.shape, form.pages, self._at
        table, seq_lens, named, indptr = pages.table, pages.seq_lens, pages.table_rows, pages.indptr
        unread = seq_lens
        queries = pages.qo_indptr
        common = (
            self._seats, seq_lens, unread if named is None else named, table, unread if indptr is None else indptr,
            unread if queries is None else queries,
        )  # fmt: skip
        stride, width = (0, 0) if indptr is not None else (table.stride(0), table.shape[1])
        page_size = shape.page_size
        kinds = (named is not None, indptr is not None, queries is not None)
        slots = max(1, tile.tokens // page_size)
        forms = (
            tile.tokens, page_size, block_of(page_size), slots, room.tile_width, room.run_width,
            int(form.positions), form.window_left >= 0,
        )  # fmt: skip
        dependent = depends_on_launches(self._attention.capability)
        behind = {"num_warps": _WARPS, **({"launch_pdl": True} if dependent else {})}
        most_rows = max(16, 1 << (rows_per_tile(tile.rows, shape.group) - 1).bit_length())
        places, counters = self._places, self.counters
        parts = _EXPAND_PARTS if room.items <= _MANY_ITEMS else 1
        read = _StepLaunch(
            step_kernels.read_requests,
            (room.items * parts + room.seats,),
            (
                *common, at["planned"], at["entries"], at["entry_indptr"], at["read_rows"], at["seats"], at["claims"],
                at["queries"], at["row_number"], at["merge_number"], at["counts"], at["rows"], at["merge_rows"],
                at["positions"], at["tiles"], at["blocks"], at["states"], counters, at["flags"],
                room.seats, room.items, room.rows, len(seq_lens), stride, width, pages.num_pages, form.most_tokens,
                form.window_left,
                *forms, _ENTRIES, _TILES, most_rows, parts, _CHECKED, *kinds, dependent,
            ),
            {"num_warps": _WARPS},
        )  # fmt: skip
        if room.chunk:
            deal = _StepLaunch(
                chunk_kernels.settle_chunks,
                (room.lone_items + -(-room.seats // _SCANNED),),
                (
                    *common[:-1], at["items"], at["rows"], at["merge_rows"], at["merge_indptr"], at["lone_slots"],
                    at["shared"], at["shared_slots"], at["tiles"], at["blocks"], at["states"], counters,
                    room.seats, room.rows, room.lone_items, room.lone_tiles, room.lone_blocks, room.tiles, room.blocks,
                    room.slots, len(seq_lens), stride, width, pages.num_pages, form.window_left, room.chunk,
                    *forms, _TILES, room.lone_rows, _SCANNED, *kinds[:-1], dependent,
                ),
                behind,
            )  # fmt: skip
            return read, deal
        settle = _StepLaunch(
            step_kernels.settle_requests,
            (room.lone_items,),
            (
                *common, at["items"], at["rows"], at["merge_rows"][room.rows + 1 :],
                at["merge_indptr"][room.rows + 1 :], at["lone_slots"], at["tiles"], at["blocks"], at["states"],
                counters, at["flags"],
                room.seats, room.rows, room.lone_items, room.lone_tiles, room.lone_blocks, room.tiles, room.blocks,
                room.slots, places.lone_slots - places.merge_slots,
                len(seq_lens), stride, width, pages.num_pages, form.window_left,
                *forms, _TILES, room.lone_rows, _SCANNED, *kinds, dependent,
            ),
            behind,
        )  # fmt: skip
        return read, settle


class TorchRequestProgram:
    """The same on the torch backend: each step makes the schedule of the batch as it is (treegen.schedule.expand)."""

    def __init__(self, form: BatchForm) -> None:
        self._form = form
        self._made, self._seats = _no_plan(form.room), np.full((2, form.room.seats), -1, np.int32)
        self._program: TorchProgram | None = None
        self.counters = torch.zeros(6, dtype=torch.int64)

    def load(self, made: RequestSchedule | None) -> None:
        """See RequestProgram."""
        self._made = made or _no_plan(self._form.room)

    def seat(self, requests: Ints) -> None:
        """See RequestProgram."""
        seats = self._form.room.seats
        count = min(requests.shape[1], seats)
        self._seats = np.full((2, seats), -1, np.int32)
        self._seats[:, :count] = requests[:, :count]

    def step(self) -> None:
        """Reads the page table and lengths, and makes the schedule of the batch."""
        form = self._form
        pages, shape = form.pages, form.shape
        requests = RunningRequests(
            self._seats, pages.lengths(), pages.of_rows(), pages.num_pages, form.most_tokens, shape.page_size,
            pages.queries(), form.room.rows,
        )  # fmt: skip
        schedule, states = expanded(
            self._made, form.tile, requests, form.window_left, form.room.chunk, positions=form.positions
        )
        if self._program is None:
            self._program = TorchProgram(schedule, shape, pages.table.device, form.scales, form.scoring)
        else:
            self._program.load(schedule)
        counts = np.bincount(states, minlength=6)
        counts[0] = 1
        self.counters += torch.from_numpy(counts)

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


def _no_plan(room: RequestRoom) -> RequestSchedule:
    """The schedule of no requests."""
    none, zero = frozen(np.empty(0)), frozen(np.zeros(1))
    chunks = SharedChunks(none, none, none) if room.chunk else None
    seats = none.reshape(len(SEAT_FIELDS), 0)
    return RequestSchedule(_empty_schedule(()), none, zero, 0, 0, seats, none, None, chunks)


def _empty_schedule(classes: tuple[TileClass, ...], *, fixed: bool = False) -> Schedule:
    """A schedule without items in these classes."""
    none, zero = frozen(np.empty(0)), frozen(np.zeros(1))
    items, runs = none.reshape(0, len(ITEM_FIELDS)), none.reshape(0, len(RUN_FIELDS))
    indptr = frozen(np.zeros(len(classes) + 1))
    return Schedule(classes, indptr, items, none, runs, runs, none, zero, none, fixed=fixed)


def _staging(table: torch.Tensor) -> torch.Tensor:
    """Host memory in the form of a table, from which a copy to it need not be waited for (triton_program._copy)."""
    return torch.empty(table.shape, dtype=torch.int32, pin_memory=table.device.type == "cuda")
