"""Lowering by request: makes the entries of a plan whose tree names tokens by request. A step kernel expands them.

    segments   node 3, tokens 0:1000, seen by rows 0:8       tokens of a node of the tree
    entries    seat 5, tokens 64:1064, seen by rows 0:8      tokens of the request that owns the node, in its seat
    room       tiles 40:55, packed_runs 120:124        places where the step kernel writes what the item reads

No Python loop over items or requests, and the time does not depend on the length of contexts. An engine waits for this
whenever requests come. So it goes straight from segments to tables, without KV slots, rounds and several kernel
configs, which plans of batches do not have. Tests compare the result with that of treegen.schedule.lower.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, int32_ramp, largest, number, offsets, ragged_ranges, ramp
from treegen.ir.errors import InputError
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.plan import Plan
from treegen.ir.request_schedule import ENTRY_FIELDS, UNKNOWN, RequestSchedule
from treegen.ir.schedule import Schedule
from treegen.ir.tree import Tree
from treegen.ir.tree.request_kv import RequestKV
from treegen.ir.work_items import ITEM_FIELDS, RUN_FIELDS
from treegen.schedule.arrangement import config_offsets, cut_rows, row_table_of
from treegen.schedule.merge_lists import NO_EPILOGUE, Merges, no_merges, single_round_merges
from treegen.schedule.segment_runs import Runs
from treegen.target.problem import Problem
from treegen.target.tile_config import RUN_TOKENS, rows_per_tile

_NONE = frozen(np.empty(0))
_NO_RUNS = _NONE.reshape(0, len(RUN_FIELDS))
_NO_WORK = frozen(np.zeros(1))
_AS_RUNS, _AS_SEGMENTS = (0, 1, 3, 4, 2), (0, 1, 4, 2, 3)
"""Orders of columns: those of segments as runs have theirs, with rows third and fourth, and the other way round."""


class ItemRoom(NamedTuple):
    """The room of work items.

    config: their kernel config. page_size: tokens of a page. reserve: tokens that a request may gain until the next
    plan. causal: whether the kernel's mask hides the tokens behind each row, so that items need not.
    """

    config: KernelConfig
    page_size: int
    reserve: int
    causal: bool = False


class _Items(NamedTuple):
    """Work items in launch order: the group, the first entry of the row table and the number of rows of each.

    Item i reads `segments[:, indptr[i]:indptr[i + 1]]`, whose lines are those of Plan.segments.
    """

    group: Longs
    row0: Longs
    rows: Ints | Longs
    indptr: Longs
    segments: Ints


def run_tokens_of(page_size: int) -> int:
    """Returns the tokens of a packed run: their KV slots are consecutive, so it must not cross pages."""
    return RUN_TOKENS if page_size >= RUN_TOKENS else 1


def lower_by_request(plan: Plan, problem: Problem, room: ItemRoom) -> RequestSchedule:
    """Makes the schedule of a plan of a tree by request, in one kernel config and one round.

    Where the plan cuts a node's tokens, entries are cut at the last multiple of a tile or page before that, counted
    from the beginning of the node.

    Args:
        plan: The groups.
        problem: A tree by request in which each request has one row, the attention shape and the target.
        room: The kernel config and the room of items.

    Raises:
        InputError: The tree does not say which request its tokens belong to.
    """
    tree = problem.tree
    requests = tree.requests
    if requests is None:
        raise InputError("tree", str(tree), "does not say which request its tokens belong to", "use Tree.from_requests")
    row_table, first_row = row_table_of(plan, tree)
    items = _items(plan, tree, first_row, rows_per_tile(room.config.rows, problem.shape.group))
    entries, most_tokens = _entries(items.segments, tree, requests, room)
    (tile0, run0), (tile_room, run_room) = regions(most_tokens, items.indptr[:-1], room)
    partial0, merges = _merges(items, row_table, tree.num_rows)

    table = np.zeros((len(items.rows), len(ITEM_FIELDS)), np.int32)
    row0, rows, of_tiles, _, of_packed, _, of_slots, group = table.T
    row0[:], rows[:], of_tiles[:], of_packed[:] = items.row0, items.rows, tile0, run0
    of_slots[:], group[:] = partial0, items.group
    merged = frozen(requests.seat.take(merges.rows))
    listed = frozen(requests.seat.take(row_table))
    schedule = schedule_of_tables(room.config, frozen(table), listed, merged, merges.indptr, merges.slots)
    by_seat = of_seats(requests, room.reserve, row_table, merges.rows)
    return RequestSchedule(schedule, entries, frozen(items.indptr), tile_room, run_room, *by_seat)


def schedule_of_tables(
    config: KernelConfig, items: Ints, rows: Ints, merge_rows: Ints, merge_indptr: Ints, merge_partials: Ints
) -> Schedule:
    """Makes the schedule of one kernel config and one round, without KV runs, of read-only tables."""
    return Schedule.trusted(
        configs=(config,),
        config_indptr=config_offsets((0, len(items))),
        items=items,
        rows=rows,
        tiles=_NO_RUNS,
        packed_runs=_NO_RUNS,
        merge_rows=merge_rows,
        merge_indptr=merge_indptr,
        merge_partials=merge_partials,
        round_indptr=config_offsets((0, 1)),
        merge_round_indptr=config_offsets((0, len(merge_rows))),
        work_indptr=_NO_WORK,
        work=_NONE,
        epilogue_indptr=NO_EPILOGUE.indptr,
        epilogue_partials=NO_EPILOGUE.slots,
        row_positions=_NONE,
        fixed=False,
    )


def _items(plan: Plan, tree: Tree, first_row: Longs, height: int) -> _Items:
    """Cuts groups into work items of at most `height` rows, the longest first.

    Items of one length that begin with the same tokens are neighbours. first_row: the first entry of each group in the
    row table.
    """
    group, row0, segments = ramp(len(plan)), first_row, plan.segments
    rows: Ints | Longs = plan.group_rows
    indptr = plan.segment_indptr.astype(np.int64)
    counts = indptr[1:] - indptr[:-1]
    filled = np.count_nonzero(counts) == np.count_nonzero(rows) == len(rows)
    if not filled or (len(rows) and largest(rows) > height):
        runs = Runs.of_table(indptr, segments.take(_AS_RUNS, 0).T)
        cut, runs = cut_rows(plan, runs, np.array([[height]]), whole=False)
        group, row0, rows = cut.group, first_row.take(cut.group) + cut.begin, cut.rows
        indptr, segments, counts = runs.indptr, runs.table.T.take(_AS_SEGMENTS, 0), runs.counts
    first = indptr[:-1]
    read = offsets(segments[2] - segments[1]).take(indptr)
    tokens = read[1:] - read[:-1]
    node, start = segments[:2].take(first, 1)
    # First tokens and numbers of tokens have 31 bits each.
    key = tree.kv.start.take(node) + start - (tokens << number(32))
    order = key.argsort(kind="stable")
    counts = counts.take(order)
    places = offsets(counts)
    segments = segments.take(ragged_ranges(first.take(order), counts, places), 1)
    return _Items(group.take(order), row0.take(order), rows.take(order), places, segments)


def _entries(segments: Ints, tree: Tree, requests: RequestKV, room: ItemRoom) -> tuple[Ints, Longs | Ints]:
    """Makes an entry of each segment, and the most tokens that it can have until the next plan."""
    node, _, stop, lo, hi = segments
    place = node.astype(np.int64)
    owner, first, end = requests.of_nodes.take(place, 1)
    opened, to_end, begin = end == 0, stop == tree.tokens.take(place), 0
    if np.count_nonzero(to_end) < len(to_end):
        unit = max(room.config.tokens, room.page_size)
        begin, cut = segments[1:3] & -unit
        opened &= to_end
        stop, end = np.where(to_end, stop, cut), np.where(to_end, end, first + cut)
        first += begin
        nothing = (stop == begin).nonzero()[0]  # at any place but 0, as an end of 0 means the present length
        first[nothing] = end[nothing] = unit
    entries = np.empty((len(node), len(ENTRY_FIELDS)), np.int32)
    for column, values in enumerate((owner, first, end, lo, hi)):
        entries[:, column] = values
    return frozen(entries), stop - begin + opened * number(room.reserve)


def regions(most_tokens: Longs | Ints, items: Longs, room: ItemRoom) -> tuple[Longs, list[int]]:
    """Gives each item room in the tables of full tiles and of packed runs.

    Args:
        most_tokens: The most tokens of each entry.
        items: The first entry of each item.
        room: The kernel config, the page size and the reserve.

    Returns:
        Where each item's tiles and packed runs begin, `[2, items]`; and the room of all items in both tables.
    """
    tokens, run_tokens = room.config.tokens, run_tokens_of(room.page_size)
    packed, size = tokens // run_tokens, (tokens.bit_length() - 1, run_tokens.bit_length() - 1)
    counts = np.empty((2, len(most_tokens)), np.int64)
    np.right_shift(most_tokens, size[0], out=counts[0])
    # A request may have fewer tokens by now than when this was planned.
    np.right_shift(np.minimum(most_tokens, tokens - 1) + (run_tokens - 1), size[1], out=counts[1])
    ends = np.zeros((2, len(items) + 1), np.int64)
    of_items = np.add.reduceat(counts, items, axis=1)
    of_items[1] = (of_items[1] + (packed - 1)) & -packed
    np.add.accumulate(of_items, 1, out=ends[:, 1:])
    return ends[:, :-1], ends[:, -1].tolist()


def _merges(items: _Items, row_table: Ints, num_rows: int) -> tuple[Longs | int, Merges]:
    """Finds the first partial slot of each item, and lists the merges. Every row has an item, because it has tokens."""
    rows = items.rows
    if int(np.add.reduce(rows)) == num_rows:
        return -1, no_merges(ramp(0), 1)
    ends = offsets(rows)
    row = row_table.take(ragged_ranges(items.row0, rows, ends))
    partials, partial0 = np.bincount(row), ends[:-1]
    partial = np.maximum.reduceat(partials.take(row), partial0) > 1
    if np.count_nonzero(partial) == len(partial):
        return partial0, single_round_merges(row, ramp(len(row)), lengths=partials)
    row = row[partial.repeat(rows)]
    return np.where(partial, offsets(rows * partial)[:-1], -1), single_round_merges(row, ramp(len(row)))


def of_seats(requests: RequestKV, reserve: int, listed: Ints | Longs, merged: Ints | Longs) -> tuple[Ints, Ints]:
    """Makes the columns SEAT_FIELDS of every seat, and the table of claims.

    Args:
        requests: The requests of the tree.
        reserve: Tokens that a request may gain until the next plan.
        listed: The request of each entry of the row table; a seat points to the first of its request's entries.
        merged: The request of each merged row, likewise.
    """
    seat, ranges = requests.seat, requests.shared_ranges()
    rows, one = len(seat), np.int32(1)
    gaps = rows and (largest(seat) >= rows or np.count_nonzero(seat != int32_ramp(rows)) > 0)
    width = rows + 1 if gaps else rows  # the last column is for seats without a request
    known = UNKNOWN.repeat(width).reshape(len(UNKNOWN), width)
    epoch, most, least, place, merge, owner, first_page, end_page, claim0, claim1 = known[:, :rows]
    epoch[:], most[:] = requests.epoch, requests.length + number(reserve)
    if requests.least is not None:
        least[:] = requests.least
    place[listed[::-1]], merge[merged[::-1]] = int32_ramp(len(listed))[::-1], int32_ramp(len(merged))[::-1]
    if ranges.size:
        claiming, first = ranges[0].astype(np.int64), int32_ramp(ranges.shape[1])
        end, new, of_first = first + one, claiming[1:] != claiming[:-1], ranges[1:]
        if np.count_nonzero(new) < len(new):  # some requests have pages of several others
            begin = np.append(True, new).nonzero()[0]
            claiming, first, of_first = claiming.take(begin), int32_ramp(len(end)).take(begin), of_first.take(begin, 1)
            end = np.append(first[1:], np.int32(len(end)))
        owner[claiming], first_page[claiming], end_page[claiming] = of_first
        claim0[claiming], claim1[claiming] = first + one, end
    if gaps:
        row_of = np.full(largest(seat) + 1, rows)
        row_of[seat] = ramp(rows)
        known = known.take(row_of, 1)
    return frozen(known), frozen(ranges[1:].T)
