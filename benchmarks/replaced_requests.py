"""Batches whose requests are replaced by others like them, and their page tables on the host."""

from __future__ import annotations

import numpy as np

from treegen import LiveBatch, shared_prefixes
from treegen.ir.arrays import INT32_MAX
from treegen.runtime.batch_kernel import BatchKernel

PAGE_SIZE, GROUP = 16, 8


class Batch:
    """A LiveBatch in which requests are replaced by others like them. kind: groups, unshared or branches."""

    def __init__(self, kind: str, requests: int, tokens: int) -> None:
        self.live, self.kind, self._tokens = LiveBatch(PAGE_SIZE, max_seats=requests), kind, tokens
        self._random = np.random.default_rng(0)
        for _ in range(requests):
            self.arrive()

    def arrive(self) -> int:
        """Adds a request, and returns its seat."""
        live, most, random = self.live, self._tokens, self._random
        half = most // 2 // PAGE_SIZE * PAGE_SIZE
        if self.kind == "unshared":
            return live.add(int(random.integers(most // 4, most)))
        tokens, owner = half + int(random.integers(1, half)), None
        if self.kind == "groups" and len(live) % GROUP:
            owner, shared = int(live.seats[-1]), half
        elif self.kind == "branches" and len(live) and random.random() < 0.7:
            owner = int(random.choice(live.seats))
            shared = int(random.integers(live.tokens[owner] + 1)) // PAGE_SIZE * PAGE_SIZE
            tokens = min(shared + int(random.integers(1, most // 4)), most)
        return live.add(tokens, owner, 0 if owner is None else shared)

    def replace(self) -> int:
        """Ends one request, and adds another one that shares with the same one. Returns the seat of both."""
        live = self.live
        sharing = (live.shared_with >= 0).nonzero()[0]
        seat = int(self._random.choice(sharing if len(sharing) else live.seats))
        tokens, owner, shared = (int(column[seat]) for column in (live.tokens, live.shared_with, live.shared_tokens))
        live.finish(seat)
        return live.add(tokens, owner if owner >= 0 else None, shared)


class HostTable:
    """A block table on the host, with a row for each seat of a batch in groups."""

    def __init__(self, batch: Batch, tokens: int) -> None:
        self._batch, self._random = batch, np.random.default_rng(1)
        self._table = np.empty((len(batch.live.row), -(-tokens // PAGE_SIZE)), np.int32)
        for seat in batch.live.seats.tolist():
            self._fill(seat)

    def _fill(self, seat: int) -> None:
        """Writes the row of a new request: the shared pages of its owner, which has a row already, and new ones."""
        row, live = self._table[seat], self._batch.live
        row[:] = self._random.integers(INT32_MAX, size=len(row), dtype=np.int32)
        shared = int(live.shared_tokens[seat]) // PAGE_SIZE
        row[:shared] = self._table[live.shared_with[seat], :shared]

    def replace(self) -> None:
        """Replaces a request of the batch."""
        self._fill(self._batch.replace())

    def update(self, kernel: BatchKernel) -> None:
        """Makes a plan for the sharing that is found in the table."""
        live = self._batch.live
        seats = live.seats
        lengths = live.tokens[seats]
        live.found(seats, live.epoch[seats], lengths, *shared_prefixes(self._table, lengths, PAGE_SIZE))
        kernel.update(live)
