"""Step: the tensors of one forward pass of a model over the running branches, and attention over their KV.

    begin    reserves pages; ids, positions and slots of new tokens, the page table and lengths go to the device
    attend   once per layer: writes K and V of the new tokens, then attends
    end      notes that the KV is stored; plans for later steps where that pays

Query rows are ordered by the branches' rows in the batch, and within a branch by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from treegen.backends.page_table import PageTable
from treegen.engine.accounting import Accounting
from treegen.engine.attention_kernels import AttentionKind, KernelMaker, StepKernel, tree_kernels
from treegen.engine.branch import Branch
from treegen.engine.draft_rows import draw_back
from treegen.engine.draft_trees import DraftMask
from treegen.engine.engine_checks import check_computed, check_counts, check_heads, check_layer
from treegen.engine.page_rows import PageRows
from treegen.engine.row_forks import fork_rows
from treegen.engine.sequences import SequenceTree
from treegen.ir.arrays import Ints, Longs, positive_int
from treegen.ir.errors import BranchError

if TYPE_CHECKING:
    from treegen.engine.forward import Model


class Step:
    """Tensors of fixed addresses for one step after another, and a kernel for each kind of attention layer.

    Copies to these tensors may still be under way when `begin` returns. Each reads memory of its own, which the host
    does not write again; on the stream they come after the step before and before the step itself.

    Attributes:
        ids: int64 `[max_rows]`; the new tokens.
        positions: int64 `[max_rows]`; their positions.
        slots: int64 `[max_rows]`; where their KV goes.
        rows: Rows of these arrays that count in the step.
        pages: The page table and the lengths, for kernels.
        draft_mask: Which drafts rows see; None where drafts are chains.
        host_lengths: The same lengths on the host, and the new tokens of each row of the table, each `[max_branches]`.

    Args:
        sequences: The branches.
        max_tokens: The most tokens of a branch.
        max_rows: The most new tokens of all branches in a step.
        max_new: The most new tokens of a branch in a step; by default only `max_rows` limits them.
        max_tree: The most drafts of a branch, where drafts may be trees; 0 where they are chains.
        make_kernel: Makes the kernels.
        accounting: Counts the time of attention.
    """

    def __init__(
        self,
        sequences: SequenceTree,
        max_tokens: int,
        max_rows: int,
        *,
        max_new: int | None = None,
        max_tree: int = 0,
        make_kernel: KernelMaker | None = None,
        accounting: Accounting | None = None,
    ) -> None:
        pool, batch = sequences.pool, sequences.max_branches
        self.sequences, self.pool, self._make_kernel = sequences, pool, make_kernel or tree_kernels()
        self._accounting = accounting or Accounting()
        self.max_tokens, self.max_rows, self.max_new = (
            positive_int(name, number, BranchError)
            for name, number in (("max_tokens", max_tokens), ("max_rows", max_rows), ("max_new", max_new or max_rows))
        )
        self.rows = 0
        self._tokens = torch.zeros(3, self.max_rows, dtype=torch.int64, device=pool.device)
        self.ids, self.positions, self.slots = self._tokens
        self._page_rows = PageRows(batch, pool.pages_for(max_tokens), pool.device)
        self._lengths = torch.zeros(2 * batch + 1, dtype=torch.int32, device=pool.device)  # seq_lens, qo_indptr
        self.pages = PageTable(
            self._page_rows.table, self._lengths[:batch], pool.num_pages, qo_indptr=self._lengths[batch:]
        )
        self._kernels: dict[AttentionKind, StepKernel | None] = {}
        self.host_lengths = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        self._counts: dict[int, int] = {}
        self._attended: set[int] = set()  # layers of the model's run
        self._read: set[AttentionKind] = set()  # kinds of its layers
        shape = pool.shape
        self._out = pool.keys.new_zeros(self.kernel_rows, shape.num_qo_heads, shape.head_dim_v)
        self.draft_mask = DraftMask(self.kernel_rows, max_tree, pool.device) if max_tree else None

    @property
    def kernels(self) -> Mapping[AttentionKind, StepKernel]:
        """The kernels, by the kind of layer."""
        return {kind: kernel for kind, kernel in self._kernels.items() if kernel is not None}

    @property
    def kernel_rows(self) -> int:
        """The most query rows of a kernel: new tokens, and one for each resting branch, which the host counts."""
        batch = self.sequences.max_branches
        return max(self.max_rows, min(self.max_rows + batch, batch * self.max_new))

    @property
    def host_table(self) -> Ints:
        """int32 `[max_branches, pages]`; the page table on the host, where it was known before the step."""
        return self._page_rows.host

    @property
    def takes_forks(self) -> bool:
        """Whether `begin` takes `parents`: all kernels read the page table on the device alone."""
        return self._all_kernels("device_tables")

    @property
    def takes_lengths(self) -> bool:
        """Whether `begin` takes `behind`: all kernels read the page table and lengths on the device alone."""
        return self._all_kernels("device_tables") and self._all_kernels("device_lengths")

    def begin(
        self,
        counts: Mapping[int, int],
        rows: int | None = None,
        ids: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
        behind: torch.Tensor | None = None,
    ) -> dict[int, int]:
        """Prepares a step in which these branches store this many of their pending tokens.

        Args:
            counts: The new tokens of each branch of the step, at least 1; other branches rest.
            rows: The rows of the step, by default one for each new token. Further rows stand for no token.
            ids: int64 `[new tokens]` on the device; the tokens in place of the branches' own, in the order of the rows.
            parents: int64 `[new tokens]` on the device, where each branch has one new token: the rows that rows of the
                step are forks of, as in `Selection`. `forked` then tells the step what the host has read of them.
            behind: int64 `[branches]` on the device, where all branches have equally many new tokens: by how many
                tokens each one is shorter than the host assumes.

        Returns:
            The row of the last new token of each branch, which gives its next token.

        Raises:
            BranchError: A branch has fewer pending tokens, or gets too long, or the step has too many rows.
            PoolError: There are too few free pages. Nothing has changed then.
        """
        sequences = self.sequences
        chosen = [sequences[number] for number in counts]
        facts = [(each.seat, each.stored, len(each.tokens), counts[each.number]) for each in chosen]
        by_count = np.array(facts, np.int64).reshape(-1, 4).T
        check_counts(counts, by_count, rows, (self.max_tokens, self.max_new, self.max_rows))
        sequences.reserve(counts)
        order = sequences.live.row.take(by_count[0]).argsort()
        branches = [chosen[place] for place in order.tolist()]
        seats, stored, _, new = by_count.take(order, 1)
        table_rows, lengths, ends = sequences.live.row.take(seats).astype(np.int64), stored + new, new.cumsum()
        self._tell_lengths(seats, lengths, new)
        self._page_rows.write(table_rows, branches)
        self.rows = int(ends[-1]) if rows is None else rows
        self._write_tokens(branches, table_rows, lengths, new, ids)
        self._write_lengths(table_rows, lengths, new)
        if parents is not None or behind is not None:
            places = torch.from_numpy(table_rows).to(self.pool.device, non_blocking=True)
        if parents is not None:
            self._page_rows.lose(table_rows)
            fork_rows(self.pool, self.pages.table, self.pages.seq_lens, places, parents)
        if behind is not None:
            tokens = self.positions[: ends[-1]], self.slots[: ends[-1]]
            draw_back(self.pool, self.pages.table, self.pages.seq_lens, places, behind, tokens)
            if self.draft_mask is not None:
                self.draft_mask.draw_back(behind, int(new[0]))
        self._counts = dict(counts)
        for kernel in self.kernels.values():
            kernel.prepare(sequences.live)
        return dict(zip((branch.number for branch in branches), (ends - 1).tolist(), strict=True))

    def forked(self, branches: Mapping[int, Branch], forks: Sequence[int]) -> None:
        """Tells which rows of the batch became forks, after a step with `parents`.

        Args:
            branches: The branch in each row.
            forks: The rows that became forks.
        """
        self._page_rows.find(branches, forks)

    def compute(self, model: Model, keep: torch.Tensor) -> torch.Tensor:
        """Runs a model on the step.

        Args:
            model: The model, whose attention layers call `attend`.
            keep: int64; the rows to return logits of.

        Returns:
            Logits `[rows kept, vocabulary]`.

        Raises:
            InputError: Not every layer has attended, so that its KV is missing, or the logits have another shape.
        """
        self._attended, self._read = set(), set()
        logits = model(self, keep)
        check_computed(len(self._attended), self.pool.layers, logits, (len(keep), model.vocabulary))
        return logits

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
            `[rows, num_qo_heads, head_dim_v]`, valid until the next call.

        Raises:
            InputError: A tensor has other heads or head dims than the pool's shape.
        """
        check_layer(layer, self._attended)
        check_heads(self.pool.shape, q, keys, values)
        with self._accounting.part("attention"):
            self._attended.add(layer)
            if kind not in self._kernels:
                self._kernels[kind] = made = self._make_kernel(self, kind, sinks)
                if made is not None:
                    made.prepare(self.sequences.live)
            kernel = self._kernels[kind]
            if kernel is None:
                return self._out[: self.rows]
            if kind not in self._read:
                kernel.step()
                self._read.add(kind)
            self.pool.write(layer, self.slots[: self.rows], keys, values)
            resting = max(0, kernel.rows - self.rows)
            padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, resting)) if resting else q
            kernel(padded, *self.pool.caches(layer), out=self._out[: len(padded)])
            return self._out[: self.rows]

    def end(self) -> None:
        """Ends the step, after its last layer: the KV of the new tokens is stored."""
        self.sequences.store(self._counts)
        self._counts = {}
        for kernel in self.kernels.values():
            kernel.refresh(self.sequences.live)

    def _all_kernels(self, attribute: str) -> bool:
        """Says whether there are kernels, and all have an attribute that is True."""
        kernels = self._kernels.values()
        return bool(kernels) and all(kernel is None or getattr(kernel, attribute, False) for kernel in kernels)

    def _write_tokens(
        self, branches: Sequence[Branch], table_rows: Longs, lengths: Longs, new: Longs, ids: torch.Tensor | None
    ) -> None:
        """Copies ids, positions and slots of the new tokens to the device."""
        ends = new.cumsum()
        place = np.arange(ends[-1]) + np.repeat(lengths - ends, new)
        page = self.host_table[np.repeat(table_rows, new), place // self.pool.page_tokens].astype(np.int64)
        tokens = np.zeros((3, self.max_rows), np.int64)  # ids, positions and slots
        if ids is None:
            tokens[0, : ends[-1]] = [
                token for branch, end in zip(branches, lengths.tolist(), strict=True)
                for token in branch.tokens[branch.stored : end]
            ]  # fmt: skip
        tokens[1, : ends[-1]] = place
        if self.draft_mask is not None:
            self.draft_mask.place(branches, ends, tokens[1])
        tokens[2] = self.pool.spare_slot
        tokens[2, : ends[-1]] = self.pool.slots_for(page, place)
        self._tokens.copy_(torch.from_numpy(tokens), non_blocking=True)
        if ids is not None:
            self.ids[: len(ids)].copy_(ids)

    def _write_lengths(self, table_rows: Longs, lengths: Longs, new: Longs) -> None:
        """Copies the lengths and the query rows of rows of the table to the device."""
        batch = self.sequences.max_branches
        of_rows, new_of_rows = np.zeros(2 * batch + 1, np.int32), np.zeros(batch, np.int32)  # seq_lens, then qo_indptr
        of_rows[table_rows], new_of_rows[table_rows] = lengths, new
        new_of_rows.cumsum(out=of_rows[batch + 1 :])
        self._lengths.copy_(torch.from_numpy(of_rows), non_blocking=True)
        self.host_lengths = of_rows[:batch], new_of_rows

    def _tell_lengths(self, seats: Longs, lengths: Longs, new: Longs) -> None:
        """Tells the live batch the tokens and query rows of the branches of the step; others have one row."""
        live = self.sequences.live
        live.set_tokens(seats, lengths)
        rows = np.ones(len(live.row), np.int64)
        rows[seats] = new
        if not np.array_equal(rows, live.rows):
            running = live.seats
            live.set_rows(running, rows[running])
