"""Batches of the wrapper by request: page tables and lengths stay on the device, and sharing is found there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from treegen.api.compile_batch import compile_batch
from treegen.api.request_names import request_names, table_sizes
from treegen.api.request_room import LEAST_ROWS, Settings, room_for
from treegen.backends.check_inputs import check_output, check_shape, shape_of
from treegen.backends.devices import backend_for, captures
from treegen.backends.find_sharing import SharingReader
from treegen.backends.page_buffers import PageBuffers, tensors_of
from treegen.backends.page_table import PageTable
from treegen.ir.arrays import INT32_MAX, Ints
from treegen.ir.errors import InputError, PerformanceWarning, PlanError, StrategyError, warn
from treegen.ir.live_batch import LiveBatch
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.lateness import RequestGrowth
from treegen.strategies import Strategy

READ_EVERY, READ_EVERY_UNNAMED = 64, 16
"""The most plans between two searches for shared pages: with ids of requests, and without."""


class _Reading(NamedTuple):
    """The seat in each row of the batch, and its epoch, at the start of a SharingReader."""

    seats: Ints
    epochs: Ints


class RequestBatches:
    """Serves the batches of a wrapper by request, for one attention shape.

    `plan` copies the page table to buffers on the device, passes on which request is in each row, launches the step
    kernels and waits for nothing. It starts a SharingReader when requests came or went, and after a number of plans
    (READ_EVERY). When a reader has found something new, the next plan uses it; until then new requests are served
    alone.

    Args:
        settings: The attention shape, the factor of scores and the score options.
        strategy: The strategy, by name or as an object.
        device: The device of the page tables.
        buffers: The caller's buffers, which keep their addresses; None for buffers of its own, which grow.
        max_tokens: The most tokens of a request; None for all that the buffers can hold.
    """

    def __init__(
        self,
        settings: Settings,
        strategy: str | Strategy,
        device: torch.device,
        buffers: PageBuffers | None,
        max_tokens: int | None,
    ) -> None:
        self._settings, self._strategy, self._device, self._max_tokens = settings, strategy, device, max_tokens
        self._fixed, self._buffers = buffers is not None, buffers
        self._backend = backend_for(device, None)
        self._kernel: BatchKernel | None = None
        self._reader: SharingReader | None = None
        self._num_pages = 0
        self._begin(LEAST_ROWS if buffers is None else buffers.rows)

    def _begin(self, seats: int) -> None:
        """Begins without requests and without a plan."""
        self._rows: int | None = None  # of the last plan
        self._reading: _Reading | None = None
        self._live = LiveBatch(page_size=self._settings[0].page_size, max_seats=seats)
        self._names: Sequence[Hashable] = range(0)
        self._seats: dict[Hashable, int] = {}
        self._planned: tuple[Ints, ...] = ()
        self._since = 0  # plans since the last search for shared pages
        self._wanted = True  # whether a search is due
        self._too_long: tuple[int, int] | None = None

    @property
    def settings(self) -> Settings:
        """The settings that the kernel is compiled for."""
        return self._settings

    @property
    def device(self) -> torch.device:
        """The device of the page tables."""
        return self._device

    @property
    def kernel(self) -> BatchKernel | None:
        """The kernel; None until the first call shows the size of the cache."""
        return self._kernel

    def holds(self, rows: int, pages: int) -> bool:
        """Returns whether the buffers have room for this number of requests and of pages."""
        return self._buffers is not None and rows <= self._buffers.rows and pages <= self._buffers.pages

    @property
    def live(self) -> LiveBatch:
        """The running requests, with the sharing that has been found so far."""
        return self._live

    def plan(self, indptr: Any, indices: Any, last_page_len: Any, ids: Sequence[Hashable | None] | None) -> None:
        """Plans for the page table of a step. Arguments are checked before anything changes. Raises InputError."""
        rows, pages = table_sizes(indptr, indices, last_page_len)
        names, table = request_names(ids, rows, self._names), tensors_of(indptr, indices, last_page_len)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            reason = "must not be captured"
            raise InputError("plan", "a call while a graph is captured", reason, "capture run alone")
        buffers = self._room(rows, pages)
        try:
            buffers.take(*table, self._settings[0].page_size, self._backend)
            changed = self._enter(names)
            if self._kernel is not None:
                self._since += 1
                if self._since >= (READ_EVERY_UNNAMED if isinstance(names, range) else READ_EVERY):
                    self._wanted = True
                self._follow(self._kernel, self._reader, changed, rows)
                self._kernel.step()
            self._rows = rows
        except BaseException:  # stopped in the middle: nobody knows which request is where
            self._begin(len(self._live.row))
            raise
        if self._too_long is not None:
            (row, tokens), self._too_long = self._too_long, None
            reason = f"is longer than max_tokens = {self._most_tokens}: its results were 0"
            raise InputError("kv_indptr", f"row {row} with {tokens} tokens", reason, "give a larger max_tokens")

    def run(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        out: torch.Tensor | None,
        *,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Computes attention of the planned batch, with a base-2 lse. The first call makes the kernel."""
        shape = self._settings[0]
        if self._rows is None:
            raise InputError("run", "no plan", "the last plan was stopped in the middle", "call plan() again")
        if not isinstance(q, torch.Tensor) or q.dim() != 3 or len(q) != self._rows:
            given = f"shape {tuple(q.shape)}" if isinstance(q, torch.Tensor) else type(q).__name__
            reason = f"does not fit a plan of {self._rows} requests"
            raise InputError("q", given, reason, "give [requests, num_qo_heads, head_dim]")
        if not self._rows:
            check_shape(
                shape, replace(shape_of(q, k_pages, v_pages, shape.kv_layout), partial_dtype=shape.partial_dtype)
            )
            if out is not None:
                check_output(out, q, shape.head_dim_v)
            out = q.new_empty(0, shape.num_qo_heads, shape.head_dim_v) if out is None else out
            return (out, q.new_empty(0, shape.num_qo_heads, dtype=torch.float32)) if return_lse else out
        kernel = self._kernel
        if kernel is not None and self._fixed and len(k_pages) > self._num_pages:
            reason = f"is more than the {self._num_pages} of the first run, which graphs may have captured"
            raise InputError("paged_kv_cache", f"{len(k_pages)} pages", reason, "run with the whole cache first")
        if kernel is None or (len(k_pages) != self._num_pages and not self._fixed):
            if captures(q):
                reason = "is the first call, which makes the kernel"
                raise InputError("run", "a call while a graph is captured", reason, "call run once before capturing")
            kernel = self._made(len(k_pages), self._rows)
        return kernel(q, k_pages, v_pages, out=out, return_lse=return_lse, lse_base="log2")

    def _room(self, rows: int, pages: int) -> PageBuffers:
        """Returns buffers with room for a page table, new and larger ones if need be.

        Raises InputError where the caller's buffers are too small.
        """
        buffers = self._buffers
        if buffers is not None and self.holds(rows, pages):
            return buffers
        if self._fixed:
            found = f"{rows} requests, {pages} pages"
            raise InputError("kv_indices", found, "exceed the buffers", "allocate larger buffers")
        if buffers is not None:
            rows, pages = max(rows, buffers.rows), max(pages, buffers.pages)
        self._kernel = self._reader = None
        self._buffers = PageBuffers.of(*room_for(rows, pages), self._device)
        return self._buffers

    @property
    def _most_tokens(self) -> int:
        assert self._buffers is not None
        held = min(max(self._buffers.pages * self._settings[0].page_size, 1), INT32_MAX // 2)
        return held if self._max_tokens is None else min(held, self._max_tokens)

    def _made(self, num_pages: int, rows: int) -> BatchKernel:
        """Makes the kernel for a cache of `num_pages` pages, and steps it for the latest plan."""
        assert self._buffers is not None
        shape, sm_scale, scores = self._settings
        table = PageTable(self._buffers.indices, self._buffers.seq_lens, num_pages, None, self._buffers.indptr)
        kernel = compile_batch(
            shape,
            table,
            max_tokens=self._most_tokens,
            strategy=self._strategy,
            sm_scale=sm_scale,
            logits_soft_cap=scores.logits_soft_cap,
            window_left=scores.window_left,
        )
        reader = SharingReader(table, shape.page_size, self._most_tokens)
        self._reading, self._planned, self._wanted = None, (), True
        try:
            self._follow(kernel, reader, None if self._live.shared_tokens.any() else True, rows)
            kernel.step()
        except BaseException:  # sharing may be known by half
            self._live.found((), (), (), (), ())
            self._reading, self._planned, self._wanted = None, (), True
            raise
        self._kernel, self._reader, self._num_pages = kernel, reader, num_pages
        return kernel

    def _enter(self, names: Sequence[Hashable]) -> bool | None:
        """Takes the request in each row.

        Returns whether requests came, went or moved; None where the owner of tokens that others share has gone.
        """
        if names == self._names:
            return False
        live, seats = self._live, self._seats
        owners = set(live.shared_with.tolist())
        owner_gone = False
        for name in seats.keys() - set(names):
            seat = seats.pop(name)
            owner_gone |= seat in owners
            live.finish(seat)
            self._wanted = True
        rows = {seats[name]: row for row, name in enumerate(names) if name in seats}
        if rows:
            live.reorder(rows)
        for row, name in enumerate(names):
            if name not in seats:
                seats[name] = live.add(0, row=row)
                self._wanted = True
        self._names = names
        return None if owner_gone else True

    def _follow(self, kernel: BatchKernel, reader: SharingReader | None, changed: bool | None, rows: int) -> None:
        """Takes over sharing that has been found, starts a search where one is due, and plans for new findings."""
        assert reader is not None
        news = self._found(reader) or changed is None
        if self._wanted and self._reading is None:
            seats = np.empty(rows, np.int32)
            running = self._live.seats
            seats[self._live.row[running]] = running
            reader.start(rows)
            self._reading, self._wanted, self._since = _Reading(seats, self._live.epoch[seats]), False, 0
            news = self._found(reader) or news
        if news:
            try:
                kernel.update(self._live)
            except (PlanError, StrategyError) as cause:
                warn(PerformanceWarning, f"the previous plan stays in use: {cause}")
            else:
                self._planned = self._known()
        elif changed:
            kernel.seat(self._live)

    def _found(self, reader: SharingReader) -> bool:
        """Takes over the findings of a reader that is ready; returns whether they call for another plan."""
        if self._reading is None or not reader.ready():
            return False
        (seats, epochs), self._reading = self._reading, None
        found = reader.result()
        possible = (found.lengths >= 0) & (found.lengths <= self._most_tokens)
        if not possible.all() and found.lengths.max() > self._most_tokens:
            self._too_long = int(found.lengths.argmax()), int(found.lengths.max())
        lengths = np.where(possible, found.lengths, 0)
        self._live.found(seats, epochs, lengths, found.shared_with, found.shared_tokens)
        known = self._known()
        if not self._planned or not all(map(np.array_equal, known[:-1], self._planned[:-1])):
            return True
        _, _, shared, tokens = self._planned
        return RequestGrowth.of(abs(known[-1] - tokens), tokens, shared).outgrows(len(self._live))

    def _known(self) -> tuple[Ints, ...]:
        """Returns what plans depend on: epochs of running requests, sharing, and lengths."""
        live = self._live
        epoch = np.where(live.row >= 0, live.epoch, -1)
        return epoch, live.shared_with.copy(), live.shared_tokens.copy(), live.tokens.copy()
