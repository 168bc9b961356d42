"""Predicts which prompts get another chunk in the next step, so that `refresh` can plan for it.

    step 7    prepare: a chunk ends at token 1024 ──▶ step ──▶ layers ──▶ refresh plans for 1536
    step 8    prepare: the next one at token 1536, as planned

A plan for 1024 tokens would be right as well, but would give 512 tokens more to the last work items of these rows.
"""

from __future__ import annotations

from copy import copy

from treegen.ir.arrays import Bools, Ints, largest
from treegen.ir.live_batch import LiveBatch

LEAST_ROWS = 64
"""A request with at least this many query rows may be a prompt that is computed in chunks.

Smaller numbers may be drafts. If some of these are rejected, the request has fewer tokens than planned, and is served
alone.
"""
_OF_CHUNKS = 1, 4, 5  # lines of LiveBatch.table: epoch, tokens and rows


class ComingChunks:
    """Says which requests will get a further chunk of their prompts: those that have just got one of the same size.

    The batch has to be as it was at the last `prepare`; if its tokens have changed since, the caller has already added
    those of the next step. And that step has to be launched, as `refresh` may also be called before. Replays of graphs
    cannot be seen, so a step counts as launched if the launch of the one before was not seen either.

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
