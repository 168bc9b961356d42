"""Differences between two plans in words: a line for each kind of difference and depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Longs
from treegen.ir.groups import Group, Segment
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree
from treegen.report.plan_diff import Comparison, Readings

_MOST_LISTED = 4  # pieces, row sets or other nodes to list
_ALONE, _ABOVE, _BELOW, _ELSEWHERE = 1, 2, 4, 8  # places of the other nodes that a group reads


def reading_lines(
    plans: tuple[Plan, Plan], names: tuple[str, str], comparison: Comparison, tree: Tree, most_lines: int
) -> list[str]:
    """Returns a line for each kind of difference and depth, which describes its first node.

    Nodes that are read with other rows or in other pieces come first, then those that are only read together with other
    nodes. Where there are more than `most_lines` lines, a line covers all depths; further ones are left out.
    """
    one, two = (
        _Side.of(plan, name, readings, comparison.nodes, tree)
        for plan, name, readings in zip(plans, names, comparison.readings, strict=True)
    )
    depth = tree.topology.depth[comparison.nodes].astype(np.int64)
    in_both = _groups_in_both(plans[0], comparison)
    kinds = np.column_stack([comparison.same_rows, in_both > 0, one.kinds(), two.kinds()])
    configs = _configs(kinds, depth, np.column_stack([kinds, depth]))
    if len(configs) > most_lines:
        configs = _configs(kinds, depth, kinds)
    lines = []
    for members in configs[:most_lines]:
        first = int(members[0])
        text = _difference_text(one, two, first, bool(comparison.same_rows[first]))
        also = f"apart from {_counted(int(in_both[first]), 'group')} in both, " if in_both[first] else ""
        others = _others_text(members[1:], depth, one, two)
        lines.append(f"{one.node_text(first)}: {also}{text}{others}")
    left = sum(len(members) for members in configs[most_lines:])
    return [*lines, f"... {_counted(left, 'more node')}"] if left else lines


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One plan's side of a comparison. Methods take the position of a node in `nodes`."""

    plan: Plan
    name: str
    readings: Readings
    nodes: Longs
    tokens: Longs  # tokens of every node that some row sees; all tokens where no row sees any
    beside: Longs  # for every entry the places of the other nodes that its group reads
    preorder: Longs

    @classmethod
    def of(cls, plan: Plan, name: str, readings: Readings, nodes: Longs, tree: Tree) -> _Side:
        """Makes the side of this plan."""
        spans = tree.topology.spans
        visible = np.zeros(len(tree.tokens), np.int64)
        np.maximum.at(visible, spans.node, spans.stop)
        tokens = np.where(visible > 0, visible, tree.tokens)[nodes]
        beside = _beside(plan, readings, nodes, tree)
        return cls(plan, name, readings, nodes, tokens, beside, tree.topology.preorder.astype(np.int64))

    def kinds(self) -> npt.NDArray[np.int64]:
        """Returns columns that describe how every node is read.

        They are: read at all, in several pieces, by several row sets, evenly, as a whole, masked, and the places of
        other nodes.
        """
        readings, plan = self.readings, self.plan
        owner, count = readings.owner, len(self.nodes)
        groups = np.diff(readings.indptr)
        pieces, rows = (_distinct(owner, number, count) for number in (readings.pieces, readings.rows))
        begin = readings.segment_indptr[:-1]
        masked = plan.masked[readings.segment]
        first = readings.segment[begin]
        ends = self.tokens[owner]
        whole = (np.diff(readings.segment_indptr) == 1) & (plan.start[first] == 0) & (plan.stop[first] == ends)
        hidden = np.bincount(np.repeat(owner, np.diff(readings.segment_indptr)), masked, count)
        beside = np.zeros(count, np.int64)
        np.bitwise_or.at(beside, owner, self.beside)
        every_whole = np.bincount(owner, whole, count) == groups
        columns = (groups > 0, pieces > 1, rows > 1, groups == pieces * rows, every_whole, hidden > 0, beside)
        return np.stack([column.astype(np.int64) for column in columns], axis=1)

    def node_text(self, node: int) -> str:
        """Returns the node with its seen tokens, in the form of a plan's segment."""
        return f"n{self.nodes[node]}[0:{self.tokens[node]}]"

    def entries(self, node: int) -> slice:
        """Returns the positions of the node's entries."""
        return slice(int(self.readings.indptr[node]), int(self.readings.indptr[node + 1]))

    def reading_text(self, node: int) -> str:
        """Describes how often, in which pieces and with which rows the node is read; empty if it is not read."""
        by_rows: dict[int, list[int]] = {}
        entries = range(self.entries(node).start, self.entries(node).stop)
        for entry, rows in zip(entries, self.readings.rows[self.entries(node)].tolist(), strict=True):
            by_rows.setdefault(rows, []).append(entry)
        by_pieces: dict[tuple[int, ...], list[list[int]]] = {}
        for of_rows in by_rows.values():
            by_pieces.setdefault(tuple(self.readings.pieces[of_rows].tolist()), []).append(of_rows)
        alike = list(by_pieces.values())
        texts = [self._times_text(node, copies) for copies in alike[:_MOST_LISTED]]
        left = sum(len(of_rows) for copies in alike[_MOST_LISTED:] for of_rows in copies)
        return " and ".join([*texts, f"in {_counted(left, 'more group')}"] if left else texts)

    def _times_text(self, node: int, copies: list[list[int]]) -> str:
        """Describes several row sets that read the same pieces. copies: a list of entries for each row set."""
        pieces = [self._piece_text(entry) for entry in copies[0][:_MOST_LISTED]]
        rows = _listed([self._rows_text(of_rows[0]) for of_rows in copies[:_MOST_LISTED]], len(copies), " / ")
        often = {1: "once", 2: "twice"}.get(len(copies), f"{len(copies)} times")
        if len(copies[0]) > 1:
            times = "" if len(copies) == 1 else f"{often} "
            cut = f"{times}in {len(copies[0])} pieces {_listed(pieces, len(copies[0]), ' ')}"
        else:
            cut = often if pieces[0] == f"[0:{self.tokens[node]}]" else f"{often} as {pieces[0]}"
        return f"{cut} with rows {rows}"

    def _rows_text(self, entry: int) -> str:
        plan, group = self.plan, self.readings.group[entry]
        intervals = range(int(plan.row_indptr[group]), int(plan.row_indptr[group + 1]))
        texts = [f"{plan.row_lo[i]}-{plan.row_hi[i] - 1}" for i in intervals[:_MOST_LISTED]]
        return _listed(texts, len(intervals), ",")

    def _piece_text(self, entry: int) -> str:
        plan, readings = self.plan, self.readings
        segments = readings.segment[readings.segment_indptr[entry] : readings.segment_indptr[entry + 1]]
        all_rows = ((0, int(plan.group_rows[readings.group[entry]])),)
        texts = []
        for i in segments[:_MOST_LISTED].tolist():
            node, start, stop = int(plan.node[i]), int(plan.start[i]), int(plan.stop[i])
            segment = Segment(node, start, stop, (int(plan.seen_lo[i]), int(plan.seen_hi[i])))
            texts.append(str(Group(all_rows, (segment,))).partition(f"| n{node}")[2])
        return _listed(texts, len(segments), " + ")

    def beside_text(self, node: int) -> str:
        """Describes the other nodes that the groups of this node's entries read."""
        entries = self.entries(node)
        where = int(np.bitwise_or.reduce(self.beside[entries], initial=0))
        if where in (0, _ALONE):
            return "alone"
        others = np.unique(self.plan.node[np.isin(self.plan.segment_group, self.readings.group[entries])])
        others = others[others != self.nodes[node]]
        others = others[np.argsort(self.preorder[others])]
        if len(others) <= _MOST_LISTED:
            text = ", ".join(f"n{other}" for other in others)
        else:
            relation = {_ABOVE: " above it", _BELOW: " below it"}.get(where & ~_ALONE, "")
            text = f"{len(others)} nodes{relation}"
        return f"{'partly ' if where & _ALONE else ''}together with {text}"


