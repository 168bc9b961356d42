"""The triton backend: executes a schedule by launching its kernels on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple

import torch

from treegen.backends.alignment import warn_unaligned
from treegen.backends.bound_call import BoundCall, BoundLaunch, Call, unbound
from treegen.backends.check_inputs import TORCH_DTYPES
from treegen.backends.devices import kernel_capability, on_device
from treegen.backends.kept_tensors import for_kept_tensors
from treegen.backends.kernel_launch import KernelLaunch
from treegen.backends.kv_scales import Scales, placed
from treegen.backends.kv_views import in_words
from treegen.backends.launch_tables import LaunchTables, fill
from treegen.backends.scratch import Scratch, scratch_of
from treegen.backends.unfused import unfused_parts
from treegen.codegen.compile_counter import warn_of_compiles
from treegen.codegen.emit import Source, emit_merge, emit_partial
from treegen.codegen.kernel_signature import (
    Tensors,
    by_slot,
    call_values,
    captured_values,
    shared_kv,
    switch_values,
)
from treegen.codegen.launch_options import launch_options
from treegen.codegen.load import load_module
from treegen.codegen.merge_forms import merge_key_in_turns, merge_key_of
from treegen.codegen.module_text import compile_templates
from treegen.codegen.partial_keys import KernelOptions, emulates_e4m3, kernel_key
from treegen.codegen.register_layout import check_pairs
from treegen.ir.arena import ArenaSizes
from treegen.ir.keys import KernelKey
from treegen.ir.schedule import Schedule
from treegen.ir.shape import FP8, Shape
from treegen.schedule.passes.fuse_merge import parts_of
from treegen.scoring.options import Scoring
from treegen.target.tile_config import lanes_of
from treegen.timed import phase

_LAUNCHING = Lock()
"""Held while Triton compiles or interprets, because neither is safe in several threads. Bound calls need no lock."""


def _begin() -> None:
    """Does once per process the work that the first call would otherwise wait for.

    Compiles the templates, imports Gluon, and lets Triton hash its own sources.
    """
    compile_templates()
    if torch.cuda.is_available():
        with suppress(ImportError):  # a Triton without these does not wait for them
            import_module("triton.experimental.gluon")
            from triton.runtime.cache import triton_key

            triton_key()


_begin()


class ProgramRoom(NamedTuple):
    """The room of a program that serves more schedules than its first one, or more rows.

    capacity: the room of its tables and grids; None for exactly the first schedule. most_rows: the most rows of q. A
    program with this limit keeps one workspace for all calls, so that addresses of its memory never change.
    """

    capacity: ArenaSizes | None = None
    most_rows: int | None = None


class TritonProgram:
    """A schedule prepared for execution on one device.

    Grids follow from the capacity. Surplus thread blocks exit at once, or all of them take turns (Turns). Where the
    device can, a merge kernel starts while the launch before it is still running. Calls on several streams may overlap,
    because each allocates its scratch memory, unless the program keeps a workspace for all of them.

    Args:
        schedule: The schedule, as it is launched.
        shape: The attention shape.
        device: The device of the tensors.
        room: The room for other schedules; by default for exactly this one.
        scales: The scales of keys and values.
        scoring: The score options.
        tables: Tables on the device that others fill; by default the program makes them of the schedule.
    """

    @for_kept_tensors()
    def __init__(
        self,
        schedule: Schedule,
        shape: Shape,
        device: torch.device,
        room: ProgramRoom | None = None,
        scales: Scales | None = None,
        scoring: Scoring | None = None,
        tables: LaunchTables | None = None,
    ) -> None:
        capacity, most_rows = room or ProgramRoom()
        self._schedule = schedule
        self._shape = shape
        self._partial_dtype = TORCH_DTYPES[shape.partial_dtype]
        self.capability = kernel_capability(device)
        self._options = kernel_options(shape, self.capability, scales, scoring)
        self._merge_keys = [
            merge_key_of(schedule, shape, s, capacity, sinks=self._options.sinks) for s in range(schedule.num_rounds)
        ]
        self._capacity = capacity or schedule.size
        self._workspace: torch.Tensor | None = None
        if most_rows is not None:
            size = self.scratch(most_rows).size
            self._workspace = torch.empty(size, dtype=torch.uint8, device=device)
        if tables is None:
            arena = schedule.pack(capacity)
            tables = LaunchTables.of(arena, torch.empty(len(arena.array), dtype=torch.int32, device=device))
            fill(tables.table, arena.array)
        self.tables, self._options = tables, self._options._replace(request_page=tables.page_size)
        if tables.turns is not None:
            self._options = self._options._replace(in_turns=tables.turns.items)
            self._merge_keys = [merge_key_in_turns(key, fixed=schedule.fixed) for key in self._merge_keys]
        of_heads = placed(scales, device, shape.num_kv_heads)
        self._unfused = unfused_parts(schedule, shape, device, of_heads, scoring)
        # Further arguments of all launches, by the names of parameters.
        self._values: dict[str, Any] = {} if tables.turns is None else tables.turns._asdict()
        if of_heads is not None:
            self._values |= {"k_scales": of_heads.k, "v_scales": of_heads.v}
        if scoring is not None:
            self._values |= {"sinks": scoring.sinks, **captured_values(scoring.readable)}

    def load(self, schedule: Schedule) -> None:
        """Takes another schedule of the same kernel configs and rounds.

        Later calls on the current stream execute it, and so do replays of graphs that captured earlier calls. Raises
        PlanError for a schedule that exceeds the capacity.
        """
        fill(self.tables.table, schedule.pack(self._capacity).array)
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
        for part in self._unfused:
            part(q, k_cache, v_cache, out, lse, sm_scale, lse_scale)
        with _LAUNCHING, on_device(q.device):
            for launch in self.launches(q, k_cache, v_cache, out, lse, sm_scale, lse_scale):
                launch.run()

    def bind(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        sm_scale: float,
        lse_scale: float,
    ) -> Call:
        """Binds a call to tensors of the same shapes, strides, types, device and alignment as these.

        Compiles and loads kernels, but launches nothing. Arguments: see `__call__`.
        """
        if self._unfused:
            return unbound(self, sm_scale, lse_scale)
        warn_unaligned(q, k_cache, v_cache, out)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        bound = []
        with _LAUNCHING, on_device(q.device):
            for launch in self.launches(q, k_cache, v_cache, out, lse, sm_scale, lse_scale):
                if _is_interpreted(launch.kernel):
                    return unbound(self, sm_scale, lse_scale)
                compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
                check_pairs(compiled)
                bound.append(BoundLaunch(compiled[launch.grid[0], 1, 1], launch.taken, launch.settled))
        warn_of_compiles()
        from triton.runtime import driver

        stream_of = driver.active.get_current_stream
        return BoundCall(tuple(bound), self, q.device, stream_of, self.scratch(len(q)), self._workspace)

    @property
    def schedule(self) -> Schedule:
        """The schedule that calls execute."""
        return self._schedule

    @property
    def workspace(self) -> torch.Tensor | None:
        """The scratch memory of all calls; None where each call allocates its own."""
        return self._workspace

    def scratch(self, rows: int) -> Scratch:
        """Lays out the scratch memory of a call with `rows` rows."""
        return scratch_of(self._schedule, self._capacity, rows, self._shape)

    def _partials(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns memory for part_out, part_lse and flags: that of the workspace, or new memory without one."""
        out_at, flags_at, lse_at, _ = self.scratch(0)
        memory = self._workspace
        if memory is None:
            memory = torch.empty(lse_at, dtype=torch.uint8, device=device)
        part_out, flags = memory[out_at:flags_at].view(self._partial_dtype), memory[flags_at:lse_at].view(torch.int64)
        return part_out, memory[:out_at].view(torch.float32), flags

    def launches(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        sm_scale: float,
        lse_scale: float,
    ) -> Iterator[KernelLaunch]:
        """Yields the launches of a call, in order. Arguments: see `__call__`."""
        tensors = Tensors(q, k_cache, v_cache, out, lse, *self._partials(q.device))
        shape, caches = self._shape, (k_cache, v_cache)
        page_size = 1 if by_slot(shape, tensors) else shape.page_size
        words = in_words(*caches) if shape.kv_dtype in FP8 else None
        options = self._options._replace(shared_kv=shared_kv(shape, tensors), packed_fp8=words is not None)
        values = {**self._values, **call_values(shape, tensors, sm_scale, lse_scale)}
        values["parts"] = parts_of(self._schedule) if self._schedule.has_fused_merge else 0
        for round_number, (configs, _) in enumerate(self._schedule.rounds):
            for c in configs:
                config, items = self._schedule.configs[c], self._capacity.items[c]
                if items == 0 or not config.fused:
                    continue
                key = kernel_key(config, shape, page_size, options)
                values.update(self.tables.items[c]._asdict())
                blocks = self._capacity.workers if config.work_list else items * lanes_of(config, shape)
                in_other_form = _caches_for(key, caches, words)
                if in_other_form is None:
                    yield self._launch(emit_partial(key), blocks, values)
                else:
                    read = tensors._replace(k=in_other_form[0], v=in_other_form[1])
                    of_call = call_values(shape, read, sm_scale, lse_scale)
                    yield self._launch(emit_partial(key), blocks, values | of_call)
            merges = self._capacity.merges[round_number]
            if merges:
                merging = self._merge_keys[round_number]
                values.update(self.tables.merges[round_number]._asdict())
                per_row = -(-shape.num_qo_heads // merging.heads)
                if self.tables.turns is None:
                    per_row *= merging.slices
                else:
                    merges = min(merges, max(1, self.tables.turns.merge_blocks // per_row))
                yield self._launch(emit_merge(merging), merges * per_row, values)

    def _launch(self, source: Source, blocks: int, values: dict[str, Any]) -> KernelLaunch:
        """Makes the launch of a module's kernel on `blocks` thread blocks. values: arguments by name; gets switches."""
        kernel = getattr(module_of(source), source.kernel)
        values.update(switch_values(interpreted=_is_interpreted(kernel), capability=self.capability))
        signature, options = source.signature, launch_options(source.key, self.capability)
        return KernelLaunch(kernel, (blocks,), signature.arguments(values), options, signature.tensors)


def _caches_for(
    key: KernelKey, caches: tuple[torch.Tensor, torch.Tensor], words: tuple[torch.Tensor, ...] | None
) -> tuple[torch.Tensor, ...] | None:
    """Returns the caches in the form that a kernel reads; None where it reads them as they are given."""
    if key.packed_fp8:
        return words
    return tuple(cache.view(torch.uint8) for cache in caches) if key.emulate_e4m3 else None


def kernel_options(shape: Shape, capability: int, scales: Scales | None, scoring: Scoring | None) -> KernelOptions:
    """Returns the kernel options for a compute capability (times ten), without those that a call's tensors decide."""
    return KernelOptions(
        scoring=None if scoring is None else scoring.code,
        scaled=scales is not None,
        emulate_e4m3=emulates_e4m3(shape, capability),
        sinks=scoring is not None and scoring.sinks is not None,
        guarded=scoring is not None and scoring.guarded,
    )


def module_of(source: Source) -> ModuleType:
    """Loads the module of a source."""
    with phase(f"load {source.kernel} {source.digest}"):
        return load_module(source)


def _is_interpreted(kernel: object) -> bool:
    return type(kernel).__name__ == "InterpretedFunction"
