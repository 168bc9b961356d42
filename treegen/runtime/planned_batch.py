"""A batch when it was planned, against what it has become."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treegen.ir.arrays import Ints
from treegen.ir.live_batch import LiveBatch


@dataclass(slots=True)
class PlannedBatch:
    """A batch at its last plan.

    Attributes:
        batch: The batch.
        changes: Its counter of changes then.
        requests: The number of its requests then.
        tokens: By seat, the tokens that the plan was made for.
        before: By seat, its tokens then, where the plan was made for chunks of prompts that it had not got yet; None
            otherwise, and once the next step is prepared.
    """

    batch: LiveBatch
    changes: int
    requests: int
    tokens: Ints
    before: Ints | None

    @classmethod
    def of(cls, batch: LiveBatch, then: LiveBatch) -> PlannedBatch:
        """Takes a batch for which a plan was made. then: as the plan was made for."""
        is_ahead = np.count_nonzero(then.tokens != batch.tokens)
        return cls(batch, then.changes, len(then), then.tokens, batch.tokens.copy() if is_ahead else None)

    def knows(self, batch: LiveBatch) -> bool:
        """Says whether the plan is of this batch, which has got no more seats since."""
        return self.batch is batch and len(batch.tokens) == len(self.tokens)

    def waits(self, batch: LiveBatch) -> bool:
        """Says whether the plan is for chunks of prompts that the batch is still to get."""
        if self.before is None or not self.knows(batch) or self.changes != batch.changes:
            return False
        return np.array_equal(self.before, batch.tokens)

    def lacks_chunks(self, batch: LiveBatch) -> bool:
        """Says whether some chunks of prompts that the plan was made for did not come with the next step."""
        if self.before is None or not self.knows(batch):
            return False
        return bool(np.count_nonzero((self.tokens != self.before) & (self.tokens != batch.tokens)))
