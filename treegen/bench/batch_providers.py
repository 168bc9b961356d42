"""Providers of attention for running batches: their protocol, and treegen's providers.

A provider is prepared for a case. Each step then calls `plan`, `begin` once, `attend` for each layer, and `behind`
after the launch. `begin` and `attend` are captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from treegen.api.compile import compile as compile_tree
from treegen.api.compile_batch import compile_batch
from treegen.backends.page_table import PageTable
from treegen.bench.batch_case import BatchCase
from treegen.bench.batch_results import OWN
from treegen.bench.providers import UnavailableError
from treegen.engine.draft_trees import DraftMask
from treegen.ir.live_batch import LiveBatch
from treegen.ir.tree import Tree
from treegen.workloads.batch_pages import BatchPages, add_arrivals


class BatchServer(Protocol):
    """A provider that is ready for a case."""

    @property
    def order(self) -> npt.NDArray[np.integer[Any]] | None:
        """The batch row at each query row of the latest plan; None where query rows are in order of batch rows."""

    def plan(self, pages: BatchPages) -> None:
        """Plans for a step. `pages.change` holds the changes since the last call, unless it got other pages."""

    def begin(self) -> None:
        """Does the device work of a step that comes before its first layer."""

    def attend(self, layer: int) -> torch.Tensor:
        """Computes attention of a layer on the current stream: `[query rows, num_qo_heads, head_dim_v]`."""

    def behind(self) -> None:
        """Does host work for later steps while the device works on this one."""


class PlansAhead:
    """A server whose `plan` has done all work of a step but attention."""

    def begin(self) -> None:
        """Does nothing."""

    def behind(self) -> None:
        """Does nothing."""


class BatchProvider(Protocol):
    """Something that computes attention for running batches."""

    @property
    def name(self) -> str:
        """The provider's name in results."""

    @property
    def replans(self) -> bool:
        """Whether a graph captured for one plan serves later plans. If not, only a batch's first step is timed."""

    def prepare(self, case: BatchCase) -> BatchServer:
        """Allocates what a case needs. Raises UnavailableError where the provider cannot serve it."""


@dataclass(frozen=True, slots=True)
class TreegenBatches:
    """treegen's kernel for running batches, which reads the page table and lengths on the device.

    Args:
        batch_invariant: Whether a row's results depend on its own request alone.
    """

    batch_invariant: bool = False
    replans: bool = True

    @property
    def name(self) -> str:
        """`treegen`, or `batch-invariant` for that mode."""
        return "batch-invariant" if self.batch_invariant else OWN

    def prepare(self, case: BatchCase) -> BatchServer:
        """Makes the kernel for the case's page table."""
        if self.batch_invariant and case.many_queries:
            raise UnavailableError("batch-invariant mode takes one query row per request")
        if case.draft and case.window_left >= 0:
            raise UnavailableError("windows of drafts go by positions, which a batch's draft mask does not have")
        return LiveServer(case, self.batch_invariant)


class LiveServer:
    """A BatchKernel whose LiveBatch follows the pages."""

    order = None

    def __init__(self, case: BatchCase, batch_invariant: bool = False) -> None:
        self._case, self._out = case, case.new_out()
        rows, width = case.page_table.shape
        self.live = LiveBatch(page_size=case.shape.page_size, max_seats=rows)
        self._seats: dict[int, int] = {}
        self._pages: BatchPages | None = None
        pages = PageTable(case.page_table, case.seq_lens, len(case.cache(0)[0]), qo_indptr=case.qo_indptr)
        most_rows = case.query_rows if case.many_queries else None
        self._mask = DraftMask(case.query_rows, len(case.draft), case.q.device) if case.draft else None
        self.kernel = compile_batch(
            case.shape,
            pages,
            max_tokens=width * case.shape.page_size,
            max_rows=most_rows,
            batch_invariant=batch_invariant,
            mask_mod=None if self._mask is None else self._mask.mask_mod,
            window_left=case.window_left,
        )

    def plan(self, pages: BatchPages) -> None:
        if pages is not self._pages:
            self.live = LiveBatch(page_size=self.live.page_size, max_seats=len(self.live.row))
            self._seats, self._pages = {}, pages
        live, seats, change = self.live, self._seats, pages.change
        for row in change.finished:
            if row in seats:
                live.finish(seats.pop(row))
        if change.all_grown is not None and len(change.grown) == len(seats):
            live.grow(change.all_grown)
        elif change.grown:
            live.grow(list(change.grown.values()), [seats[row] for row in change.grown])
        add_arrivals(live, seats, change.arrived)
        self.kernel.prepare(live)
        if self._mask is not None:
            draft, rows = self._case.draft, pages.rows.tolist()
            first = self._case.first_queries(pages)
            self._mask.fill([(int(first[row]), int(pages.lengths[row]) - len(draft), draft) for row in rows])

    def behind(self) -> None:
        self.kernel.refresh(self.live)

    def begin(self) -> None:
        self.kernel.step()

    def attend(self, layer: int) -> torch.Tensor:
        self.kernel(self._case.q, *self._case.cache(layer), out=self._out)
        return self._out


@dataclass(frozen=True, slots=True)
class TreegenExact:
    """treegen's kernel for one tree: a plan for a single step, by the strategy of this name."""

    strategy: str = "auto"
    replans: bool = False

    @property
    def name(self) -> str:
        """`exact`, followed by the strategy's name unless that is `auto`."""
        return "exact" if self.strategy == "auto" else f"exact-{self.strategy}"

    def prepare(self, case: BatchCase) -> BatchServer:
        """See BatchProvider."""
        return _ExactServer(case, self.strategy)


class _ExactServer(PlansAhead):
    """Compiles a new kernel for the tree of each step."""

    order = None

    def __init__(self, case: BatchCase, strategy: str) -> None:
        self._case, self._strategy, self._out = case, strategy, case.new_out()
        self._kernel: Any = None
        self._rows = 0

    def plan(self, pages: BatchPages) -> None:
        rows = pages.rows
        assert np.array_equal(rows, np.arange(len(rows))), "rows of a batch's first step have no gaps"
        tree = Tree.from_block_table(pages.table[rows], pages.lengths[rows], pages.page_size)
        if self._case.draft:
            tree = tree.with_drafts(self._case.draft, stored=True)
        elif self._case.many_queries:
            tree = tree.with_causal_queries(pages.queries[rows])
        self._rows = tree.num_rows
        self._kernel = compile_tree(
            tree, strategy=self._strategy, shape=self._case.shape, window_left=self._case.window_left
        )

    def attend(self, layer: int) -> torch.Tensor:
        self._kernel(self._case.q[: self._rows], *self._case.cache(layer), out=self._out[: self._rows])
        return self._out
