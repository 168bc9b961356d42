"""Work items and KV runs: the columns of a schedule's tables."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_FIELDS = ("row0", "rows", "tile0", "tiles", "run0", "packed_tiles", "partial0", "group")
"""Columns of `Schedule.items`, in the order in which kernels read them; the last one is for the host (see Arena)."""
RUN_FIELDS = ("slot", "length", "lo", "hi")
"""Columns of `Schedule.tiles` and `Schedule.packed_runs`: a run of KV slots, and the item's rows that see it.

The rows are `lo:hi`, or in a config with bit masks the two halves of a 64-bit word whose bit j stands for row j.
"""
POSITIONED_RUN_FIELDS = (*RUN_FIELDS, "position")
"""The columns where scores depend on positions (treegen.scoring): also the position of the run's first token."""
TABLES = ("items", "tiles", "packed_runs")
"""Arrays of a schedule that have columns."""
FLAT_ARRAYS = (
    "config_indptr", "rows", "merge_rows", "merge_indptr", "merge_partials", "round_indptr", "merge_round_indptr",
    "work_indptr", "work", "epilogue_indptr", "epilogue_partials", "row_positions",
)  # fmt: skip
"""Arrays of a schedule that are lists of integers."""
ARRAYS = (*FLAT_ARRAYS, *TABLES)
"""All arrays of a schedule."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One work item, as a small object.

    Attributes:
        row0: Its first entry of the row table.
        rows: Its entries of the row table.
        tile0: Its first full tile.
        tiles: Its full tiles.
        run0: Its first packed run.
        packed_tiles: Its tiles of packed runs.
        partial0: The partial slot of its first row; -1 when the item writes final output.
        group: Its group of the plan.
    """

    row0: int
    rows: int
    tile0: int
    tiles: int
    run0: int
    packed_tiles: int
    partial0: int
    group: int
