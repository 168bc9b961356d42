"""Query trees: several rows for every request, such as draft tokens to verify, or the last tokens of a prompt.

A chain of tokens, each with one child at most, becomes one node with a row for every token. The depth of the tree
follows from the branches of the tokens, not from their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import (
    INT32_MAX,
    IntsLike,
    Longs,
    check_made,
    check_total,
    frozen,
    host_array,
    int32_array,
    listed,
    offsets,
    positions,
    ragged_ranges,
    whole_numbers,
)
from treegen.ir.errors import TreeError
from treegen.ir.tree.edits import Edited, check_unused, parts_of, split, without_unseen_nodes
from treegen.ir.tree.page_tables import TreeParts

if TYPE_CHECKING:
    from treegen.ir.tree import Tree


class Grafts(NamedTuple):
    """Runs of new tokens below the rows of a tree.

    Attributes:
        row: The row of the tree that each graft belongs to.
        parent: The graft that each graft extends; -1 where it extends the tokens that its row sees.
        tokens: The tokens of each graft, at least one.
        slots: The slots of all tokens, graft by graft.
    """

    row: Longs
    parent: Longs
    tokens: Longs
    slots: Longs


def with_drafts(
    tree: Tree, parents: IntsLike | Sequence[IntsLike], slots: npt.ArrayLike | None, stored: bool
) -> Edited:
    """See Tree.with_drafts."""
    counts, local = _listed_parents(parents, tree.num_rows)
    row = np.arange(tree.num_rows).repeat(counts)
    begin = offsets(counts)
    parent = np.where(local >= 0, local + begin[row], -1)
    _check_acyclic(parent, row, begin)
    base = parts_of(tree)
    if not isinstance(stored, bool):
        raise TreeError("stored", stored, "is not a bool", "give True where the tree has the draft tokens already")
    if stored:
        if slots is not None:
            raise TreeError("slots", slots, "contradicts stored", "leave it out: the tree has these tokens' slots")
        seen = _check_enough(tree, counts, "parents", "put the draft tokens into the tree first")
        node, sees = _places(tree, tree.row_node, seen - counts)
        base = base._replace(row_node=frozen(node), row_sees=frozen(sees))
        node, sees = _places(tree, tree.row_node[row], (seen - counts)[row] + positions(begin, counts) + 1)
        places = tree.kv.slots_at(node, sees - 1)
    else:
        places = _draft_slots(tree, slots, len(row))
    grafts = Grafts(row, parent, np.ones(len(row), np.int64), places)
    return grafted(base, grafts, row, np.arange(len(row)))


def with_causal_queries(tree: Tree, counts: int | IntsLike) -> Edited:
    """See Tree.with_causal_queries."""
    each = [counts] * tree.num_rows if isinstance(counts, int) else counts
    number = int32_array("counts", each, low=0).astype(np.int64)
    if len(number) != tree.num_rows:
        raise TreeError("counts", f"{len(number)} entries", f"does not match {tree.num_rows} rows", "give one per row")
    seen = _check_enough(tree, number, "counts", "put the queries' tokens into the tree first")
    check_made("counts", counts, int(number.sum()), "rows")
    depth = (seen - number).repeat(number) + positions(offsets(number), number) + 1
    node, sees = _places(tree, tree.row_node.repeat(number), depth)
    return without_unseen_nodes(TreeParts(tree.parent, tree.tokens, frozen(node), frozen(sees), tree.kv))


def _check_enough(tree: Tree, counts: Longs, argument: str, fix: str) -> Longs:
    """Returns the tokens that each row sees. Raises TreeError where `counts` exceeds them."""
    seen = tree.topology.prefix[tree.row_node] + tree.row_sees
    if (counts > seen).any():
        row = int((counts > seen).argmax())
        found = f"{counts[row]} of row {row}"
        raise TreeError(argument, found, f"exceeds the {seen[row]} tokens that row {row} sees", fix)
    return seen


def _places(tree: Tree, node: npt.NDArray[Any], depth: Longs) -> tuple[Longs, Longs]:
    """Returns the nodes in which the first `depth` tokens of paths end, and their tokens there.

    Each path leads from a root to `node`; the result is this node or one above it.
    """
    node, prefix = node.astype(np.int64), tree.topology.prefix
    while len(above := np.flatnonzero((depth <= prefix[node]) & (tree.parent[node] >= 0))):
        node[above] = tree.parent[node[above]]
    return node, depth - prefix[node]


def grafted(base: TreeParts, grafts: Grafts, under: Longs, at: Longs) -> Edited:
    """Returns the tree of new rows over a base tree and grafts below its rows, without nodes that no row uses.

    Row i sees the tokens of row `under[i]` of the base and, where `at[i]` is not -1, graft `at[i]` and all grafts above
    it.

        base           row 0 sees [ 0 .............. 99 ]
        grafts         0: below row 0;  1: below 0;  2: below 0
        new rows       under 0 0 0,  at 0 1 2
        tree           [ 0 .. 99 ] ── graft 0 ─┬─ graft 1
                                               └─ graft 2
    """
    roots = grafts.parent < 0
    cut = split(base, np.unique(grafts.row[roots]))
    row_node, row_sees = cut.row_node.astype(np.int64), cut.row_sees.astype(np.int64)
    # A row that sees nothing of its node branches off above it: its visible tokens end with the parent.
    host = np.where(row_sees > 0, row_node, cut.parent[row_node])

    children = np.bincount(grafts.parent[~roots], minlength=len(roots))
    extends = ~roots & (children[grafts.parent] == 1)
    first = np.where(extends, grafts.parent, np.arange(len(roots)))
    before = np.where(extends, grafts.tokens[grafts.parent], 0)  # tokens of a graft's node before its own ones
    while (first != first[first]).any():
        before = before + before[first]
        first = first[first]
    heads = np.flatnonzero(~extends)
    node = (len(cut.parent) + np.cumsum(~extends) - 1)[first]
    above = np.where(roots[heads], host[grafts.row[heads]], node[grafts.parent[heads]])
    length = np.bincount(first, grafts.tokens, len(roots)).astype(np.int64)[heads]

    order = np.lexsort((before, node))
    tokens = grafts.tokens[order]
    slots = grafts.slots[ragged_ranges(offsets(grafts.tokens)[:-1][order], tokens)]
    kv = cut.kv.extended(len(cut.parent) + len(heads), node[order].repeat(tokens), slots)

    new_node, new_sees, below = row_node[under], row_sees[under], np.flatnonzero(at >= 0)
    new_node[below], new_sees[below] = node[at[below]], (before + grafts.tokens)[at[below]]
    parent, length = np.append(cut.parent, above), np.append(cut.tokens, length)
    check_total(length)
    return without_unseen_nodes(TreeParts(frozen(parent), frozen(length), frozen(new_node), frozen(new_sees), kv))


def _listed_parents(parents: IntsLike | Sequence[IntsLike], rows: int) -> tuple[Longs, Longs]:
    """Returns the number of draft tokens of each row, and the parents of all draft tokens, row by row."""
    given = listed("parents", parents, "give one list for all rows, or one for each")
    if not any(getattr(entry, "ndim", isinstance(entry, Sequence)) for entry in given[:1]):
        same = int32_array("parents", given, low=-1, high=len(given) - 1).astype(np.int64)
        check_made("parents", parents, rows * len(same), "rows")
        return np.full(rows, len(same)), np.tile(same, rows)
    if len(given) != rows:
        raise TreeError("parents", f"{len(given)} lists", f"does not match {rows} rows", "give one list for each row")
    of_rows = []
    for row, parents_of_row in enumerate(given):
        own = listed(f"parents[{row}]", parents_of_row, "give the parents of the row's draft tokens")
        of_rows.append(int32_array(f"parents[{row}]", own, low=-1, high=len(own) - 1))
    return np.array([len(own) for own in of_rows]), np.concatenate(of_rows).astype(np.int64)


def _check_acyclic(parent: Longs, row: Longs, begin: Longs) -> None:
    """Raises TreeError where parents lead into a cycle. begin: the first draft token of each row."""
    ancestor = np.append(parent, -1)  # the ancestor of -1 is the last entry: -1
    for _ in range(len(parent).bit_length()):
        ancestor = ancestor[ancestor]
    if (ancestor >= 0).any():
        token = int((ancestor >= 0).argmax())
        place, above = token - begin[row[token]], int(parent[token] - begin[row[token]])
        raise TreeError(f"parents[{row[token]}][{place}]", above, "leads into a cycle", "let every token reach a -1")


def _draft_slots(tree: Tree, slots: npt.ArrayLike | None, tokens: int) -> Longs:
    """Returns the slots of draft tokens: `slots`, checked, or by default those after the tree's last slot."""
    if slots is None:
        first = tree.kv.last_slot + 1
        if first + tokens > INT32_MAX:
            raise TreeError("slots", None, f"leave no room for {tokens} tokens behind the tree's", "give free slots")
        return np.arange(first, first + tokens)
    array = host_array("slots", slots)
    if array.size != tokens:
        raise TreeError("slots", f"{array.size} slots", f"does not match {tokens} draft tokens", "give one for each")
    flat = whole_numbers("slots", slots, array).reshape(-1)
    places = int32_array("slots", flat, low=0, high=INT32_MAX - 1).astype(np.int64)
    check_unused(tree.kv, places)
    return places
