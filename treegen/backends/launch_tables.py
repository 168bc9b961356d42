"""Launch tables: a schedule's tables on a device, as the parameters of its kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from treegen.backends.staging import staging_for
from treegen.codegen.kernel_signature import ItemTables, MergeTables
from treegen.ir.arena import Arena
from treegen.ir.arrays import Ints


class Turns(NamedTuple):
    """How the thread blocks of a launch take turns. There are two lists of items, and two of merges.

    The items of a list end with one that has no rows, and its merges with one whose end is negative.

    items: whether thread blocks take items in turn; if not, each item has its own. second_item: the number of the
        second list's first item. merge_blocks: the most thread blocks that take merges.
    first_merges: the room of the first list of merges; the second one begins one entry later. second_merges: the room
        of the second list, whose merges are left out where their row is SURPLUS_MERGE.
    """

    items: bool
    second_item: int
    merge_blocks: int
    first_merges: int
    second_merges: int


class LaunchTables(NamedTuple):
    """A schedule's tables on a device.

    table: all of them as one int32 tensor. items: the tables of each kernel config. merges: those of each round's
        merges.
    page_size: tokens of a page where each full tile lists the first KV slot of each of its pages, else 0.
    turns: how thread blocks take turns, where there are fewer of them than items and merges; else None. Where they take
        items in turn, a program's capacity has those that are taken at a time.
    """

    table: torch.Tensor
    items: list[ItemTables]
    merges: list[MergeTables]
    page_size: int = 0
    turns: Turns | None = None

    @classmethod
    def of(cls, arena: Arena, table: torch.Tensor) -> LaunchTables:
        """Finds the tables of an arena whose array is in `table`, or will be."""
        shared = {
            "rows": table[arena.rows :],
            "tiles": table[arena.tiles :],
            "runs": table[arena.packed_runs :],
            "work_indptr": table[arena.work_indptr :],
            "work": table[arena.work :],
            "epilogue_indptr": table[arena.epilogue_indptr :],
            "epilogue_partials": table[arena.epilogue_partials :],
            "row_positions": table[arena.positions :],
        }
        places = zip(arena.merge_rows, arena.merge_indptr, strict=True)
        merges = [MergeTables(table[rows:], table[indptr:], table[arena.merge_partials :]) for rows, indptr in places]
        return cls(table, [ItemTables(items=table[place:], **shared) for place in arena.items], merges)


def fill(table: torch.Tensor, array: Ints) -> None:
    """Copies an array to a table on the current stream, without waiting for it."""
    if table.device.type != "cuda":
        table.numpy()[:] = array
        return
    staged = staging_for(table, table.device)
    staged.numpy()[:] = array
    table.copy_(staged, non_blocking=True)
