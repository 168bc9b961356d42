"""Step: the tensors of one forward pass of a model over the running branches, and attention over their KV.

    begin    reserves pages; ids, positions and slots of new tokens, the page table and lengths go to the device
    attend   once per layer: writes K and V of the new tokens, then attends
    end      notes that the KV is stored; plans for later steps where that pays

Query rows are ordered by the branches' rows in the batch, and within a branch by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from treegen.api.compile_batch import compile_batch
from treegen.backends.page_table import PageTable
from treegen.engine.accounting import Accounting
from treegen.engine.sequences import Branch, SequenceTree
from treegen.ir.arrays import positive_int
from treegen.ir.errors import BranchError, InputError
from treegen.runtime.batch_kernel import BatchKernel
from treegen.strategies import Strategy


class AttentionKind(NamedTuple):
    """What layers that use one kernel have in common.

    sm_scale, window_left, logits_soft_cap: as in `treegen.compile`. sinks_of: the layer, where layers have sinks,
    because each has its own; None for others.
    """

    sm_scale: float
    window_left: int = -1
    logits_soft_cap: float | None = None
    sinks_of: int | None = None


class Step:
    """Tensors of fixed addresses for one step after another, and a kernel for each kind of attention layer.

    Attributes:
        ids: int64 `[max_rows]`; the new tokens.
        positions: int64 `[max_rows]`; their positions.
        slots: int64 `[max_rows]`; where their KV goes.
        rows: New tokens of the step: the rows of these arrays that count.

    Args:
        sequences: The branches.
        max_tokens: The most tokens of a branch.
        max_rows: The most new tokens of all branches in a step.
        strategy: Of the kernels, as in `treegen.compile_batch`.
        accounting: Counts the time of attention.
    """

    def __init__(
        self,
        sequences: SequenceTree,
        max_tokens: int,
        max_rows: int,
        strategy: str | Strategy = "auto",
        accounting: Accounting | None = None,
    ) -> None:
        pool, batch = sequences.pool, sequences.max_branches
        self.sequences, self.pool, self._strategy = sequences, pool, strategy
        self._accounting = accounting or Accounting()
        self.max_tokens, self.max_rows = (
            positive_int(name, number, BranchError)
            for name, number in (("max_tokens", max_tokens), ("max_rows", max_rows))
        )
        self.rows = 0
        self._tokens = torch.zeros(3, max_rows, dtype=torch.int64, device=pool.device)
        self.ids, self.positions, self.slots = self._tokens
        self._table = np.zeros((batch, pool.pages_for(max_tokens)), np.int32)
        self._listed = [(-1, 0, 0)] * batch  # by row: the branch, the epoch of its seat and the number of its pages
        self._changed: list[int] = []
        table = torch.zeros(self._table.shape, dtype=torch.int32, device=pool.device)
        self._lengths = torch.zeros(2 * batch + 1, dtype=torch.int32, device=pool.device)  # seq_lens, qo_indptr
        self._pages = PageTable(table, self._lengths[:batch], pool.num_pages, qo_indptr=self._lengths[batch:])
        self._kernels: dict[AttentionKind, BatchKernel] = {}
        self._counts: dict[int, int] = {}
        self._attended: set[int] = set()  # layers of the step

    @property
    def kernels(self) -> Mapping[AttentionKind, BatchKernel]:
        """The kernels, by the kind of layer."""
        return self._kernels

    def begin(self, counts: Mapping[int, int]) -> dict[int, int]:
        """Prepares a step in which these branches store this many of their pending tokens.

        Args:
            counts: The new tokens of each branch of the step, at least 1; other branches rest.

        Returns:
            The row of the last new token of each branch, which gives its next token.

        Raises:
            BranchError: A branch has fewer pending tokens, or gets too long, or the step has too many rows.
            PoolError: There are too few free pages. Nothing has changed then.
        """
        self._check(counts)
        sequences = self.sequences
        sequences.reserve(counts)
        branches = sorted((sequences[number] for number in counts), key=lambda each: sequences.live.row[each.seat])
        seats = [branch.seat for branch in branches]
        new = [counts[branch.number] for branch in branches]
        lengths = [branch.stored + count for branch, count in zip(branches, new, strict=True)]
        sequences.live.set_tokens(seats, lengths)
        resting = [branch.seat for number, branch in sequences.branches.items() if number not in counts]
        sequences.live.set_rows([*seats, *resting], [*new, *([1] * len(resting))])
        rows = sequences.live.row.take(seats)
        of_row = np.zeros(len(self._table), np.int32)
        of_row[rows] = new
        seq_lens = np.zeros(len(self._table), np.int32)
        seq_lens[rows] = lengths
        tokens = np.zeros((3, sum(new)), np.int64)  # ids, positions and slots
        begin = 0
        for row, branch, count in zip(rows.tolist(), branches, new, strict=True):
            self._set_pages(row, branch)
            place, end = np.arange(branch.stored, branch.stored + count), begin + count
            page = self._table[row].take(place // self.pool.page_size).astype(np.int64)
            tokens[0, begin:end] = branch.tokens[branch.stored : branch.stored + count]
            tokens[1, begin:end], tokens[2, begin:end] = place, page * self.pool.page_size + place % self.pool.page_size
            begin = end
        self.rows = begin
        self._tokens[:, :begin].copy_(torch.from_numpy(tokens))
        self._lengths.copy_(torch.from_numpy(np.concatenate([seq_lens, [0], np.cumsum(of_row)]).astype(np.int32)))
        if self._changed:
            rows_of = torch.tensor(self._changed, device=self.pool.device)
            self._pages.table[rows_of] = torch.from_numpy(self._table[self._changed]).to(self.pool.device)
            self._changed = []
        self._counts, self._attended = dict(counts), set()
        for kernel in self._kernels.values():
            kernel.prepare(sequences.live)
            kernel.step()
        ends = np.cumsum(new) - 1
        return dict(zip((branch.number for branch in branches), ends.tolist(), strict=True))

    def attend(
        self,
        layer: int,
        kind: AttentionKind,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes K and V of the new tokens of a layer, and computes attention of their queries.

        Args:
            layer: The layer.
            kind: The kind of attention layer; its first use makes a kernel.
            q: `[rows, num_qo_heads, head_dim]`.
            keys: `[rows, num_kv_heads, head_dim]`.
            values: `[rows, num_kv_heads, head_dim_v]`.
            sinks: `[num_qo_heads]`, as in `treegen.compile`, where the kind has them.

        Returns:
            `[rows, num_qo_heads, head_dim_v]`.

        Raises:
            InputError: A tensor has other heads or head dims than the pool's shape.
        """
        self._check_heads(q, keys, values)
        with self._accounting.part("attention"):
            self.pool.write(layer, self.slots[: self.rows], keys, values)
            self._attended.add(layer)
            kernel = self._kernels.get(kind)
            if kernel is None:
                kernel = self._kernels[kind] = self._kernel_for(kind, sinks)
            resting = max(0, kernel.rows - self.rows)  # the host counts a row of each; on the device they have none
            padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, resting)) if resting else q
            out = kernel(padded, *self.pool.caches(layer))
            assert isinstance(out, torch.Tensor)
            return out[: self.rows]

    def end(self) -> None:
        """Ends the step, after its last layer: the KV of the new tokens is stored.

        Raises InputError where not every layer has attended, so that its KV is missing.
        """
        if len(self._attended) < self.pool.layers:
            found, fix = f"{len(self._attended)} of {self.pool.layers} layers", "call attend in each attention layer"
            raise InputError("model", found, "called attend in the step", fix)
        self.sequences.store(self._counts)
        self._counts = {}
        for kernel in self._kernels.values():
            kernel.refresh(self.sequences.live)

    def _set_pages(self, row: int, branch: Branch) -> None:
        """Lists a branch's pages in its row of the table, if that does not have them.

        Within an epoch of the seat pages are only added.
        """
        listed = branch.number, int(self.sequences.live.epoch[branch.seat]), len(branch.pages)
        if self._listed[row] != listed:
            self._table[row, : len(branch.pages)] = branch.pages
            self._listed[row] = listed
            self._changed.append(row)

    def _kernel_for(self, kind: AttentionKind, sinks: torch.Tensor | None) -> BatchKernel:
        most_rows = self.max_rows + self.sequences.max_branches
        kernel = compile_batch(
            self.pool.shape, self._pages, max_tokens=self.max_tokens, max_rows=most_rows, strategy=self._strategy,
            sm_scale=kind.sm_scale, window_left=kind.window_left, logits_soft_cap=kind.logits_soft_cap, sinks=sinks,
        )  # fmt: skip
        kernel.update(self.sequences.live)
        kernel.step()
        return kernel

    def _check_heads(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        shape = self.pool.shape
        heads = shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads
        dims = shape.head_dim, shape.head_dim, shape.head_dim_v
        for name, tensor, wanted in zip(
            ("q", "keys", "values"), (q, keys, values), zip(heads, dims, strict=True), strict=True
        ):
            if tuple(tensor.shape[1:]) != wanted:
                reason = f"has not the pool's heads and head dims {wanted}"
                raise InputError(name, f"shape {tuple(tensor.shape)}", reason, "make the pool for the model's shape")

    def _check(self, counts: Mapping[int, int]) -> None:
        for number, count in counts.items():
            branch = self.sequences[number]
            if not 1 <= count <= branch.pending:
                reason = f"has {branch.pending} tokens to store, not {count}"
                raise BranchError("counts", number, reason, "extend the branch first")
            if branch.stored + count > self.max_tokens:
                reason = f"would have {branch.stored + count} tokens, and max_tokens is {self.max_tokens}"
                raise BranchError("branch", number, reason, "end it earlier, or raise max_tokens")
        if not counts or sum(counts.values()) > self.max_rows:
            reason = f"is not within 1..{self.max_rows}"
            raise BranchError("counts", f"{sum(counts.values())} rows", reason, "divide the step, or raise max_rows")
