"""Lowering by request in batch-invariant mode: makes work items for the chunks that several requests read together.

A plan says nothing about all other chunks. The step kernel deals these to work items in every step
(treegen.backends.chunk_kernels), so it also finds those that a request gains by growing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import INT32_MAX, Ints, Longs, frozen, offsets, ragged, ramp, stacked
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.plan import Plan
from treegen.ir.request_schedule import RequestSchedule, SharedChunks
from treegen.ir.request_tables import RequestRoom
from treegen.ir.schedule import Schedule
from treegen.ir.tree.request_kv import RequestKV
from treegen.ir.work_items import ITEM_FIELDS, RUN_FIELDS
from treegen.schedule.by_request import of_seats, run_tokens_of
from treegen.target.problem import Problem
from treegen.target.tile_config import rows_per_tile

_NONE = frozen(np.empty(0))
_ANY_LENGTH = INT32_MAX // 2


class _SharedItems(NamedTuple):
    """Columns of work items: the seat that owns the chunk's pages, the chunk's number, the first rank, the rows."""

    owner: Ints | Longs
    chunk: Longs
    lo: Longs
    rows: Longs


def lower_chunks(plan: Plan, problem: Problem, config: KernelConfig, room: RequestRoom) -> RequestSchedule:
    """Makes the schedule of a plan of treegen.strategies.chunk_paths, with work items for its groups of several rows.

    Where there is no room for all items, those of the fewest rows are left out. Their chunks are served alone.
    """
    tree, requests, page_size = problem.tree, problem.tree.requests, problem.shape.page_size
    assert requests is not None
    items = _shared_items(plan, requests, room, rows_per_tile(config.rows, problem.shape.group))
    partial0, begin = offsets(items.rows)[:-1], items.chunk * room.chunk
    full, packed = room.chunk // config.tokens, config.tokens // run_tokens_of(page_size)
    entries = stacked(items.owner, begin, begin + room.chunk, 0, items.rows).T
    count, listed = len(items.rows), tree.topology.row_of_rank
    table = np.zeros((count, len(ITEM_FIELDS)), np.int32)
    table[:, 0], table[:, 1], table[:, 6] = items.lo, items.rows, partial0
    table[:, 2], table[:, 4] = ramp(count) * full, ramp(count) * packed
    schedule = Schedule(
        configs=(config,),
        config_indptr=frozen(np.array([0, count])),
        items=frozen(table),
        rows=frozen(requests.seat.take(listed)),
        tiles=_NONE.reshape(0, len(RUN_FIELDS)),
        packed_runs=_NONE.reshape(0, len(RUN_FIELDS)),
        merge_rows=_NONE,
        merge_indptr=frozen(np.zeros(1)),
        merge_partials=_NONE,
        fixed=True,
    )
    known, claims = of_seats(requests, _ANY_LENGTH, listed, _NONE)
    chunks = _chunks_of(items, partial0, requests.seat.take(listed), known.shape[1])
    places = frozen(ramp(count + 1))
    return RequestSchedule(schedule, frozen(entries), places, count * full, count * packed, known, claims, None, chunks)


def _shared_items(plan: Plan, requests: RequestKV, room: RequestRoom, height: int) -> _SharedItems:
    """Cuts groups of several rows into items of at most `height` rows, and drops the smallest where room runs out."""
    groups = np.count_nonzero(plan.group_rows > 1)  # groups of several rows come first
    first = plan.segment_indptr[:groups]
    node = plan.node.take(first)
    chunk = (requests.first.take(node) + plan.start.take(first)).astype(np.int64) // room.chunk
    rows = plan.group_rows[:groups].astype(np.int64)
    group, part = ragged(-(-rows // height))
    lo = plan.row_lo.take(group) + part * height
    rows = np.minimum(rows.take(group) - part * height, height)
    owner, chunk = requests.owner.take(node).take(group), chunk.take(group)
    alone = rows < 2  # the last item of a group may have a single row
    by_rows = np.where(alone, 0, -rows).argsort(kind="stable")
    fits = (offsets(rows.take(by_rows))[1:] <= room.slots) & ~alone.take(by_rows)
    kept = np.sort(by_rows.compress(fits)[: room.items])
    return _SharedItems(owner.take(kept), chunk.take(kept), lo.take(kept), rows.take(kept))


def _chunks_of(items: _SharedItems, partial0: Longs, seats: Ints, known: int) -> SharedChunks:
    """Lists the partial slots of each seat's chunks. seats: the seat of each rank. known: the number of seats."""
    item, number = ragged(items.rows)
    seat, chunk = seats.take(items.lo.take(item) + number), items.chunk.take(item)
    counts = np.zeros(known, np.int64)
    np.maximum.at(counts, seat, chunk + 1)
    first = offsets(counts)
    slots = np.full(first.item(-1), -1)
    slots[first.take(seat) + chunk] = partial0.take(item) + number
    return SharedChunks(frozen(first[:-1]), frozen(counts), frozen(slots))
