"""Schedules by request of plans with one rank interval for each group, made in C."""

from __future__ import annotations

import ctypes

import numpy as np

import treegen.compiled.c_library as c_library
from treegen.ir.arrays import frozen, largest
from treegen.ir.plan import Plan
from treegen.ir.request_schedule import CLAIM_FIELDS, ENTRY_FIELDS, SEAT_FIELDS, UNKNOWN, RequestSchedule
from treegen.ir.work_items import ITEM_FIELDS
from treegen.schedule.by_request import ItemRoom, run_tokens_of, schedule_of_tables
from treegen.schedule.query_runs import lower_requests
from treegen.target.problem import Problem
from treegen.target.tile_config import rows_per_tile

_TableFacts = ctypes.c_int64 * 7


class _RoomOfItems(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("height", "tile_power", "run_power", "page_size", "reserve"))


_COUNTS = ("groups", "segments", "nodes", "requests")
_ARRAYS = (
    *("row_lo", "group_rows", "segment_indptr", "segment"),
    *("of_nodes", "node_tokens", "node_slots", "row_of_rank", "of_requests", "least"),
)


class _LoweredPlan(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int64) for name in _COUNTS), *((name, ctypes.c_void_p) for name in _ARRAYS))


def tables_of(plan: Plan, problem: Problem, room: ItemRoom) -> RequestSchedule:
    """Makes `lower_requests(plan, problem, room)`, in C where that is possible. Raises what that raises."""
    library, tree, requests, groups = c_library.library(), problem.tree, problem.tree.requests, len(plan)
    if (
        library is None
        or requests is None
        or requests.queries is not None
        or not groups
        or not len(plan.row_lo) == groups == np.count_nonzero(plan.group_rows)
    ):
        return lower_requests(plan, problem, room)
    config, count, facts = room.config, len(requests.seat), _TableFacts()
    height, width = rows_per_tile(config.rows, problem.shape.group), max(largest(requests.seat) + 1, count)
    arrays = (
        *(plan.row_lo, plan.group_rows, plan.segment_indptr, plan.segments),
        *(requests.of_nodes, tree.tokens, tree.kv.start, tree.topology.row_of_rank, requests.of_requests),
    )
    least = None if requests.least is None else requests.least.ctypes.data
    counts = groups, len(plan.node), len(tree.parent), count
    planned = _LoweredPlan(*counts, *[array.ctypes.data for array in arrays], least)
    powers = (size.bit_length() - 1 for size in (config.tokens, run_tokens_of(room.page_size)))
    of_items = _RoomOfItems(height, *powers, room.page_size, room.reserve)
    words = 24 * groups + 5 * len(plan.node) + 16 * (width + count)
    while True:
        made = np.empty(words, np.int32)
        needed = library.item_tables(
            ctypes.byref(planned), ctypes.byref(of_items), UNKNOWN.ctypes.data, width, made.ctypes.data, words, facts
        )
        if needed <= 0:
            return lower_requests(plan, problem, room)
        if needed <= words:
            break
        words = needed
    tile_room, run_room, items, entries, merged, partials, claims = facts
    lengths = (
        *(items * len(ITEM_FIELDS), entries * len(ENTRY_FIELDS), items + 1, count),
        *(merged, merged + 1, partials, len(SEAT_FIELDS) * width, claims * len(CLAIM_FIELDS)),
    )
    tables, end, made = [], 0, frozen(made[:needed])
    for length in lengths:
        tables.append(made[end : end + length])
        end += length
    item, entry, entry_indptr, rows, merge_rows, merge_indptr, merge_partials, seats, claim = tables
    schedule = schedule_of_tables(
        config, item.reshape(-1, len(ITEM_FIELDS)), rows, merge_rows, merge_indptr, merge_partials
    )
    return RequestSchedule(
        schedule,
        entry.reshape(-1, len(ENTRY_FIELDS)),
        entry_indptr,
        tile_room,
        run_room,
        seats.reshape(len(SEAT_FIELDS), width),
        claim.reshape(-1, len(CLAIM_FIELDS)),
    )
