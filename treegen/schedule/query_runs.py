"""Lowering by request where requests have several query rows: drafts to verify, or the chunk of a prompt.

A request's rows are its last tokens. Each sees itself and the tokens before it. The node of a request that ends with
these tokens is seen by its first row up to that row's own token, and by each later row up to one token more. With three
rows:

    node     tokens 0 ................................... own        own + 1        own + 2
    entries  [ page .... page ) [ page ........ length - 2 )        [ length - 2 ]  [ length - 1 ]

Kernels with a mask that hides all tokens behind a row (`Scoring.causal`) have one entry in place of the last three. It
has all three rows.

An entry begins at a page, and where the plan cuts the node it also ends at a page. All other places count from the
request's present length, so that they stay right while the request grows.

A cut of the plan may lie among the own tokens of an item's rows. It counts from the request's length, unless the first
row's own token is behind it. If the items on both sides of a cut begin with different rows, they could put the cut in
different places. Then all cuts among the request's own tokens count from its length (its node is *split*), and each
token behind such a cut has an entry of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Ints, Longs, frozen, offsets, positions, ramp
from treegen.ir.plan import Plan
from treegen.ir.request_schedule import ENTRY_FIELDS, Queries, RequestSchedule
from treegen.ir.schedule import Schedule
from treegen.ir.tree import Tree
from treegen.ir.tree.request_kv import RequestKV
from treegen.ir.work_items import RUN_FIELDS
from treegen.schedule.arrangement import Arranged, Frame, arrange, row_table_of
from treegen.schedule.by_request import ItemRoom, lower_by_request, of_seats, regions
from treegen.schedule.lower import scheduled
from treegen.schedule.pack_runs import PackedTables
from treegen.schedule.segment_runs import Runs
from treegen.target.problem import Problem

_NO_RUNS = frozen(np.empty((0, len(RUN_FIELDS))))


def lower_requests(plan: Plan, problem: Problem, room: ItemRoom) -> RequestSchedule:
    """Makes the schedule of a plan of a tree by request, in which requests have one query row or several."""
    requests = problem.tree.requests
    several = requests is not None and requests.queries is not None
    return lower_queries(plan, problem, room) if several else lower_by_request(plan, problem, room)


def lower_queries(plan: Plan, problem: Problem, room: ItemRoom) -> RequestSchedule:
    """Makes the schedule of a plan of a tree by request in which requests have several query rows."""
    tree, requests = problem.tree, problem.tree.requests
    assert requests is not None
    assert requests.queries is not None
    arranged = arrange(plan, problem, Frame((room.config,), 1))
    arranged = arranged._replace(runs=joined_runs(arranged.runs, tree, requests.queries if room.causal else None))
    arranged, split = split_nodes(plan, arranged, tree, requests.queries)
    entries, most_tokens, least = _entries(plan, arranged, tree, requests, room, split)
    (tile0, run0), (tile_room, run_room) = regions(most_tokens, arranged.runs.indptr[:-1], room)
    nothing = np.zeros(len(tile0), np.int64)
    tables = PackedTables(_NO_RUNS, _NO_RUNS, (tile0, nothing, run0, nothing))
    made = scheduled(plan, problem, arranged, (room.config,), tables, framed=True)
    request = ramp(len(requests.seat)).repeat(requests.queries)
    listed, merged = request.take(made.rows), request.take(made.merge_rows)
    of_rows = made.changed(rows=frozen(requests.seat.take(listed)), merge_rows=frozen(requests.seat.take(merged)))
    least = least if requests.least is None else np.maximum(least, requests.least)
    by_seat = of_seats(replace(requests, least=frozen(least)), room.reserve, listed, merged)
    queries = queries_of(made, requests, by_seat[0].shape[1])
    return RequestSchedule(of_rows, entries, frozen(arranged.runs.indptr), tile_room, run_room, *by_seat, queries)


class OwnTokens(NamedTuple):
    """Two columns, with a line for each run.

    several: whether the run lies in the last node of a request of several rows. token: the number, in that node, of
    the own token of the first row that sees the run. In split nodes, of the request's first row.
    """

    several: Bools
    token: Longs

    def begin_among(self, first: Ints | Longs) -> Bools:
        """Says which runs begin among own tokens, and not at the node's first token. first: their first tokens."""
        among: Bools = self.several & (first > 0) & (first >= self.token)
        return among

    def end_among(self, end: Ints | Longs) -> Bools:
        """Says which runs end among own tokens. end: the tokens behind their last ones."""
        among: Bools = self.several & (end >= self.token)
        return among


