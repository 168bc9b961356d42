"""Chunks of prompts that the next step will bring: what a plan is to be made for while the device works.

    step 7    prepare: a chunk ends at token 1024 ──▶ step ──▶ layers ──▶ refresh plans for 1536
    step 8    prepare: the next one at token 1536, as planned

A plan for 1024 tokens would be right as well, but would give 512 tokens more to the last work items of these rows.
"""

from __future__ import annotations

from copy import copy

import numpy as np

from treegen.ir.arrays import Bools, Ints, largest
from treegen.ir.live_batch import LiveBatch

LEAST_ROWS = 64
"""The least query rows of a request that are taken for the chunk of a prompt, after which another one comes.

Fewer may be drafts, of which some are refused. Requests then have fewer tokens than planned, and are served alone.
"""
_OF_CHUNKS = 1, 4, 5  # lines of LiveBatch.table: epoch, tokens and rows


class ComingChunks:
    """Predicts that a request with many query rows gets as many tokens in a step as it has rows.

    Only where that was so in the step before, or nothing is known of that, and only after a `prepare`: if the tokens
    are others by now, the batch knows already what the next step brings.

    Args:
        most_tokens: The most tokens of a request.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._prepared: Ints | None = None  # _OF_CHUNKS by seat; None without chunks
        self._chunks: Bools = np.empty(0, np.bool_)

    def note_prepared(self, batch: LiveBatch) -> None:
        """Notes the batch of the step that is prepared."""
        if largest(batch.rows) < LEAST_ROWS:
            self._prepared = None
            return
        before, now = self._prepared, batch.table.take(_OF_CHUNKS, 0)
        chunks = now[2] >= LEAST_ROWS
        if before is not None and before.shape == now.shape:
            stays = (before[::2] == now[::2]).all(0)
            chunks &= ~stays | (now[1] - before[1] == now[2])
        self._prepared, self._chunks = now, chunks

    def ahead(self, batch: LiveBatch) -> LiveBatch:
        """Returns a copy of the batch with the chunks that the next step will bring; the batch itself without any."""
        known = self._prepared
        if known is None or known.shape[1] != len(batch.row):
            return batch
        comes = self._chunks & (known == batch.table.take(_OF_CHUNKS, 0)).all(0)
        comes &= batch.tokens <= self._most_tokens - batch.rows
        seats = comes.nonzero()[0]
        if not len(seats):
            return batch
        then = copy(batch)
        then.grow(batch.rows.take(seats), seats)
        return then
