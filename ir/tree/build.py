"""Descriptions of trees (levels, paths, token trees, graphs) turned into parents, tokens and rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treegen.ir.arrays import (
    Ints,
    IntsLike,
    Longs,
    check_made,
    frozen,
    host_array,
    int32_array,
    listed,
    offsets,
    positive_int,
)
from treegen.ir.errors import TreeError

if TYPE_CHECKING:
    import networkx


class Parts(NamedTuple):
    """What a tree is made of. `rows`: (node, sees) in the caller's order, None for one row per leaf."""

    parents: list[int] | Ints | Longs
    tokens: list[int] | Ints | Longs
    rows: list[tuple[int, int]] | None


def from_levels(nodes_per_level: IntsLike, tokens_per_node: IntsLike) -> Parts:
    """Node j of level l hangs under node `j * n[l-1] // n[l]` of the level above; nodes are numbered level by level."""
    counts = int32_array("nodes_per_level", nodes_per_level, low=1)
    lengths = int32_array("tokens_per_node", tokens_per_node, low=0)
    if len(counts) != len(lengths) or len(counts) == 0:
        raise TreeError(
            "tokens_per_node", lengths.tolist(), f"does not match {len(counts)} levels", "give one length per level"
        )
    check_made("nodes_per_level", counts.tolist(), int(counts.sum(dtype=np.int64)), "nodes")
    ends = offsets(counts)
    parents = [np.full(counts[0], -1, np.int64)]
    for level in range(1, len(counts)):
        within = np.arange(counts[level], dtype=np.int64) * counts[level - 1] // counts[level]
        parents.append(ends[level - 1] + within)
    return Parts(frozen(np.concatenate(parents)), frozen(np.repeat(lengths, counts)), None)


def from_paths(paths: Iterable[Sequence[Hashable]], block_size: int) -> Parts:
    """Radix-merge paths: row i is path i; a path that ends inside another's run becomes a row inside that node."""
    positive_int("block_size", block_size, TreeError)
    given = _checked_paths(paths, "give one sequence of tokens or hashes per row")
    if not given:
        raise TreeError("paths", paths, "is empty", "give at least one path")
    identity: dict[Hashable, int] = {}
    keys = []
    for index, path in enumerate(given):
        elements = path.tolist() if isinstance(path, np.ndarray) else path
        try:
            keys.append(np.fromiter((identity.setdefault(x, len(identity)) for x in elements), np.int64))
        except TypeError as cause:
            raise TreeError(
                f"paths[{index}]", path, f"has elements without a hash: {cause}", "give integers"
            ) from cause
    if any(hasattr(element, "is_cuda") for element in identity):
        # The hash of a tensor is that of the object, whatever number it holds: no two paths would share a token.
        raise TreeError("paths", type(paths).__name__, "has tensors for tokens", "give one flat tensor per path")
    parents: list[int] = []
    tokens: list[int] = []
    rows: list[tuple[int, int]] = [(0, 0)] * len(given)
    pending = _families(keys, list(range(len(given))), 0, -1)
    if any(len(key) == 0 for key in keys):
        # A path without tokens sees nothing: it hangs on a node of its own that has no tokens.
        parents.append(-1)
        tokens.append(0)
    while pending:
        members, begin, parent = pending.pop()
        longest = max(members, key=lambda path: len(keys[path]))
        end = min(_agreement(keys[path], keys[longest], begin) for path in members)
        node = len(parents)
        parents.append(parent)
        tokens.append((end - begin) * block_size)
        for path in members:
            if len(keys[path]) <= end:
                rows[path] = (node, (len(keys[path]) - begin) * block_size)
        pending += _families(keys, [path for path in members if len(keys[path]) > end], end, node)
    return Parts(parents, tokens, rows)


