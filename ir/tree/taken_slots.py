"""The slots that hold tokens of a tree, and the free ones between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import INT32_MAX, Longs
from treegen.ir.tree.kv import KVRuns


@dataclass(frozen=True, slots=True, eq=False)
class TakenSlots:
    """The slots that hold tokens, in a form for fast lookups.

    Slots beyond 2^31 - 2 count as taken.

    Attributes:
        start: The first slot of each run, in ascending order.
        end: `end[i]` is the highest end of the first i runs.
    """

    start: Longs
    end: Longs

    @classmethod
    def of(cls, kv: KVRuns) -> TakenSlots:
        """Returns the slots of all nodes' tokens."""
        order = np.argsort(kv.start, kind="stable")
        start = kv.start[order].astype(np.int64)
        never = np.iinfo(np.int64).max
        end = np.maximum.accumulate(np.concatenate([[0], start + kv.length[order], [never]]))
        return cls(np.concatenate([start, [INT32_MAX, never]]), end)

    def holds(self, slots: Longs) -> npt.NDArray[np.bool_]:
        """Tells for each of these slots whether it holds a token."""
        taken: npt.NDArray[np.bool_] = self.end[self.start.searchsorted(slots, "right")] > slots
        return taken

    def free_behind(self, slots: Longs) -> Longs:
        """Returns the number of free slots from each of these on; 0 where the slot itself holds a token."""
        return np.where(self.holds(slots), 0, self.start[self.start.searchsorted(slots, "right")] - slots)
