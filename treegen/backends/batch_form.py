"""Batch forms: the sizes and options that a program for running batches is made for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.backends.kv_scales import Scales
from treegen.backends.page_table import PageTable
from treegen.ir.arrays import frozen
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.request_schedule import SEAT_FIELDS, RequestSchedule, SharedChunks
from treegen.ir.request_tables import RUNNING_FIELDS, RequestRoom
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.ir.work_items import ITEM_FIELDS, RUN_FIELDS
from treegen.scoring.options import Scoring

NO_REQUESTS = frozen(np.empty((len(RUNNING_FIELDS), 0)))
"""The running requests of no seats."""


class BatchForm(NamedTuple):
    """The sizes and options of a program for running batches, which never change.

    config: the kernel config of all launches. room: the room of all tables. shape: the attention shape. pages: the
    engine's page table. most_tokens: the most tokens of a request. scales: the scales of keys and values. scoring: the
    score options.
    """

    config: KernelConfig
    room: RequestRoom
    shape: Shape
    pages: PageTable
    most_tokens: int
    scales: Scales | None = None
    scoring: Scoring | None = None

    @property
    def positions(self) -> bool:
        """Whether kernels need positions of rows and tokens."""
        return self.scoring is not None and self.scoring.positions

    @property
    def window_left(self) -> int:
        """The tokens before its own that a row sees, -1 for all."""
        return -1 if self.scoring is None else self.scoring.options.window_left


def no_plan(room: RequestRoom) -> RequestSchedule:
    """Makes the schedule of no requests."""
    none, zero = frozen(np.empty(0)), frozen(np.zeros(1))
    chunks = SharedChunks(none, none, none) if room.chunk else None
    seats = none.reshape(len(SEAT_FIELDS), 0)
    return RequestSchedule(empty_schedule(()), none, zero, 0, 0, seats, none, None, chunks)


def empty_schedule(configs: tuple[KernelConfig, ...], *, fixed: bool = False) -> Schedule:
    """Makes a schedule with these kernel configs and no items."""
    none, zero = frozen(np.empty(0)), frozen(np.zeros(1))
    items, runs = none.reshape(0, len(ITEM_FIELDS)), none.reshape(0, len(RUN_FIELDS))
    indptr = frozen(np.zeros(len(configs) + 1))
    return Schedule(configs, indptr, items, none, runs, runs, none, zero, none, fixed=fixed)