def several_rows(tree: Tree, queries: Ints) -> Bools:
    """Says which nodes are the last ones of requests of several rows. queries: query rows of each request."""
    several = np.zeros(len(tree.tokens), np.bool_)
    several[tree.row_node[offsets(queries)[:-1]]] = queries > 1
    return several


def joined_runs(runs: Runs, tree: Tree, queries: Ints | None = None) -> Runs:
    """Joins consecutive runs of one node that the same rows see.

    Args:
        runs: The runs of all items.
        tree: A tree by request.
        queries: Query rows of each request, where the kernel's mask hides what is behind a row. All runs of the last
            node of a request with several rows are then joined, if they begin before the rows' own tokens. The first
            one has all rows of the item that see any of them. None where runs have to hide it.
    """
    start, length, lo, hi = runs.table.T
    node = tree.kv.start.searchsorted(start, "right") - 1
    apart = np.ones(len(start), np.bool_)
    apart[1:] = (start[1:] != start[:-1] + length[:-1]) | (node[1:] != node[:-1])
    apart[runs.indptr[:-1]] = True
    begins = apart.copy()
    begins[1:] |= (lo[1:] != lo[:-1]) | (hi[1:] != hi[:-1])
    if queries is not None:
        own = tree.kv.start + tree.tokens  # where the own tokens of a node's rows begin
        own[tree.row_node[offsets(queries)[:-1]]] -= queries
        begin = start[apart][apart.cumsum() - 1]
        inside = (begin >= own[node]) & (begin > tree.kv.start[node])
        begins &= apart | inside | ~several_rows(tree, queries)[node]
    first = begins.nonzero()[0]
    table = runs.table[first]
    table[:, 1] = np.add.reduceat(length, first) if len(first) else 0
    return Runs.of_table(offsets(begins)[runs.indptr], table)


def own_tokens(plan: Plan, tree: Tree, queries: Ints, arranged: Arranged, node: Longs) -> OwnTokens:
    """Finds the own tokens of runs. queries: query rows of each request. node: the node of each run."""
    items, runs = arranged.items, arranged.runs
    several = several_rows(tree, queries)
    rows, row0 = row_table_of(plan, tree)
    row = (row0[items.group] + items.begin).repeat(runs.counts) + runs.table[:, 2]
    return OwnTokens(several[node], tree.row_sees[rows[row]].astype(np.int64) - 1)


def split_nodes(plan: Plan, arranged: Arranged, tree: Tree, queries: Ints) -> tuple[Arranged, Bools]:
    """Finds split nodes: the items on both sides of some cut have different first rows, and so different places for it.

    The groups on both sides of a cut have other rows where it lies among own tokens, or where other requests are in
    one of them. Then items that a group is cut into by rows begin with other rows as well.

    Returns:
        The arrangement, with one run for each token of split nodes behind a cut among own tokens; and which nodes are
        split nodes.
    """
    split = np.zeros(len(tree.tokens), np.bool_)
    if not np.count_nonzero(arranged.items.begin):
        return arranged, split
    start, length, _, _ = arranged.runs.table.T.astype(np.int64)
    node = tree.kv.start.searchsorted(start, "right") - 1
    first = start - tree.kv.start.take(node)
    end = first + length
    own = own_tokens(plan, tree, queries, arranged, node)
    begins, ends = (own.several & (first > 0)).nonzero()[0], (own.several & (end < tree.tokens.take(node))).nonzero()[0]
    cut = np.append(start.take(begins), (start + length).take(ends))
    among = np.append(own.begin_among(first).take(begins), own.end_among(end).take(ends))
    order = cut.argsort(kind="stable")
    cut, among = cut.take(order), among.take(order)
    unlike = (cut[1:] == cut[:-1]) & (among[1:] != among[:-1])
    if not np.count_nonzero(unlike):
        return arranged, split
    split[tree.kv.start.searchsorted(cut[1:][unlike] - 1, "right") - 1] = True
    apart = split.take(node) & (first > 0) & (first >= _of_first_row(tree, queries).take(node))
    counts = np.where(apart, length, 1)
    at = positions(offsets(counts), counts)
    table = arranged.runs.table.repeat(counts, 0)
    table[:, 0] += at
    table[apart.repeat(counts), 1] = 1
    indptr = offsets(counts)[arranged.runs.indptr]
    return arranged._replace(runs=Runs.of_table(indptr, table)), split