def _checked_paths(paths: object, fix: str) -> list[Any]:
    """The paths as a list, tensors among them as arrays. Raises TreeError naming what is not a sequence."""
    checked = [
        host_array(f"paths[{index}]", path) if hasattr(path, "dtype") else path
        for index, path in enumerate(listed("paths", paths, fix))
    ]
    for index, path in enumerate(checked):
        if not (path.ndim if isinstance(path, np.ndarray) else isinstance(path, Sequence)):
            raise TreeError(f"paths[{index}]", path, "is not a sequence", fix)
    return checked


def _agreement(path: Ints | Any, longest: Ints | Any, begin: int) -> int:
    """Up to where `path` agrees with `longest`; the end of `longest` when `path` ends first without a difference."""
    differs = path[begin:] != longest[begin : len(path)]
    return begin + int(differs.argmax()) if differs.any() else len(longest)


def _families(keys: list[Any], members: list[int], begin: int, parent: int) -> list[tuple[list[int], int, int]]:
    """Paths that go on, grouped by their next element, last family first (a stack visits them in order)."""
    families: dict[int, list[int]] = {}
    for path in members:
        if len(keys[path]) > begin:
            families.setdefault(int(keys[path][begin]), []).append(path)
    return [(family, begin, parent) for family in reversed(families.values())]


def token_tree_parents(paths: Iterable[Sequence[int]]) -> list[int]:
    """The parents of a token tree in Medusa's form, for Tree.with_drafts: -1 for the root token, which is implied and
    comes first, then for every path, a list of child ranks from the root token, the place of its parent.

    The tokens are in the order of `paths`, where a parent may come after its children. Raises TreeError.
    """
    places: dict[tuple[int, ...], int] = {(): 0}
    given = _checked_paths(paths, "give the child ranks from the root for every token")
    ranks = [tuple(int32_array(f"paths[{i}]", path, low=0).tolist()) for i, path in enumerate(given)]
    for index, path in enumerate(ranks):
        if not path or path in places:
            reason = "is empty (the root token is implied)" if not path else "occurs twice"
            raise TreeError(f"paths[{index}]", path, reason, "list every token below the root once")
        places[path] = index + 1
    for index, path in enumerate(ranks):
        if path[:-1] not in places:
            raise TreeError(f"paths[{index}]", path, f"its parent {path[:-1]} is missing", "list the parent as well")
    return [-1, *(places[path[:-1]] for path in ranks)]


def from_token_tree(paths: Iterable[Sequence[int]], prefix: int) -> Parts:
    """Medusa child-rank paths: node 0 is the prefix, node 1 the root token, then one one-token node per path."""
    above = token_tree_parents(paths)
    tokens = [*int32_array("prefix", [prefix], low=0), *[1] * len(above)]
    return Parts([-1, *(parent + 1 for parent in above)], tokens, [(node, 1) for node in range(1, len(tokens))])


def from_networkx(graph: networkx.DiGraph[Any]) -> Parts:
    """A directed forest (edges from parent to child) whose nodes carry `tokens` and, optionally, `rows` (list of
    sees).
    """
    import networkx

    if not isinstance(graph, networkx.DiGraph):
        raise TreeError("graph", type(graph).__name__, "is not directed", "give a networkx.DiGraph, parent to child")
    names = list(graph.nodes)
    number = {name: index for index, name in enumerate(names)}
    parents = []
    for name in names:
        above = list(graph.predecessors(name))
        if len(above) > 1:
            raise TreeError(f"graph node {name!r}", above, "has several parents", "give each node at most one parent")
        parents.append(number[above[0]] if above else -1)
    for name in names:
        if "tokens" not in graph.nodes[name]:
            raise TreeError(
                f"graph node {name!r}", graph.nodes[name], "has no 'tokens' attribute", "set tokens on every node"
            )
    tokens = [graph.nodes[name]["tokens"] for name in names]
    if not any("rows" in graph.nodes[name] for name in names):
        return Parts(parents, tokens, None)
    rows = [
        (number[name], sees)
        for name in names
        for sees in listed(f"graph node {name!r}", graph.nodes[name].get("rows", ()), "give the sees of its rows")
    ]
    return Parts(parents, tokens, rows)
