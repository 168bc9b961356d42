"""RowRequests: each query row of a step as a request of its own, for kernels that serve one row for each request.

    branch of 300 tokens, 4 of them new       rows that see 297, 298, 299 and 300 tokens

So rows of a step have lengths and rows of the page table of their own. They share with the last row of their branch,
and that with the last rows of other branches. On several ranks that divide tokens, all this counts those of the rank.
"""

from __future__ import annotations

import numpy as np
import torch

from treegen.backends.page_table import PageTable
from treegen.engine.step import Step
from treegen.ir.live_batch import LiveBatch

_MOST_GROWN = 128
"""Tokens that rows of one branch may gain, which each reads alone, before their sharing is found anew."""


class RowRequests:
    """The query rows of one step after another.

    Attributes:
        pages: The page table and the lengths of the rows, for kernels.
        batch: The rows as requests, whose seats are the numbers of the rows.

    Args:
        step: The step.
    """

    def __init__(self, step: Step) -> None:
        self._step, pool = step, step.pool
        self._places = torch.zeros(2, step.kernel_rows, dtype=torch.int32, device=pool.device)
        """The row of the page table, and the tokens, of each query row."""
        self.pages = PageTable(step.pages.table, self._places[1], pool.num_pages, table_rows=self._places[0])
        self.batch = LiveBatch(pool.page_size, max_seats=step.kernel_rows)
        self._planned = b""
        self._told = np.zeros(0, np.int32)  # the tokens of the rows when what they share was told

    def take(self, batch: LiveBatch) -> bool:
        """Takes the rows of a step.

        Args:
            batch: The branches as requests.

        Returns:
            Whether a plan is needed: where branches came, ended, forked or have other new tokens than before, and where
            those with several new tokens, as chunks of prompts have them, have grown much.
        """
        lengths, new = self._step.host_lengths
        table_rows = np.flatnonzero(new)
        counts = new[table_rows].astype(np.int64)
        ends, total = counts.cumsum(), int(counts.sum())
        count = self._step.pool.shard.count
        places = np.zeros(tuple(self._places.shape), np.int32)
        places[0, :total] = np.repeat(table_rows, counts)
        places[1, :total] = count(np.repeat(lengths[table_rows] - ends, counts) + np.arange(1, total + 1))
        self._places.copy_(torch.from_numpy(places), non_blocking=True)
        tokens = places[1, :total]
        running = batch.seats
        seats = running[np.argsort(batch.row[running])][np.searchsorted(np.sort(batch.row[running]), table_rows)]
        last = np.full(len(batch.row) + 1, -1)  # by seat: the branch's last query row; and one more for seat -1
        last[seats] = ends - 1
        owner = np.repeat(ends - 1, counts)
        shared = tokens.astype(np.int64)
        owner[ends - 1] = last[batch.shared_with[seats]]
        shared[ends - 1] = np.where(owner[ends - 1] >= 0, count(batch.shared_tokens[seats]), 0)
        state = (table_rows, counts, batch.epoch[seats], owner[ends - 1], shared[ends - 1])
        planned = b"".join(each.astype(np.int64).tobytes() for each in state)
        same = planned == self._planned
        if same and (total == len(table_rows) or (tokens - self._told).max() < _MOST_GROWN):
            self.batch.set_tokens(np.arange(total), tokens)
            return False
        while len(self.batch) < total:
            self.batch.add(0)
        for seat in range(total, len(self.batch)):
            self.batch.finish(seat)
        self.batch.found(np.arange(total), self.batch.epoch[:total], tokens, owner, shared)
        self._planned, self._told = planned, tokens
        return True
