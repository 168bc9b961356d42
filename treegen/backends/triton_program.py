"""The triton backend: a schedule's tables on a device, and the launches of its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple

import torch

from treegen.backends.bound_call import BoundCall, BoundLaunch, Call, Scratch, unbound
from treegen.backends.check_inputs import TORCH_DTYPES
from treegen.backends.devices import capability_of, interpreted
from treegen.backends.kv_scales import Scales, placed
from treegen.backends.kv_views import in_words
from treegen.backends.unfused import unfused_parts
from treegen.codegen.compile_counter import warn_of_compiles
from treegen.codegen.emit import Source, emit_merge, emit_partial
from treegen.codegen.kernel_signature import (
    ItemTables,
    MergeTables,
    Tensors,
    by_slot,
    call_values,
    captured_values,
    launch_options,
    shared_kv,
    switch_values,
)
from treegen.codegen.load import load_module
from treegen.codegen.merge_forms import merge_key_of
from treegen.codegen.module_text import compile_templates
from treegen.codegen.partial_keys import KernelOptions, kernel_key, reads_bits
from treegen.codegen.register_layout import check_pairs
from treegen.ir.arena import Arena, Capacity
from treegen.ir.arrays import Ints
from treegen.ir.errors import PerformanceWarning, warn
from treegen.ir.keys import KernelKey
from treegen.ir.schedule import Schedule
from treegen.ir.shape import FP8, Shape
from treegen.schedule.passes.fuse_merge import parts_of, waits
from treegen.scoring.options import Scoring
from treegen.target.tile_config import lanes_of
from treegen.timed import stage

_ALIGNED_BYTES = 16
_LAUNCHING = Lock()
"""Held while Triton compiles or interprets, neither of which is made for several threads. Bound calls need no lock."""


def _begin() -> None:
    """Does what would else make the first call wait: templates are compiled; Triton hashes itself and imports Gluon, as
    it does once per process before its first kernel.
    """
    compile_templates()
    if torch.cuda.is_available():
        with suppress(ImportError):  # what a Triton does not have it does not wait for
            import_module("triton.experimental.gluon")
            from triton.runtime.cache import triton_key

            triton_key()


_begin()


class KernelLaunch(NamedTuple):
    """A launch as Triton takes it: of a kernel, on a grid, with arguments in the order of its source's signature."""

    source: Source
    kernel: Any
    grid: tuple[int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class LaunchTables(NamedTuple):
    """A schedule's tables on a device: all of them as one tensor, and those of every tile class and of every stage."""

    table: torch.Tensor
    items: list[ItemTables]
    merges: list[MergeTables]

    @classmethod
    def of(cls, arena: Arena, table: torch.Tensor) -> LaunchTables:
        """The tables of an arena that is, or will be, in `table`."""
        shared = {
            "rows": table[arena.rows :],
            "tiles": table[arena.tiles :],
            "runs": table[arena.blocks :],
            "work_indptr": table[arena.work_indptr :],
            "work": table[arena.work :],
            "epilogue_indptr": table[arena.epilogue_indptr :],
            "epilogue_slots": table[arena.epilogue_slots :],
            "row_positions": table[arena.positions :],
        }
        places = zip(arena.merge_rows, arena.merge_indptr, strict=True)
        merges = [MergeTables(table[rows:], table[indptr:], table[arena.merge_slots :]) for rows, indptr in places]
        return cls(table, [ItemTables(items=table[place:], **shared) for place in arena.items], merges)


class TritonProgram:
    """A schedule, as it is launched, prepared for execution on one device. Calls share no scratch memory, so streams
    may overlap.

    Kernels launch on `capacity` (default: exactly the schedule); surplus blocks exit at once. Where the device can, a
    launch that merges begins while the one before it is still running. most_rows: rows of q at most; a program that is
    told keeps one workspace for all calls, which may therefore not overlap, and the addresses of all its memory for
    good: `load` gives it other schedules. scales: of keys and values; scoring: what is done to scores. `table` is the
    arena on the device. tables: on the device already, and filled by others; request_page: see KernelKey.
    """

    def __init__(
        self,
        schedule: Schedule,
        shape: Shape,
        device: torch.device,
        capacity: Capacity | None = None,
        most_rows: int | None = None,
        scales: Scales | None = None,
        scoring: Scoring | None = None,
        tables: LaunchTables | None = None,
        request_page: int = 0,
    ) -> None:
        self._schedule = schedule
        self._shape = shape
        self._partial_dtype = TORCH_DTYPES[shape.partial_dtype]
        self.capability = capability_of(device) if device.type == "cuda" and not interpreted() else 0
        self._options = kernel_options(shape, self.capability, scales, scoring)._replace(request_page=request_page)
        self._merge_keys = [
            merge_key_of(schedule, shape, s, capacity, sinks=self._options.sinks) for s in range(schedule.num_stages)
        ]
        self._capacity = capacity or schedule.size
        self._workspace: torch.Tensor | None = None
        if most_rows is not None:
            size = self._scratch(most_rows).size
            self._workspace = torch.empty(size, dtype=torch.uint8, device=device)
        if tables is None:
            arena = schedule.pack(capacity)
            tables = LaunchTables.of(arena, torch.empty(len(arena.array), dtype=torch.int32, device=device))
            _copy(arena.array, tables.table)
        self.table, self._item_tables, self._merge_tables = tables
        of_heads = placed(scales, device, shape.num_kv_heads)
        self._unfused = unfused_parts(schedule, shape, device, of_heads, scoring)
        self._values: dict[str, Any] = {}  # what all launches take besides, by the names of parameters
        if of_heads is not None:
            self._values |= {"k_scales": of_heads.k, "v_scales": of_heads.v}
        if scoring is not None:
            self._values |= {"sinks": scoring.sinks, **captured_values(scoring.readable)}

    def load(self, schedule: Schedule) -> None:
        """Takes another schedule of the same classes and stages, which calls on the current stream find from now on,
        and graphs that were captured from earlier calls, too. Raises PlanError when it exceeds the capacity.
        """
        _copy(schedule.pack(self._capacity).array, self.table)
        self._schedule = schedule

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        sm_scale: float,
        lse_scale: float,
    ) -> None:
        """Fills out [rows, heads, head_dim_v] and lse [rows, heads] (natural log times `lse_scale`)."""
        tensors = self._tensors(q, k_cache, v_cache, out, lse)
        for part in self._unfused:
            part(q, k_cache, v_cache, out, lse, sm_scale, lse_scale)
        with _LAUNCHING, on_device(q.device):
            for launch in self._launches(tensors, (k_cache, v_cache), sm_scale, lse_scale):
                launch.kernel[launch.grid](*launch.arguments, **launch.options)

    def bind(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        sm_scale: float,
        lse_scale: float,
    ) -> Call:
        """A call for tensors that have the form of these: shapes, strides, types, device and alignment. Compiles and
        loads its kernels, but launches nothing.
        """
        if self._unfused:
            return unbound(self, sm_scale, lse_scale)
        _warn_unaligned(q, k_cache, v_cache, out)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        bound = []
        tensors = self._tensors(q, k_cache, v_cache, out, lse)
        with _LAUNCHING, on_device(q.device):
            for launch in self._launches(tensors, (k_cache, v_cache), sm_scale, lse_scale):
                if _is_interpreted(launch.kernel):
                    return unbound(self, sm_scale, lse_scale)
                compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
                check_pairs(compiled)
                taken = launch.source.signature.tensors
                rest = launch.arguments[taken.stop - taken.start :]
                bound.append(BoundLaunch(compiled[launch.grid[0], 1, 1], taken, tuple(map(_settled, rest))))
        warn_of_compiles()
        from triton.runtime import driver

        stream_of = driver.active.get_current_stream
        return BoundCall(tuple(bound), self, q.device, stream_of, self._scratch(len(q)), self._workspace)

    def _scratch(self, rows: int) -> Scratch:
        """The scratch memory of a call with so many rows."""
        return _scratch(self._schedule, self._capacity, rows, self._shape)

    def _tensors(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> Tensors:
        """The tensors of a launch, with room for partial results."""
        return Tensors(q, k_cache, v_cache, out, lse, *self._partials(q.device))

    def _partials(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Room for part_out, part_lse and flags."""
        out_at, flags_at, lse_at, _ = self._scratch(0)
        memory = self._workspace
        if memory is None:
            memory = torch.empty(lse_at, dtype=torch.uint8, device=device)
        part_out, flags = memory[out_at:flags_at].view(self._partial_dtype), memory[flags_at:lse_at].view(torch.int64)
        return part_out, memory[:out_at].view(torch.float32), flags

    def _launches(
        self, tensors: Tensors, caches: tuple[torch.Tensor, torch.Tensor], sm_scale: float, lse_scale: float
    ) -> Iterator[KernelLaunch]:
        """Every launch, in order."""
        shape = self._shape
        page_size = 1 if by_slot(shape, tensors) else shape.page_size
        words = in_words(*caches) if shape.kv_dtype in FP8 else None
        options = self._options._replace(shared_kv=shared_kv(shape, tensors), words=words is not None)
        values = {**self._values, **call_values(shape, tensors, sm_scale, lse_scale)}
        values["parts"] = parts_of(self._schedule) if waits(self._schedule) else 0
        for stage_number, (classes, _) in enumerate(self._schedule.stages):
            for c in classes:
                tile = self._schedule.classes[c]
                if self._capacity.items[c] == 0 or not tile.fused:
                    continue
                key = kernel_key(tile, shape, page_size, options)
                values.update(self._item_tables[c]._asdict())
                blocks = self._capacity.workers if tile.dealt else self._capacity.items[c] * lanes_of(tile, shape)
                in_other_form = _caches_for(key, caches, words)
                if in_other_form is None:
                    yield self._launch(emit_partial(key), blocks, values)
                else:
                    read = tensors._replace(k=in_other_form[0], v=in_other_form[1])
                    of_call = call_values(shape, read, sm_scale, lse_scale)
                    yield self._launch(emit_partial(key), blocks, values | of_call)
            merges = self._capacity.merges[stage_number]
            if merges:
                merging = self._merge_keys[stage_number]
                values.update(self._merge_tables[stage_number]._asdict())
                yield self._launch(emit_merge(merging), merges * -(-shape.num_qo_heads // merging.heads), values)

    def _launch(self, source: Source, blocks: int, values: dict[str, Any]) -> KernelLaunch:
        """The launch of a module's kernel. blocks: thread blocks of its grid; values: those of its parameters, by name,
        to which switches are added.
        """
        kernel = getattr(_module(source), source.kernel)
        values.update(switch_values(interpreted=_is_interpreted(kernel), capability=self.capability))
        arguments = source.signature.arguments(values)
        return KernelLaunch(source, kernel, (blocks,), arguments, launch_options(source.key, self.capability))


def _caches_for(
    key: KernelKey, caches: tuple[torch.Tensor, torch.Tensor], words: tuple[torch.Tensor, ...] | None
) -> tuple[torch.Tensor, ...] | None:
    """The caches in the form in which a kernel reads them; None for that in which they are given."""
    if key.words:
        return words
    return tuple(cache.view(torch.uint8) for cache in caches) if key.by_bits else None


def kernel_options(shape: Shape, capability: int, scales: Scales | None, scoring: Scoring | None) -> KernelOptions:
    """What is asked of kernels for a compute capability (times ten), but for what the tensors of a call decide."""
    return KernelOptions(
        scoring=None if scoring is None else scoring.code,
        scaled=scales is not None,
        by_bits=reads_bits(shape, capability),
        sinks=scoring is not None and scoring.sinks is not None,
        guarded=scoring is not None and scoring.guarded,
    )


def workspace_bytes(schedule: Schedule, shape: Shape, rows: int, capacity: Capacity | None = None) -> int:
    """Bytes of device memory that a program takes for tables, partial results and the lse of so many rows."""
    capacity = capacity or schedule.size
    return schedule.pack(capacity).array.nbytes + _scratch(schedule, capacity, rows, shape).size


def _scratch(schedule: Schedule, capacity: Capacity, rows: int, shape: Shape) -> Scratch:
    """The scratch memory of a call: a flag for every slot and head at most, where some items wait for others."""
    return Scratch.of(capacity.slots, rows, shape, capacity.slots * shape.num_qo_heads if waits(schedule) else 0)


def _copy(array: Ints, table: torch.Tensor) -> None:
    """Copies an array to the device on the current stream, without waiting for it.

    PyTorch gives the memory of a pinned tensor to another one only when copies from it are done, so that every copy
    has a buffer of its own, and no more of them exist than copies have been in flight at a time.
    """
    if table.device.type != "cuda":
        table.numpy()[:] = array
        return
    staging = torch.empty(len(array), dtype=torch.int32, pin_memory=True)
    staging.numpy()[:] = array
    table.copy_(staging, non_blocking=True)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one, on whose stream Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _settled(argument: object) -> object:
    """An argument as a compiled kernel takes it with the least work: of a tensor the pointer."""
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def _module(source: Source) -> ModuleType:
    with stage(f"load {source.kernel} {source.digest}"):
        return load_module(source)


def _is_interpreted(kernel: object) -> bool:
    return type(kernel).__name__ == "InterpretedFunction"


_warned_unaligned = False


def _warn_unaligned(*tensors: torch.Tensor) -> None:
    global _warned_unaligned
    if _warned_unaligned:
        return
    for tensor in tensors:
        per_vector = _ALIGNED_BYTES // tensor.element_size()
        strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1][:-1]
        if tensor.data_ptr() % _ALIGNED_BYTES or any(stride % per_vector for stride in strides):
            _warned_unaligned = True
            warn(
                PerformanceWarning,
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not aligned to 16 bytes: "
                "the result is right but slower; align storage offset and strides (said once)",
            )
            return
