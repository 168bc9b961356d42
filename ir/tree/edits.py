"""Edits: rows grow by tokens, branch, and end; a tree becomes the tree of the next decoding step.

No Python loop runs over rows, nodes or tokens. The new tree shares the arrays that an edit leaves as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import (
    INT32_MAX,
    Ints,
    IntsLike,
    Longs,
    check_made,
    check_total,
    frozen,
    host_array,
    int32_array,
    offsets,
    positive_int,
    whole_numbers,
)
from treegen.ir.errors import TreeError
from treegen.ir.tree.kv import KVRuns
from treegen.ir.tree.page_tables import TreeParts
from treegen.ir.tree.taken_slots import TakenSlots
from treegen.ir.tree.topology import Topology, derive, with_longer_leaves

if TYPE_CHECKING:
    from treegen.ir.tree import Tree

Edited: TypeAlias = tuple[TreeParts, Topology]
"""The parts and the topology of the edited tree."""

_GIVE_SLOTS = "give the slots of the new tokens"


def appended(tree: Tree, rows: IntsLike | None, tokens: int, slots: npt.ArrayLike | None) -> Edited:
    """See Tree.appended."""
    tokens = positive_int("tokens", tokens, TreeError)
    chosen = _chosen_rows(rows, tree.num_rows)
    check_made("tokens", tokens, len(chosen) * tokens, "tokens")
    places = _given_slots(slots, len(chosen), tokens)
    if not len(chosen):
        return parts_of(tree), tree.topology
    if places is None:
        first = _next_slots(tree, chosen)
        _check_free(tree, chosen, first, tokens)
        places = first[:, None] + np.arange(tokens)
    else:
        check_unused(tree.kv, places.reshape(-1))
    own = _own_leaves(tree, chosen)
    node = tree.row_node[chosen]
    if own.all() and (tree.tokens[node] > 0).all():
        return _longer_leaves(tree, chosen, tokens, places)
    parts = split(parts_of(tree), chosen)
    parent, length, row_node, row_sees, kv = parts
    node = row_node[chosen].astype(np.int64)
    branching = np.flatnonzero(~own)
    above = node[branching]
    # A row that sees nothing of its node branches off above it: its visible tokens end with the parent.
    above = np.where(row_sees[chosen[branching]] == length[above], above, parent[above])
    node[branching] = len(parent) + np.arange(len(branching))
    parent = np.append(parent, above)
    length = np.append(length, np.zeros(len(branching), np.int64))
    length[node] += tokens
    row_node, row_sees = row_node.copy(), row_sees.copy()
    row_node[chosen], row_sees[chosen] = node, length[node]
    kv = kv.extended(len(parent), np.repeat(node, tokens), places.reshape(-1))
    return _derived(parent, length, row_node, row_sees, kv)


def _longer_leaves(tree: Tree, rows: Longs, tokens: int, places: Longs) -> Edited:
    """Returns the tree in which rows' own leaves get `tokens` more tokens each, in the slots `places` [rows, tokens].

    The leaves have tokens already.
    """
    node = tree.row_node[rows]
    more = np.zeros(len(tree.tokens), np.int64)
    more[node] = tokens
    length = tree.tokens + more
    check_total(length)
    row_sees = tree.row_sees.copy()
    row_sees[rows] = length[node]
    kv = tree.kv.extended(len(length), np.repeat(node, tokens), places.reshape(-1))
    parts = TreeParts(tree.parent, frozen(length), tree.row_node, frozen(row_sees), kv)
    return parts, with_longer_leaves(tree.topology, more)


def branched(tree: Tree, row: int, copies: int) -> Edited:
    """See Tree.branched."""
    copies = positive_int("copies", copies, TreeError)
    chosen = int(int32_array("row", [row], low=0, high=tree.num_rows - 1)[0])
    check_made("copies", copies, tree.num_rows + copies - 1, "rows")
    row_node = np.append(tree.row_node, np.full(copies - 1, tree.row_node[chosen]))
    row_sees = np.append(tree.row_sees, np.full(copies - 1, tree.row_sees[chosen]))
    return _derived(tree.parent, tree.tokens, row_node, row_sees, tree.kv)


def pruned(tree: Tree, rows: IntsLike) -> Edited:
    """See Tree.pruned."""
    if rows is None:
        raise TreeError("rows", None, "names no rows", "give the rows to end")
    kept = np.ones(tree.num_rows, bool)
    kept[_chosen_rows(rows, tree.num_rows)] = False
    return with_rows_kept(parts_of(tree), tree.topology, kept)


def with_rows_kept(parts: TreeParts, topology: Topology, kept: npt.NDArray[np.bool_]) -> Edited:
    """Returns the tree of the rows that are kept, without nodes that none of them uses."""
    # A node stays if a kept row is at or below it: if kept rows are among the ranks rank_lo:rank_hi.
    before = offsets(kept[topology.row_of_rank])
    stays = before[topology.rank_hi] > before[topology.rank_lo]
    if not stays.any():
        none = np.empty(0)
        return _derived(np.array([-1]), np.array([0]), none, none, KVRuns.contiguous([0]))
    node = np.flatnonzero(stays)
    number = np.cumsum(stays) - 1
    parent, tokens = parts.parent[node], parts.tokens[node]
    parent = np.where(parent >= 0, number[parent], -1)
    kv = parts.kv.of_ranges(node, np.zeros(len(node), np.int64), tokens)
    return _derived(parent, tokens, number[parts.row_node[kept]], parts.row_sees[kept], kv)


def without_unseen_nodes(parts: TreeParts) -> Edited:
    """Returns the tree without nodes that no row is at or below."""
    topology = derive(*parts[:4])
    if (topology.rank_hi > topology.rank_lo).all():
        return parts, topology
    return with_rows_kept(parts, topology, np.ones(len(parts.row_node), bool))


def parts_of(tree: Tree) -> TreeParts:
    """Returns the parts of a tree."""
    return TreeParts(tree.parent, tree.tokens, tree.row_node, tree.row_sees, tree.kv)


def _chosen_rows(rows: IntsLike | None, num_rows: int) -> Longs:
    """Returns row numbers, by default all. Raises TreeError for a row that does not exist or is named twice."""
    if rows is None:
        return np.arange(num_rows)
    chosen = int32_array("rows", rows, low=0, high=num_rows - 1)
    twice = np.bincount(chosen, minlength=1) > 1
    if twice.any():
        raise TreeError("rows", chosen.tolist(), f"names row {int(twice.argmax())} twice", "name every row once")
    return chosen.astype(np.int64)


def _given_slots(slots: npt.ArrayLike | None, rows: int, tokens: int) -> Longs | None:
    """Returns the slots of new tokens as `[rows, tokens]`, None for none; flat slots are for one token a row."""
    if slots is None:
        return None
    array = host_array("slots", slots)
    if array.shape != (rows, tokens) and not (tokens == 1 and array.shape == (rows,)):
        reason = f"does not match {rows} rows of {tokens} new tokens"
        raise TreeError("slots", f"shape {array.shape}", reason, f"give [{rows}, {tokens}] slots")
    flat = whole_numbers("slots", slots, array).reshape(-1)
    return int32_array("slots", flat, low=0, high=INT32_MAX - 1).astype(np.int64).reshape(rows, tokens)


def _own_leaves(tree: Tree, rows: Longs) -> npt.NDArray[np.bool_]:
    """Tells for each row whether it is the only row of a leaf, and sees all of it."""
    node = tree.row_node[rows]
    topology = tree.topology
    alone = topology.rank_hi[node] - topology.rank_lo[node] == 1
    own: npt.NDArray[np.bool_] = alone & (topology.subtree[node] == 1) & (tree.row_sees[rows] == tree.tokens[node])
    return own


def _next_slots(tree: Tree, rows: Longs) -> Longs:
    """Returns the slot after the last one that each row sees. Raises TreeError for a row that sees nothing."""
    node, sees = tree.row_node[rows].astype(np.int64), tree.row_sees[rows].astype(np.int64)
    while len(empty := np.flatnonzero(sees == 0)):
        node[empty] = tree.parent[node[empty]]
        if (node[empty] < 0).any():
            row = int(rows[empty[(node[empty] < 0).argmax()]])
            raise TreeError("slots", None, f"row {row} sees no token whose slot would lead to the next", _GIVE_SLOTS)
        sees[empty] = tree.tokens[node[empty]]
    return tree.kv.slots_at(node, sees - 1) + 1


def check_unused(kv: KVRuns, slots: Longs) -> None:
    """Raises TreeError for a slot that is named twice or holds a token, which writing there would destroy."""
    fix = "give every new token a slot of its own that holds no token"
    order = np.sort(slots)
    twice = order[1:] == order[:-1]
    if twice.any():
        raise TreeError("slots", slots.tolist(), f"names slot {order[twice.argmax()]} twice", fix)
    taken = TakenSlots.of(kv).holds(slots)
    if taken.any():
        raise TreeError("slots", slots.tolist(), f"slot {slots[taken.argmax()]} holds another token of the tree", fix)


def _check_free(tree: Tree, rows: Longs, slots: Longs, tokens: int) -> None:
    """Raises TreeError unless the `tokens` slots from each of these on are free, and differ."""
    short = TakenSlots.of(tree.kv).free_behind(slots) < tokens
    if short.any():
        row, slot = int(rows[short.argmax()]), int(slots[short.argmax()])
        reason = f"row {row} would go on in slots {slot}:{slot + tokens}, where other tokens are, or no slots"
        raise TreeError("slots", None, reason, _GIVE_SLOTS)
    order = np.argsort(slots, kind="stable")
    first = slots[order]
    same = first[1:] - first[:-1] < tokens
    if same.any():
        one, other = (int(rows[order[same.argmax() + step]]) for step in (0, 1))
        reason = f"rows {one} and {other} would both go on in slot {int(first[same.argmax() + 1])}"
        raise TreeError("slots", None, reason, _GIVE_SLOTS)


def split(parts: TreeParts, rows: Longs) -> TreeParts:
    """Returns the tree with nodes cut where these rows end: each row then sees all of its node, or nothing of it.

    node 4       [ 0 ............................ 50 ]     a row sees 16 of its tokens, another 32
    afterwards   [ 0 .. 16 ]                               node 4 keeps its number
                            [ 16 .. 32 ]                   node 9: new nodes follow all others
                                        [ 32 ..... 50 ]    node 10 gets the children of node 4
    """
    parent, tokens, row_node, row_sees, runs = parts
    nodes = len(parent)
    key = _key(row_node, row_sees)
    inside = (row_sees[rows] > 0) & (row_sees[rows] < tokens[row_node[rows]])
    cuts = np.unique(key[rows[inside]])
    if not len(cuts):
        return parts
    node, start = cuts >> 32, cuts & INT32_MAX
    number = nodes + np.arange(len(cuts))
    opens = np.append(True, node[1:] != node[:-1])
    closes = np.append(opens[1:], True)
    stop = np.where(closes, tokens[node], np.append(start[1:], 0))
    last = np.arange(nodes + len(cuts))
    last[node[closes]] = number[closes]
    first_stop = tokens.copy()
    first_stop[node[opens]] = start[opens]
    begin = np.append(np.zeros(nodes, np.int64), start)
    end = np.append(first_stop, stop)
    kv = runs.of_ranges(np.append(np.arange(nodes), node), begin, end)

    part = np.searchsorted(cuts, key) - 1  # the last cut before the row's end
    moved = (part >= 0) & (node[part] == row_node)
    row_sees = np.where(moved, row_sees - start[part], row_sees)
    row_node = np.where(moved, number[part], row_node)
    parent = np.append(np.where(parent >= 0, last[parent], -1), np.where(opens, node, number - 1))
    return TreeParts(frozen(parent), frozen(end - begin), frozen(row_node), frozen(row_sees), kv)


def _key(node: Ints, place: Ints) -> Longs:
    """Returns numbers that sort as (node, place)."""
    return (node.astype(np.int64) << 32) + place


def _derived(
    parent: npt.NDArray[Any],
    tokens: npt.NDArray[Any],
    row_node: npt.NDArray[Any],
    row_sees: npt.NDArray[Any],
    kv: KVRuns,
) -> Edited:
    """Returns the parts and the topology of a tree of these arrays."""
    check_total(tokens)
    parts = TreeParts(frozen(parent), frozen(tokens), frozen(row_node), frozen(row_sees), kv)
    return parts, derive(*parts[:4])