def _beside(plan: Plan, readings: Readings, nodes: Longs, tree: Tree) -> Longs:
    """Returns for every entry the places of the other nodes that its group reads."""
    begin = tree.topology.preorder.astype(np.int64)
    end = begin + tree.topology.subtree
    # The nodes of a group lie on one path if the subtree of each one ends after the last of them.
    first, last, path = (np.full(len(plan), value, np.int64) for value in (len(begin), -1, len(begin)))
    np.minimum.at(first, plan.segment_group, begin[plan.node])
    np.maximum.at(last, plan.segment_group, begin[plan.node])
    np.minimum.at(path, plan.segment_group, end[plan.node])
    first, last, path = first[readings.group], last[readings.group], path[readings.group]
    node = nodes[readings.owner]
    above, below = first < begin[node], last > begin[node]
    related = (path > last) | (~above & (last < end[node]))
    where = np.where(related, np.where(above, _ABOVE, 0) + np.where(below, _BELOW, 0), _ELSEWHERE)
    return np.where(first == last, _ALONE, where)


def _configs(kinds: npt.NDArray[np.int64], depth: Longs, keys: npt.NDArray[np.int64]) -> list[Longs]:
    """Groups positions by equal keys, ascending.

    Classes of nodes that other rows read come first, then configs are in order of depth and of position.
    """
    if not len(keys):
        return []
    order = np.lexsort(keys.T)
    new = (keys[order][1:] != keys[order][:-1]).any(axis=1)
    configs = np.split(order, np.flatnonzero(new) + 1)
    first = np.array([members[0] for members in configs])
    return [configs[i] for i in np.lexsort((first, depth[first], kinds[first, 0]))]