def _of_first_row(tree: Tree, queries: Ints) -> Longs:
    """Returns, for the last nodes of requests, the number of the first row's own token."""
    own = tree.tokens.astype(np.int64)
    own[tree.row_node[offsets(queries)[:-1]]] -= queries
    return own


def least_tokens(entries: Ints, own: OwnTokens, tokens: Ints, tree: Tree, requests: RequestKV) -> Longs:
    """Finds the least length of each request for which its entries are right.

    The entries of a request of one row are right for any length. With several rows, the first ones see less than the
    whole length, so entries that end at a page have to end before their own tokens.

    Args:
        entries: The entries of all items.
        own: The own tokens of the entries' runs.
        tokens: Tokens of each entry's node.
        tree: A tree by request.
        requests: The requests of the tree.
    """
    assert requests.queries is not None
    before = requests.first[tree.row_node[offsets(requests.queries)[:-1]]].astype(np.int64)
    least = np.where((before > 0) & (requests.queries > 1), before + requests.queries, 0)
    request = np.zeros(requests.seat.max(initial=-1) + 1, np.int64)
    request[requests.seat] = ramp(len(requests.seat))
    at_page = own.several & (entries[:, 1] >= 0) & (entries[:, 2] > entries[:, 1])
    behind = tokens[at_page] - own.token[at_page]
    np.maximum.at(least, request[entries[at_page, 0]], entries[at_page, 2] + behind)
    to_own = own.several & (entries[:, 1] > 0) & (entries[:, 2] <= 0)
    np.maximum.at(least, request[entries[to_own, 0]], entries[to_own, 1] - entries[to_own, 2])
    return least


def _entries(
    plan: Plan, arranged: Arranged, tree: Tree, requests: RequestKV, room: ItemRoom, split: Bools
) -> tuple[Ints, Longs, Longs]:
    """Makes an entry of each run. split: see split_nodes.

    Returns:
        The entries, the most tokens that each can have until the next plan, and for each request the least length for
        which its entries are right.
    """
    assert requests.queries is not None
    runs, unit = arranged.runs.table, max(room.config.tokens, room.page_size)
    node = tree.kv.start.searchsorted(runs[:, 0], "right") - 1
    first = runs[:, 0] - tree.kv.start.take(node)
    end, tokens, base = first + runs[:, 1], tree.tokens.take(node), requests.first.take(node)
    to_end = end == tokens
    own = own_tokens(plan, tree, requests.queries, arranged, node)
    if np.count_nonzero(split):
        own = own._replace(token=np.where(split[node], _of_first_row(tree, requests.queries)[node], own.token))
    opened = (to_end & requests.open.take(node)) | own.end_among(end)
    first -= np.where(own.begin_among(first), tokens, first % unit)
    entries = np.empty((len(runs), len(ENTRY_FIELDS)), np.int32)
    entries[:, 0] = requests.owner.take(node)
    entries[:, 1] = np.where(first < 0, first, base + first)
    entries[:, 3:] = runs[:, 2:4]
    end = np.where(to_end | opened, end, end - end % unit)
    entries[:, 2] = np.where(opened, end - tokens, base + end)
    entries[(end == first) & ~opened, 1:3] = unit  # empty, at any place but 0, as an end of 0 means the length
    most_tokens = np.where(first < 0, runs[:, 1], end - first + opened * room.reserve).astype(np.int64)
    return frozen(entries), most_tokens, least_tokens(entries, own, tokens, tree, requests)


def queries_of(made: Schedule, requests: RequestKV, seats: int) -> Queries:
    """Makes the columns of query rows. made: a schedule with rows of the tree."""
    assert requests.queries is not None
    number = positions(offsets(requests.queries), requests.queries)
    rows = np.ones(seats, np.int32)
    rows[requests.seat] = requests.queries
    return Queries(frozen(rows), frozen(number[made.rows]), frozen(number[made.merge_rows]))
