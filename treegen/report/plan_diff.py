"""Comparisons of two plans of one tree: the groups that both have, and the nodes that they read differently."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Longs
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree


@dataclass(frozen=True, slots=True, eq=False)
class Readings:
    """How groups of a plan read nodes, with an entry for each node and group that reads it.

        entries of node i     indptr[i] : indptr[i + 1], in order of group
        segments of entry e   segment[segment_indptr[e] : segment_indptr[e + 1]], in order of start

    `rows` and `pieces` number the rows of an entry's group, and its segments with the rows that see them. Equal numbers
    mean equal rows or pieces, also between two plans.
    """

    indptr: Longs
    group: Longs
    rows: Longs
    pieces: Longs
    segment_indptr: Longs
    segment: Longs

    @property
    def owner(self) -> Longs:
        """The position of each entry's node, `[entries]`."""
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The common groups of two plans of one tree, and their differences.

    Two groups are the same if the same rows read the same segments, in any order. A node is read differently if a group
    reads it that only one plan has.

    Args:
        same: `[count, 2]`: numbers of the groups that both plans have, in order of the first plan.
        only: Numbers of the groups that only the first plan has, and that only the second has, ascending.
        nodes: Nodes that are read differently, in depth-first order.
        same_rows: `[nodes]`: whether in both plans the same rows read the node in the same pieces. Then only the other
            nodes that these groups read differ.
        readings: How the `only` groups of each plan read `nodes`.
    """

    same: Longs
    only: tuple[Longs, Longs]
    nodes: Longs
    same_rows: npt.NDArray[np.bool_]
    readings: tuple[Readings, Readings]


def compare(first: Plan, second: Plan, tree: Tree) -> Comparison:
    """Compares two plans that obey the coverage law on `tree`."""
    same, *only = _matched(_group_keys(first), _group_keys(second))
    preorder = tree.topology.preorder
    segments = [np.flatnonzero(np.isin(p.segment_group, own)) for p, own in zip((first, second), only, strict=True)]
    nodes = np.unique(np.concatenate([first.node[segments[0]], second.node[segments[1]]])).astype(np.int64)
    nodes = nodes[np.argsort(preorder[nodes])]
    place = np.full(len(preorder), -1, np.int64)
    place[nodes] = np.arange(len(nodes))
    rows: dict[bytes, int] = {}
    pieces: dict[bytes, int] = {}
    one = _readings(first, segments[0], place, len(nodes), rows, pieces)
    two = _readings(second, segments[1], place, len(nodes), rows, pieces)
    return Comparison(same, (only[0], only[1]), nodes, _agreeing(one, two), (one, two))


def _matched(first: Sequence[Hashable], second: Sequence[Hashable]) -> tuple[Longs, Longs, Longs]:
    """Returns pairs of positions with equal keys, each position once, and the remaining positions of both."""
    waiting: defaultdict[Hashable, list[int]] = defaultdict(list)
    for position in reversed(range(len(second))):
        waiting[second[position]].append(position)
    pairs = [(position, waiting[key].pop()) for position, key in enumerate(first) if waiting.get(key)]
    same = np.array(pairs, np.int64).reshape(-1, 2)
    return same, np.setdiff1d(np.arange(len(first)), same[:, 0]), np.setdiff1d(np.arange(len(second)), same[:, 1])


def _group_keys(plan: Plan) -> list[tuple[bytes, bytes]]:
    """Returns keys of every group: its rows, and its segments in the order of their columns.

    All empty seen intervals have the same key.
    """
    seen = plan.seen_hi > plan.seen_lo
    columns = [plan.node, plan.start, plan.stop, np.where(seen, plan.seen_lo, 0), np.where(seen, plan.seen_hi, 0)]
    keys: list[npt.NDArray[Any]] = [*columns, plan.segment_group]
    order = np.lexsort(keys)
    return list(zip(_row_keys(plan), _slices(_table(columns)[order], plan.segment_indptr), strict=True))


def _row_keys(plan: Plan) -> list[bytes]:
    return _slices(_table((plan.row_lo, plan.row_hi)), plan.row_indptr)


def _table(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.stack(columns, axis=1)


def _slices(table: npt.NDArray[Any], indptr: npt.NDArray[Any]) -> list[bytes]:
    """Returns the rows of the table between offsets, as bytes."""
    data, width = np.ascontiguousarray(table).tobytes(), table.itemsize * table.shape[1]
    ends = (indptr.astype(np.int64) * width).tolist()
    return [data[begin:end] for begin, end in pairwise(ends)]


def _readings(
    plan: Plan, segment: Longs, place: Longs, nodes: int, rows: dict[bytes, int], pieces: dict[bytes, int]
) -> Readings:
    """Returns the readings of nodes at `place` by the groups of these segments.

    rows, pieces: known numbers; new ones are added.
    """
    # A piece that all rows of a group see has the same number for any number of rows.
    seen = plan.seen_hi > plan.seen_lo
    seen_lo = np.where(seen, plan.seen_lo, 0)
    seen_hi = np.where(seen, np.where(plan.masked, plan.seen_hi, -1), 0)
    columns = [seen_hi, seen_lo, plan.stop, plan.start]
    keys: list[npt.NDArray[Any]] = [*columns, plan.segment_group, place[plan.node]]
    order = np.lexsort([key[segment] for key in keys])
    segment = segment[order]
    group, owner = plan.segment_group[segment], place[plan.node[segment]]
    new = np.append(True, (group[1:] != group[:-1]) | (owner[1:] != owner[:-1]))[: len(segment)]
    begin = np.flatnonzero(new)
    segment_indptr = np.append(begin, len(segment))
    table = _table([column[segment] for column in columns])
    row_keys = _row_keys(plan)
    return Readings(
        np.searchsorted(owner[begin], np.arange(nodes + 1)),
        group[begin],
        np.array([rows.setdefault(row_keys[g], len(rows)) for g in group[begin].tolist()], np.int64),
        np.array([pieces.setdefault(key, len(pieces)) for key in _slices(table, segment_indptr)], np.int64),
        segment_indptr,
        segment,
    )


def _agreeing(first: Readings, second: Readings) -> npt.NDArray[np.bool_]:
    """Returns for every node whether both have the same number of entries with the same rows and pieces."""
    owner, rows, pieces = (
        np.concatenate(pair)
        for pair in ((first.owner, second.owner), (first.rows, second.rows), (first.pieces, second.pieces))
    )
    balance = np.repeat([1, -1], [len(first.group), len(second.group)])
    order = np.lexsort((pieces, rows, owner))
    owner, rows, pieces = owner[order], rows[order], pieces[order]
    new = (owner[1:] != owner[:-1]) | (rows[1:] != rows[:-1]) | (pieces[1:] != pieces[:-1])
    number = np.cumsum(np.append(True, new)[: len(owner)]) - 1
    unequal = np.bincount(number, balance[order]) != 0
    result = np.ones(len(first.indptr) - 1, bool)
    result[owner[unequal[number]]] = False
    return result
