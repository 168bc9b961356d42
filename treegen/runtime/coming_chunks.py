"""Chunks of prompts that the next step will bring: what a plan is to be made for while the device works.

    step 7    prepare: a chunk ends at token 1024 ──▶ step ──▶ layers ──▶ refresh plans for 1536
    step 8    prepare: the next one at token 1536, as planned

A plan for 1024 tokens would be right as well, but would give 512 tokens more to the last work items of these rows.
"""

from __future__ import annotations

from copy import copy

from treegen.ir.arrays import Bools, Ints, largest
from treegen.ir.live_batch import LiveBatch

LEAST_ROWS = 64
"""The least query rows of a request that are taken for the chunk of a prompt, after which another one comes.

Fewer may be drafts, of which some are refused. Requests then have fewer tokens than planned, and are served alone.
"""
_OF_CHUNKS = 1, 4, 5  # lines of LiveBatch.table: epoch, tokens and rows


class ComingChunks:
    """Predicts that a request with many query rows gets as many tokens in the next step as it has rows.

    Only where the step before was like that, and only for the batch of the last `prepare`: if it has other tokens by
    now, it knows already what the next step brings. Only after the launches of that step: those of graphs are not seen,
    so they count as launched where those of the step before were not seen either.

    Args:
        most_tokens: The most tokens of a request.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._prepared: tuple[LiveBatch, Ints, Bools] | None = None
        """The batch, its _OF_CHUNKS by seat, and where another chunk comes; None without chunks."""
        self._launched = self._replays = False

    def note_step(self) -> None:
        """Notes that the prepared step was launched."""
        self._launched = True

    def note_prepared(self, batch: LiveBatch) -> None:
        """Notes the batch of the step that is prepared."""
        before, self._prepared = self._prepared, None
        self._launched, self._replays = False, before is not None and not self._launched
        if largest(batch.rows) < LEAST_ROWS:
            return
        now = batch.table.take(_OF_CHUNKS, 0)
        comes = now[2] >= LEAST_ROWS
        if before is None or before[0] is not batch or before[1].shape != now.shape:
            comes[:] = False
        else:
            comes &= (before[1][::2] == now[::2]).all(0) & (now[1] - before[1][1] == now[2])
        self._prepared = batch, now, comes

    def ahead(self, batch: LiveBatch) -> LiveBatch:
        """Returns a copy of the batch with the chunks that the next step will bring; the batch itself without any."""
        if self._prepared is None or not (self._launched or self._replays):
            return batch
        prepared, known, comes = self._prepared
        if prepared is not batch or known.shape[1] != len(batch.row):
            return batch
        comes = comes & (known == batch.table.take(_OF_CHUNKS, 0)).all(0)
        comes &= batch.tokens <= self._most_tokens - batch.rows
        seats = comes.nonzero()[0]
        if not len(seats):
            return batch
        then = copy(batch)
        then.grow(batch.rows.take(seats), seats)
        return then
