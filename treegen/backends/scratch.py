"""Scratch memory of calls: partial results, flags of items that wait, and the lse of calls that do not return it."""

from __future__ import annotations

from typing import NamedTuple

from treegen.ir.arena import ArenaSizes
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape

_ALIGNMENT = 256
_FP32_BYTES = 4
_FLAG_BYTES = 8


class Scratch(NamedTuple):
    """Offsets, in bytes, into the memory of a call.

        | part_lse | part_out | flags | lse     |
        0          out_at     flags_at lse_at   size

    The lse comes last, so that a call with an lse of its own needs only `lse_at` bytes.
    """

    out_at: int
    flags_at: int
    lse_at: int
    size: int

    @classmethod
    def of(cls, slots: int, rows: int, shape: Shape, flags: int = 0) -> Scratch:
        """Lays out `slots` partial slots, `flags` flags, and the lse of `rows` rows."""
        of_lse = _FP32_BYTES * shape.num_qo_heads
        out_at = _aligned(slots * of_lse)
        flags_at = out_at + _aligned(slots * (shape.partial_bytes - of_lse))
        lse_at = flags_at + _aligned(flags * _FLAG_BYTES)
        return cls(out_at, flags_at, lse_at, lse_at + rows * of_lse)


def scratch_of(schedule: Schedule, capacity: ArenaSizes, rows: int, shape: Shape) -> Scratch:
    """Lays out the memory of a call with `rows` rows, with a flag for each slot and head where some items wait."""
    return Scratch.of(
        capacity.slots, rows, shape, capacity.slots * shape.num_qo_heads if schedule.has_fused_merge else 0
    )


def workspace_bytes(schedule: Schedule, shape: Shape, rows: int, capacity: ArenaSizes | None = None) -> int:
    """Counts the bytes of device memory of a program: its tables, and the scratch memory of a call with `rows` rows."""
    capacity = capacity or schedule.size
    return schedule.pack(capacity).array.nbytes + scratch_of(schedule, capacity, rows, shape).size


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
