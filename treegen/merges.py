"""Merge lists: after which stage a row's partial results are merged, and into what."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, offsets, ragged_ranges


class Merges(NamedTuple):
    """The merge part of a Schedule, in its terms."""

    rows: Ints
    indptr: Ints
    slots: Ints
    stage_indptr: Ints


def kept_between_stages(row: Longs, stage: Longs, stages: int) -> Longs:
    """The rows whose merged partials a later stage reads, once for every such merge; arguments as of `merge_lists`."""
    order = np.lexsort((stage, row))
    merges = merge_lists(row, np.argsort(order), stage, np.empty(0, np.int64), stages)
    kept: Longs = row[order][-1 - merges.rows[merges.rows < 0]]
    return kept


def merge_lists(row: Longs, slot: Longs, stage: Longs, unseeing: Longs, stages: int) -> Merges:
    """Merges of the partial slots that `row` has from items of `stage`; rows `unseeing`, which have none, become empty.

    After every stage that gave a row partials, they join what the row has so far, which stays in its first slot; behind
    the row's last stage the result is final. A row with a single partial in all has nothing to join: the last stage
    makes it final.
    """
    order = np.lexsort((stage, row))
    row, slot, stage = row[order], slot[order], stage[order]
    # A cell: the partials of one row in one stage.
    first = np.flatnonzero(np.append(True, (row[1:] != row[:-1]) | (stage[1:] != stage[:-1]))[: len(row)])
    counts = np.diff(np.append(first, len(row)))
    cell_row, cell_stage = row[first], stage[first]
    opens = np.append(True, cell_row[1:] != cell_row[:-1])[: len(first)]
    closes = np.append(cell_row[1:] != cell_row[:-1], True)[: len(first)]
    running = slot[first[opens]][np.cumsum(opens) - 1]
    cell_stage = np.where(opens & closes & (counts == 1), stages - 1, cell_stage)

    kept = np.flatnonzero(~opens | closes | (counts > 1))
    joined = (~opens[kept]).astype(np.int64)
    target = np.where(closes[kept], cell_row[kept], -1 - running[kept])
    lengths = counts[kept] + joined
    indptr = offsets(lengths)
    slots = np.empty(indptr[-1], np.int64)
    slots[indptr[:-1]] = running[kept]  # overwritten below where the row has nothing yet: then it is its own first slot
    slots[ragged_ranges(indptr[:-1] + joined, counts[kept])] = slot[ragged_ranges(first[kept], counts[kept])]

    # Rows without partials are empty merges of the last stage.
    target = np.concatenate([target, unseeing])
    stage = np.concatenate([cell_stage[kept], np.full(len(unseeing), stages - 1)])
    begin = np.concatenate([indptr[:-1], np.zeros(len(unseeing), np.int64)])
    lengths = np.concatenate([lengths, np.zeros(len(unseeing), np.int64)])
    owner = np.concatenate([cell_row[kept], unseeing])
    order = np.lexsort((owner, stage))
    return Merges(
        frozen(target[order]),
        frozen(offsets(lengths[order])),
        frozen(slots[ragged_ranges(begin[order], lengths[order])]),
        frozen(np.searchsorted(stage[order], np.arange(stages + 1))),
    )
