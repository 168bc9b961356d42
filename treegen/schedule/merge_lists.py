"""Merge lists: which partial slots are merged into which rows, and after which round.

    partials    row 4: slots 0, 7      row 6: slots 2, 3, 9      row 9: none, it sees no token
    one round   merge_rows    [ 4 | 6 | 9 ]
                merge_indptr  [ 0 | 2 | 5 | 5 ]
                merge_partials   [ 0, 7 | 2, 3, 9 ]                 row 9 gets out 0 and lse -inf

Where a row has partials from several rounds, each merge but the row's last one writes the row's first slot:

    row 6       round 0: slots 2, 3      round 1: slot 9
    merges      after round 0: 2, 3 ──▶ slot 2      after round 1: 2, 9 ──▶ row 6
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Ints, Longs, frozen, largest, offsets, ragged_ranges, stable_order
from treegen.ir.errors import PlanError
from treegen.ir.plan import Plan


class Merges(NamedTuple):
    """The merge lists of a Schedule: merge_rows, merge_indptr, merge_partials and merge_round_indptr."""

    rows: Ints
    indptr: Ints
    slots: Ints
    round_indptr: Ints


class Epilogue(NamedTuple):
    """The epilogue lists of a Schedule: epilogue_indptr and epilogue_partials."""

    indptr: Ints
    slots: Ints


_NO_SLOTS = frozen(np.empty(0))
NO_EPILOGUE = Epilogue(frozen(np.zeros(1)), _NO_SLOTS)


def in_last_round(plan: Plan, tree: Longs, trees: int) -> Bools:
    """Says for each group whether it merges the partials of earlier rounds: under "final" merge in the last round.

    tree: the tree of each group, out of `trees`, whose plans have last rounds of their own.
    """
    if plan.merge == "reduce":
        return np.zeros(len(plan), np.bool_)
    if trees == 1:
        last: Bools = plan.round == plan.round.max(initial=0)
        return last
    latest = np.zeros(trees, np.int64)
    np.maximum.at(latest, tree, plan.round)
    last = plan.round == latest[tree]
    return last


def partial_items(rows: Longs, row: Ints, items_of_row: Longs, last: Bools) -> Bools:
    """Says for each item whether it writes partials: where one of its rows has another item.

    An item of the last round, `last`, writes partials only where one of its rows has another item of that round.

    Args:
        rows: Rows of each item, at least one.
        row: The rows of all items, item after item.
        items_of_row: Items of each row.
        last: Whether each item merges the partials of earlier rounds.
    """
    rivals = items_of_row[row]
    if last.any():
        of_last = last.repeat(rows)
        rivals = np.where(of_last, np.bincount(row[of_last], minlength=len(items_of_row))[row], rivals)
    partial: Bools = np.maximum.reduceat(rivals, offsets(rows)[:-1]) > 1
    return partial


def check_last_items(item: Longs, row: Ints, last: Bools) -> None:
    """Raises PlanError where a row has partials from earlier rounds and several items in the last round."""
    of_last = last[item]
    counts = np.bincount(row[of_last], minlength=int(row.max(initial=0)) + 1)
    wrong = row[~of_last & (counts[row] > 1)]
    if len(wrong):
        reason = f"cannot merge the partials of row {wrong[0]} in {counts[wrong[0]]} items of the last round"
        raise PlanError("merge", "final", reason, "give the row one item there, or use reduce")


def epilogue_lists(entry: Longs, slot: Longs, entries: int) -> Epilogue:
    """Lists the slots, in ascending order, that are merged into each of the row table's `entries`."""
    if not len(slot):
        return NO_EPILOGUE
    order = np.lexsort((slot, entry))
    return Epilogue(frozen(offsets(np.bincount(entry, minlength=entries))), frozen(slot[order]))


def kept_between_rounds(row: Longs, round: Longs, rounds: int) -> Longs:
    """Lists the rows whose merged partials a later round reads, once for each such merge (see merge_lists)."""
    order = np.lexsort((round, row))
    merges = merge_lists(row, np.argsort(order), round, np.empty(0, np.int64), rounds)
    kept: Longs = row[order][-1 - merges.rows[merges.rows < 0]]
    return kept


