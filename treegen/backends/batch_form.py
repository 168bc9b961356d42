"""What programs for batches that live are made for, and the schedules that they have without a plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.backends.kv_scales import Scales
from treegen.backends.page_table import PageTable
from treegen.ir.arrays import frozen
from treegen.ir.request_schedule import SEAT_FIELDS, RequestRoom, RequestSchedule, SharedChunks
from treegen.ir.schedule import ITEM_FIELDS, RUN_FIELDS, Schedule, TileClass
from treegen.ir.shape import Shape
from treegen.scoring.options import Scoring


class BatchForm(NamedTuple):
    """What programs for batches are made for: the tile class of all launches, what there is room for, the attention
    shape, the engine's page table, tokens of a request at most, scales of keys and values, and what is done to scores.
    """

    tile: TileClass
    room: RequestRoom
    shape: Shape
    pages: PageTable
    most_tokens: int
    scales: Scales | None = None
    scoring: Scoring | None = None

    @property
    def positions(self) -> bool:
        """Whether kernels need those of rows and tokens."""
        return self.scoring is not None and self.scoring.positions

    @property
    def window_left(self) -> int:
        """Tokens before its own that a row sees, -1 for all."""
        return -1 if self.scoring is None else self.scoring.options.window_left


def no_plan(room: RequestRoom) -> RequestSchedule:
    """The schedule of no requests."""
    none, zero = frozen(np.empty(0)), frozen(np.zeros(1))
    chunks = SharedChunks(none, none, none) if room.chunk else None
    seats = none.reshape(len(SEAT_FIELDS), 0)
    return RequestSchedule(empty_schedule(()), none, zero, 0, 0, seats, none, None, chunks)


def empty_schedule(classes: tuple[TileClass, ...], *, fixed: bool = False) -> Schedule:
    """A schedule without items in these classes."""
    none, zero = frozen(np.empty(0)), frozen(np.zeros(1))
    items, runs = none.reshape(0, len(ITEM_FIELDS)), none.reshape(0, len(RUN_FIELDS))
    indptr = frozen(np.zeros(len(classes) + 1))
    return Schedule(classes, indptr, items, none, runs, runs, none, zero, none, fixed=fixed)
