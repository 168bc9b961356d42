"""Batches of the wrapper by request: page tables and lengths stay on the device, where sharing is found, too."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from treegen.api.compile_batch import compile_batch
from treegen.backends.devices import backend_for, captures, resolve_target
from treegen.backends.find_sharing import SharingReader
from treegen.backends.page_buffers import PageBuffers
from treegen.backends.page_table import PAGE_SIZES, PageTable
from treegen.ir.arrays import INT32_MAX, Ints
from treegen.ir.errors import InputError, PerformanceWarning, PlanError, StrategyError, warn
from treegen.ir.live_batch import LiveBatch
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.runtime.batch_kernel import GROWN, BatchKernel
from treegen.runtime.batch_room import is_served
from treegen.scoring.options import ScoreOptions
from treegen.strategies import Strategy, strategy_from
from treegen.target.problem import Problem

READ_EVERY, READ_EVERY_UNNAMED = 64, 16
"""Plans from one look at what requests share to the next, at most: with ids of requests, and without."""
_MOST_TABLES = 1 << 30
"""Bytes of tables, about one for each row and token of the longest request, that nobody is asked about."""
_LEAST_ROWS, _LEAST_PAGES = 8, 1024
"""Requests, and pages of all of them, that own buffers have room for from the beginning."""
_DTYPES = (torch.int32, torch.int64)

Settings: TypeAlias = "tuple[Shape, float | None, ScoreOptions]"
"""What kernels of the wrapper are made for, beside batches: with the factor of scores, and what is done to them."""


class _Reading(NamedTuple):
    """Who was in each row of the batch when a SharingReader was started: seats and their epochs."""

    seats: Ints
    epochs: Ints


class RequestBatches:
    """The batches of a wrapper, by request, for one attention shape. Addresses of buffers stay as they are.

    `plan` copies page tables on the device, says who is in which row, launches the step kernels and waits for nothing.
    It starts a SharingReader when requests came or went, and after a number of plans (READ_EVERY). When a reader has
    found something new, the next plan uses it; until then new requests are served alone.
    """

    def __init__(
        self,
        settings: Settings,
        strategy: str | Strategy,
        device: torch.device,
        buffers: PageBuffers | None,
        max_tokens: int | None,
    ) -> None:
        """buffers: fixed ones; None for own ones, which grow. max_tokens: of a request; None for what buffers hold."""
        self._settings, self._strategy, self._device, self._max_tokens = settings, strategy, device, max_tokens
        self._fixed, self._buffers = buffers is not None, buffers
        self._backend = backend_for(device, None)
        self._kernel: BatchKernel | None = None
        self._reader: SharingReader | None = None
        self._reading: _Reading | None = None
        self._num_pages = 0
        self._live = LiveBatch(
            page_size=settings[0].page_size, max_seats=_LEAST_ROWS if buffers is None else buffers.rows
        )
        self._names: Sequence[Hashable] = range(0)
        self._seats: dict[Hashable, int] = {}
        self._planned: tuple[Ints, ...] = ()
        self._rows, self._since, self._wanted = 0, 0, True  # plans since sharing was looked at; whether it has to be
        self._too_long: tuple[int, int] | None = None

    @property
    def settings(self) -> Settings:
        """What the kernel is made for."""
        return self._settings

    @property
    def device(self) -> torch.device:
        """Where page tables are."""
        return self._device

    @property
    def kernel(self) -> BatchKernel | None:
        """The kernel, once a call has shown how large the cache is."""
        return self._kernel

    def holds(self, rows: int, pages: int) -> bool:
        """Whether there is room for this number of requests and of pages."""
        return self._buffers is not None and rows <= self._buffers.rows and pages <= self._buffers.pages

    @property
    def live(self) -> LiveBatch:
        """The running requests, and what they share as far as is known."""
        return self._live

    def plan(self, indptr: Any, indices: Any, last_page_len: Any, ids: Sequence[Hashable | None] | None) -> None:
        """Takes the page table of a step, and who is in its rows; checks before anything changes."""
        rows, pages = _count("kv_indptr", indptr) - 1, _count("kv_indices", indices)
        if rows < 0:
            raise InputError("kv_indptr", "no entries", "has no begin", "give one entry more than requests")
        if (last := _count("kv_last_page_len", last_page_len)) != rows:
            reason = f"do not match {rows} requests of kv_indptr"
            raise InputError("kv_last_page_len", f"{last} entries", reason, "give one each")
        names = range(rows) if ids is None else self._names_of(ids, rows)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InputError(
                "plan", "a call while a graph is captured", "is for outside of graphs", "capture run alone"
            )
        buffers = self._room(rows, pages)
        self._rows = rows
        buffers.take(indptr, indices, last_page_len, self._settings[0].page_size, self._backend)
        changed = self._enter(names)
        if self._kernel is None:
            return
        self._since += 1
        if self._since >= (READ_EVERY_UNNAMED if isinstance(names, range) else READ_EVERY):
            self._wanted = True
        self._follow(self._kernel, self._reader, changed)
        self._kernel.step()
        if self._too_long is not None:
            (row, tokens), self._too_long = self._too_long, None
            reason = f"is longer than max_tokens = {self._most_tokens}: results were 0"
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
        """Attention of the planned batch, with a base-2 lse; the first call makes the kernel."""
        shape = self._settings[0]
        if not isinstance(q, torch.Tensor) or q.dim() != 3 or len(q) != self._rows:
            found = f"shape {tuple(q.shape)}" if isinstance(q, torch.Tensor) else type(q).__name__
            reason = f"does not fit a plan of {self._rows} requests"
            raise InputError("q", found, reason, "give [requests, num_qo_heads, head_dim]")
        if not self._rows:
            out = q.new_empty(0, shape.num_qo_heads, shape.head_dim_v) if out is None else out
            return (out, q.new_empty(0, shape.num_qo_heads, dtype=torch.float32)) if return_lse else out
        kernel = self._kernel
        if kernel is None or (len(k_pages) < self._num_pages and not self._fixed):
            if captures(q):
                reason = "is the first one, which makes the kernel"
                raise InputError("run", "a call while a graph is captured", reason, "call run once before capturing")
            kernel = self._made(len(k_pages))
        return kernel(q, k_pages, v_pages, out=out, return_lse=return_lse, lse_base="log2")

    def _room(self, rows: int, pages: int) -> PageBuffers:
        """Buffers with room for a page table: those there are, or own ones at least twice as large. Raises InputError
        for what is beyond fixed ones.
        """
        buffers = self._buffers
        if buffers is not None and self.holds(rows, pages):
            return buffers
        if self._fixed:
            raise InputError("kv_indices", f"{rows} requests, {pages} pages", "exceed the buffers", "make larger ones")
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

    def _made(self, num_pages: int) -> BatchKernel:
        """Makes the kernel for a cache of `num_pages` pages, and steps it for the latest plan."""
        assert self._buffers is not None
        shape, sm_scale, scores = self._settings
        self._num_pages = num_pages
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
        self._follow(kernel, reader, changed=None if self._live.shared_tokens.any() else True)
        kernel.step()
        self._kernel, self._reader = kernel, reader
        return kernel

    def _names_of(self, ids: Sequence[Hashable | None], rows: int) -> Sequence[Hashable]:
        """Distinct names of requests, by row; None, for a row without a request, becomes a name of the row."""
        if getattr(ids, "is_cuda", False):
            raise InputError("request_ids", "a tensor on a GPU", "is not on the host", "give a list")
        given: list[Hashable | None] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if given == self._names:
            return self._names
        if len(given) != rows:
            raise InputError("request_ids", f"{len(given)} ids", f"does not match {rows} requests", "give one each")
        names: list[Hashable] = [(_Unnamed, row) if name is None else name for row, name in enumerate(given)]
        try:
            distinct = len(set(names)) == rows
        except TypeError as cause:
            raise InputError("request_ids", "an id", "cannot be hashed", "give integers or strings") from cause
        if not distinct:
            raise InputError("request_ids", given, "names a request twice", "give each its own row, None to free ones")
        return names

    def _enter(self, names: Sequence[Hashable]) -> bool | None:
        """Says who is in which row; returns whether requests came, went or moved, None where an owner of tokens that
        others share has gone.
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

    def _follow(self, kernel: BatchKernel, reader: SharingReader | None, changed: bool | None) -> None:
        """Takes what has been found, looks for more, and plans where that shows something new."""
        assert reader is not None
        news = self._found(reader) or changed is None
        if self._wanted and self._reading is None:
            seats = np.empty(self._rows, np.int32)
            running = self._live.seats
            seats[self._live.row[running]] = running
            reader.start(self._rows)
            self._reading, self._wanted, self._since = _Reading(seats, self._live.epoch[seats]), False, 0
            news = self._found(reader) or news
        if news:
            try:
                kernel.update(self._live)
            except (PlanError, StrategyError) as cause:
                warn(PerformanceWarning, f"the plan before goes on to be used: {cause}")
                kernel.seat(self._live)
            else:
                self._planned = self._known()
        elif changed:
            kernel.seat(self._live)

    def _found(self, reader: SharingReader) -> bool:
        """Takes what a reader that is ready has found; whether a plan of it would be another one."""
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
        return bool((abs(known[-1] - self._planned[-1]) >= GROWN).any())

    def _known(self) -> tuple[Ints, ...]:
        """What a plan follows from: who runs, who shares how much with whom, and lengths."""
        live = self._live
        epoch = np.where(live.row >= 0, live.epoch, -1)
        return epoch, live.shared_with.copy(), live.shared_tokens.copy(), live.tokens.copy()