def merge_lists(row: Longs | Ints, slot: Longs, round: Longs, empty_rows: Longs, rounds: int) -> Merges:
    """Lists the merges of all rows, round by round.

    After each round that writes partials of a row, they are merged with the row's earlier ones. The result goes to the
    row's first slot, and after the row's last such round to its final output. A row with a single partial becomes final
    after the last round of all.

    Args:
        row: The row of each partial.
        slot: The slot of each partial.
        round: The round of each partial.
        unseeing: Rows without partials. Their merges are empty, in the last round.
        rounds: The number of rounds.
    """
    if rounds == 1:
        return single_round_merges(row, slot, empty_rows)
    order = np.lexsort((round, row))
    row, slot, round = row[order], slot[order], round[order]
    # A cell: the partials of one row in one round.
    first = np.flatnonzero(np.append(True, (row[1:] != row[:-1]) | (round[1:] != round[:-1]))[: len(row)])
    counts = np.diff(np.append(first, len(row)))
    cell_row, cell_round = row[first], round[first]
    opens = np.append(True, cell_row[1:] != cell_row[:-1])[: len(first)]
    closes = np.append(cell_row[1:] != cell_row[:-1], True)[: len(first)]
    running = slot[first[opens]][np.cumsum(opens) - 1]
    cell_round = np.where(opens & closes & (counts == 1), rounds - 1, cell_round)

    kept = np.flatnonzero(~opens | closes | (counts > 1))
    joined = (~opens[kept]).astype(np.int64)
    target = np.where(closes[kept], cell_row[kept], -1 - running[kept])
    lengths = counts[kept] + joined
    indptr = offsets(lengths)
    slots = np.empty(indptr[-1], np.int64)
    slots[indptr[:-1]] = running[kept]  # without earlier partials the next line writes the same slot again
    slots[ragged_ranges(indptr[:-1] + joined, counts[kept])] = slot[ragged_ranges(first[kept], counts[kept])]

    # Rows without partials are empty merges of the last round.
    target = np.concatenate([target, empty_rows])
    round = np.concatenate([cell_round[kept], np.full(len(empty_rows), rounds - 1)])
    begin = np.concatenate([indptr[:-1], np.zeros(len(empty_rows), np.int64)])
    lengths = np.concatenate([lengths, np.zeros(len(empty_rows), np.int64)])
    owner = np.concatenate([cell_row[kept], empty_rows])
    order = np.lexsort((owner, round))
    return Merges(
        frozen(target[order]),
        frozen(offsets(lengths[order])),
        frozen(slots[ragged_ranges(begin[order], lengths[order])]),
        frozen(np.searchsorted(round[order], np.arange(rounds + 1))),
    )


def single_round_merges(
    row: Longs | Ints, slot: Longs, empty_rows: Longs | None = None, lengths: Longs | None = None
) -> Merges:
    """Makes `merge_lists` of one round, in which each row has one merge, and that is final.

    lengths: the partials of each row, where the caller knows them.
    """
    if empty_rows is None or not len(empty_rows):
        lengths = np.bincount(row) if lengths is None else lengths
        rows = lengths.nonzero()[0]
    else:
        lengths = np.bincount(row, minlength=largest(empty_rows) + 1)
        merged = lengths > 0
        merged[empty_rows] = True
        rows = merged.nonzero()[0]
    order = stable_order(row, len(lengths))
    return Merges(frozen(rows), frozen(offsets(lengths[rows])), frozen(slot[order]), frozen(np.array([0, len(rows)])))


def no_merges(empty_rows: Longs, rounds: int) -> Merges:
    """Makes `merge_lists` where no row has partials."""
    return (
        _empty_merges(rounds)
        if not len(empty_rows)
        else merge_lists(empty_rows[:0], empty_rows[:0], empty_rows[:0], empty_rows, rounds)
    )


@cache
def _empty_merges(rounds: int) -> Merges:
    """Makes `merge_lists` of no rows."""
    return Merges(_NO_SLOTS, NO_EPILOGUE.indptr, _NO_SLOTS, frozen(np.zeros(rounds + 1)))