def _difference_text(one: _Side, two: _Side, node: int, same_rows: bool) -> str:
    first, second = one.reading_text(node), two.reading_text(node)
    beside = one.beside_text(node), two.beside_text(node)
    if same_rows:
        return f"both read it {first}; {one.name} {beside[0]}, {two.name} {beside[1]}"
    if beside != ("alone", "alone"):
        first, second = (
            f"{text}, {place}" if text else "" for text, place in zip((first, second), beside, strict=True)
        )
    reads = f"reads it {first}" if first else "does not read it"
    return f"{one.name} {reads}; {two.name} {second or 'does not read it'}"


def _others_text(others: Longs, depth: Longs, one: _Side, two: _Side) -> str:
    """Describes the further nodes of a line, with the numbers of groups that read them where these vary."""
    if not len(others):
        return ""
    low, high = int(depth[others].min()), int(depth[others].max())
    depths = f"depth {low}" if low == high else f"depths {low}-{high}"
    ranges = []
    for side in (one, two):
        groups = np.diff(side.readings.indptr)[others]
        if groups.min() < groups.max():
            ranges.append(f"{side.name} in {groups.min()}-{groups.max()} groups")
    varying = f" ({', '.join(ranges)})" if ranges else ""
    return f"; the same for {_counted(len(others), 'more node')} of {depths}{varying}"


def _groups_in_both(plan: Plan, comparison: Comparison) -> Longs:
    """Counts for every differing node the groups of both plans that also read it."""
    group = plan.segment_group
    chosen = np.isin(group, comparison.same[:, 0])
    pairs = np.unique(plan.node[chosen].astype(np.int64) * len(plan) + group[chosen])
    counts = np.bincount(pairs // max(len(plan), 1), minlength=int(comparison.nodes.max(initial=0)) + 1)
    return counts[comparison.nodes]


def _distinct(owner: Longs, number: Longs, count: int) -> Longs:
    """Counts the distinct numbers of every owner."""
    width = int(number.max(initial=0)) + 1
    return np.bincount(np.unique(owner * width + number) // width, minlength=count)


def _listed(texts: Sequence[str], count: int, separator: str) -> str:
    """Joins the first of `count` texts, and says how many more there are."""
    shown = separator.join(texts[:_MOST_LISTED])
    return shown if count <= _MOST_LISTED else f"{shown}{separator}... {count - _MOST_LISTED} more"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
