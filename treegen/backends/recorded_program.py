"""A program whose kernels record on which SM and when each piece of work ran, for measured timelines.

Its kernels are variants of the usual ones (KernelKey.recorded) and compute the same results. Nothing else launches
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from treegen.backends.kernel_launch import KernelLaunch
from treegen.backends.triton_program import TritonProgram
from treegen.codegen.emit import Source
from treegen.ir.arrays import Longs
from treegen.ir.keys import KernelKey
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape

RECORD_FIELDS = 5
"""64-bit integers of a record: the SM, nanoseconds and clock cycles at the start, and both at the end."""


class RecordedProgram(TritonProgram):
    """A schedule prepared for execution on one device, with a record of each piece of work.

    A piece of work is a thread block of a merge, or an item and lane of a launch of work items: a thread block, or an
    entry of its list.

    Args:
        schedule: The schedule, as it is launched.
        shape: The attention shape.
        device: The device of the tensors.
    """

    def __init__(self, schedule: Schedule, shape: Shape, device: torch.device) -> None:
        super().__init__(schedule, shape, device)
        self._options = self._options._replace(recorded=True)
        self._merge_keys = [replace(key, recorded=True) for key in self._merge_keys]
        self._records: list[torch.Tensor] = []
        self._launched = 0

    def launches(self, *call: Any) -> Iterator[KernelLaunch]:
        """Yields the launches of a call, in order. Arguments: see TritonProgram.launches."""
        self._launched = 0
        return super().launches(*call)

    def records(self) -> list[Longs]:
        """Returns the records of the latest call, once the device has run it.

        Each launch has an array `[pieces, RECORD_FIELDS]`, in the order in which thread blocks are numbered, or in that
        of the work lists. A piece that has no work has zeros at its end.
        """
        return [record.cpu().numpy() for record in self._records]

    def _launch(self, source: Source, blocks: int, values: dict[str, Any]) -> KernelLaunch:
        if self._launched == len(self._records):  # the first call; later ones write to the same memory
            of_list = isinstance(source.key, KernelKey) and source.key.work_list
            sizes = len(self.schedule.work) if of_list else blocks, RECORD_FIELDS
            self._records.append(torch.zeros(sizes, dtype=torch.int64, device=self.tables.table.device))
        values["times"] = self._records[self._launched]
        self._launched += 1
        return super()._launch(source, blocks, values)