def obstacle(
    settings: Settings, strategy: str | Strategy, device: torch.device, rows: int, pages: int, max_tokens: int | None
) -> tuple[str, str] | None:
    """Why batches of such a size cannot be served by request, and what to do about it; None where they can."""
    shape, _, _ = settings
    if shape.page_size not in PAGE_SIZES:
        return f"page_size {shape.page_size} is not a power of two up to 128", "use such pages"
    if device.type == "cuda" and backend_for(device, None) != "triton":
        return f"kernels cannot run on {device}", "give tables on the host"
    tokens = pages * shape.page_size
    if rows * (tokens if max_tokens is None else min(tokens, max_tokens)) > _MOST_TABLES:
        return f"tables for {rows} requests of up to {tokens} tokens exceed 1 GB", "give max_tokens, of one request"
    chosen = strategy_from(strategy)
    if chosen.automatic:
        return None
    if chosen.batch_invariant:
        return f"{chosen} has no plans by request here", "use treegen.compile_batch, or another strategy"
    if not chosen.serves_any_tree or not is_served(_sample_plan(chosen, shape)):
        return f"{chosen} has no plans by request", "use auto, query or cohort"
    return None


def _sample_plan(strategy: Strategy, shape: Shape) -> Any:
    """A plan of groups on two levels."""
    page, many = shape.page_size, 12
    above = [-1, *([0] * (many - 1))]
    shared = [0, *([32 * page, 64 * page] * many)[: many - 1]]
    tree = Tree.from_requests([64 * page + 100] * many, above, shared, page_size=page)
    return strategy.plan(Problem(tree, shape, resolve_target(None)))


def room_for(rows: int, pages: int) -> tuple[int, int]:
    """Rounds requests and pages up to the room that buffers of the wrapper's own have."""
    return 1 << max(rows - 1, _LEAST_ROWS - 1).bit_length(), 1 << max(pages - 1, _LEAST_PAGES - 1).bit_length()


def _count(name: str, part: Any) -> int:
    """The entries of a flat list, array or tensor of integers."""
    if isinstance(part, torch.Tensor):
        if part.dim() != 1 or part.dtype not in _DTYPES:
            found = f"{part.dim()} dimensions of {part.dtype}"
            raise InputError(name, found, "is not a flat tensor of int32", "give FlashInfer's page table")
        return len(part)
    try:
        return len(part)
    except TypeError as cause:
        raise InputError(name, type(part).__name__, "is not an array", "give FlashInfer's page table") from cause


class _Unnamed:
    """Stands for rows without a request, in names of requests."""
