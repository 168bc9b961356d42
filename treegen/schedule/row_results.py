"""Results of rows: which work items write final output, which write partial slots, and where these are merged.

    row table   [ 0 | 1 | 2 | 3 | 4 ]
    items       a: rows 0, 1, 2      b: rows 2, 3      c: row 4
    slots       a: 0, 1, 2           b: 3, 4           c: none, it writes final output
    merges      row 0: slot 0      row 1: slot 1      row 2: slots 2, 3      row 3: slot 4

Row 2 has two items, so both write partials, for all of their rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, offsets, ragged_ranges
from treegen.ir.errors import PlanError
from treegen.ir.plan import Plan
from treegen.schedule.arrangement import Items
from treegen.schedule.merge_lists import (
    NO_EPILOGUE,
    Epilogue,
    Merges,
    check_last_items,
    epilogue_lists,
    in_last_round,
    merge_lists,
    no_merges,
    partial_items,
    single_round_merges,
)
from treegen.schedule.pack_runs import Each


class RowResults(NamedTuple):
    """The first slot of each item, merge lists, epilogue lists, and the kernel configs that merge in their epilogue."""

    partial0: Each
    merges: Merges
    epilogue: Epilogue
    merging: list[bool] | None = None


def row_results(
    plan: Plan, items: Items, row_table: Ints, row0: Longs, num_rows: int, num_rounds: int, launches: int
) -> RowResults:
    """Finds the items that write partials, and lists the merges. row0: each item's first entry of the row table."""
    rows = items.rows
    if int(np.add.reduce(rows)) == num_rows and not np.count_nonzero(plan.row_lo[1:] < plan.row_hi[:-1]):
        return RowResults(-1, no_merges(rows[:0], num_rounds), NO_EPILOGUE)  # each row has one item
    entry = ragged_ranges(row0, rows)
    row = row_table[entry]
    items_of_row = np.bincount(row, minlength=num_rows)
    empty_rows = (items_of_row == 0).nonzero()[0]
    if len(row) + len(empty_rows) == num_rows:  # no row has two items, and some see nothing
        return RowResults(-1, no_merges(empty_rows, num_rounds), NO_EPILOGUE)

    last = in_last_round(plan, np.zeros(len(plan), np.int64), 1)[items.group]
    if last.any():
        item = np.arange(len(rows)).repeat(rows)
        check_last_items(item, row, last)
    partial = partial_items(rows, row, items_of_row, last)
    if plan.mask == "dense" and partial.any():
        raise PlanError("mask", plan.mask, "cannot merge rows that several groups have", "give every row to one group")
    before = offsets(np.where(partial, rows, 0))[:-1]
    partial0 = np.where(partial, before, -1)

    # The row's item of the last round merges its partials if it writes final output, else the merge kernel does.
    slot, kept, epilogue, merging = entry + (partial0 - row0).repeat(rows), partial.repeat(rows), NO_EPILOGUE, None
    if last.any():
        final = (last & ~partial).repeat(rows)
        entry_of_row = np.full(num_rows, -1)
        entry_of_row[row[final]] = entry[final]
        joined = kept & (entry_of_row[row] >= 0)
        epilogue = epilogue_lists(entry_of_row[row[joined]], slot[joined], len(row_table))
        kept &= ~joined
        if len(epilogue.slots):
            merges_any = final & (epilogue.indptr[1:] > epilogue.indptr[:-1])[entry]
            merging = (np.bincount(items.config[item], merges_any, launches) > 0).tolist()
    kept_row = row[kept]
    if plan.invariant_block:  # partials of a row in the order of groups, which is that of its path
        order = items.group.repeat(rows)[kept].argsort(kind="stable")
        return RowResults(partial0, single_round_merges(kept_row[order], slot[kept][order], empty_rows), epilogue)
    if num_rounds == 1:
        merges = single_round_merges(kept_row, slot[kept], empty_rows)
    elif not len(kept_row):
        merges = no_merges(empty_rows, num_rounds)
    else:
        round = items.config.repeat(rows)[kept] // (launches // num_rounds)
        if plan.merge == "final":
            round = np.full(len(round), num_rounds - 1)
        merges = merge_lists(kept_row, slot[kept], round, empty_rows, num_rounds)
    return RowResults(partial0, merges, epilogue, merging)
