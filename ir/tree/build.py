"""Descriptions of trees (levels, paths, token trees) turned into parents, tokens and rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

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


class Parts(NamedTuple):
    """The arguments that a tree is made of. rows: (node, sees) in the caller's order; None for one row per leaf."""

    parents: list[int] | Ints | Longs
    tokens: list[int] | Ints | Longs
    rows: list[tuple[int, int]] | None


def from_levels(nodes_per_level: IntsLike, tokens_per_node: IntsLike) -> Parts:
    """Returns a tree of levels. Node j of level l has the parent `j * n[l-1] // n[l]` in the level above.

    level 0              0                      nodes are numbered level by level
    level 1          1       2
    level 2        3   4   5   6
    """
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
    """Merges paths to a radix tree. Row i is path i.

    A path that ends inside of a run that others share becomes a row inside that node:

        paths   a b c d          node 0   a b c      row 2 sees 2 of its tokens
                a b c e          node 1     └─ d     row 0
                a b              node 2     └─ e     row 1
    """
    block_size = positive_int("block_size", block_size, TreeError)
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
        # A tensor's hash is that of the object, not of its number: no two paths would share a token.
        raise TreeError("paths", type(paths).__name__, "has tensors for tokens", "give one flat tensor per path")
    parents: list[int] = []
    tokens: list[int] = []
    rows: list[tuple[int, int]] = [(0, 0)] * len(given)
    pending = _families(keys, list(range(len(given))), 0, -1)
    if any(len(key) == 0 for key in keys):
        # A path without tokens sees nothing: it gets a node of its own without tokens.
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
    """Returns the paths as a list, with tensors as arrays. Raises TreeError for one that is no sequence."""
    checked = [
        host_array(f"paths[{index}]", path) if hasattr(path, "dtype") else path
        for index, path in enumerate(listed("paths", paths, fix))
    ]
    for index, path in enumerate(checked):
        if not (path.ndim if isinstance(path, np.ndarray) else isinstance(path, Sequence)):
            raise TreeError(f"paths[{index}]", path, "is not a sequence", fix)
    return checked


def _agreement(path: Ints | Any, longest: Ints | Any, begin: int) -> int:
    """Returns the end of the elements in which `path` agrees with `longest` from `begin` on.

    It is the end of `longest` where `path` ends first, without a difference.
    """
    differs = path[begin:] != longest[begin : len(path)]
    return begin + int(differs.argmax()) if differs.any() else len(longest)


def _families(keys: list[Any], members: list[int], begin: int, parent: int) -> list[tuple[list[int], int, int]]:
    """Groups the paths that go on after `begin` by their next element, for a stack: the first group comes last."""
    families: dict[int, list[int]] = {}
    for path in members:
        if len(keys[path]) > begin:
            families.setdefault(int(keys[path][begin]), []).append(path)
    return [(family, begin, parent) for family in reversed(families.values())]


def token_tree_parents(paths: Iterable[Sequence[int]]) -> list[int]:
    """Returns the parents of a token tree in Medusa's form, as Tree.with_drafts takes them.

    The first entry, -1, is for the root token, which is not listed. Each path's entry is the place of its parent. The
    tokens are in the order of `paths`; a parent may come after its children.

    Args:
        paths: For each token its child ranks from the root token.

    Raises:
        TreeError: A path is empty, occurs twice or lacks its parent.
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
    """Returns the tree of Medusa's paths: node 0 is the context, node 1 the root token, then one node per path."""
    above = token_tree_parents(paths)
    tokens = [*int32_array("prefix", [prefix], low=0), *[1] * len(above)]
    return Parts([-1, *(parent + 1 for parent in above)], tokens, [(node, 1) for node in range(1, len(tokens))])
