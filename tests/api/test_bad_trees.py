"""Bad trees: parents, tokens, rows, graphs and KV locations."""

from __future__ import annotations

from typing import Any

import networkx
import numpy as np
import pytest

from support.rejections import Make, rejected
from treegen import KVRuns, Tree
from treegen.ir.errors import TreeError, TreegenError


def of_parents(*arguments: Any, **named: Any) -> Make:
    return lambda: Tree.from_parents(*arguments, **named)


TREES: dict[str, tuple[Make, type[TreegenError], tuple[str, ...]]] = {
    "cycle of two": (of_parents([1, 0], [3, 3]), TreeError, ("parents[0] = 1", "cycle", "root")),
    "own parent": (of_parents([-1, 1], [3, 3]), TreeError, ("parents[1] = 1", "cycle")),
    "cycle below a tree": (of_parents([-1, 0, 3, 4, 2], [1] * 5), TreeError, ("parents[2] = 3", "cycle")),
    "cycle of 10000": (of_parents([9999, *range(9999)], [1] * 10_000), TreeError, ("parents[0] = 9999", "cycle")),
    "parent that does not exist": (of_parents([-1, 2], [3, 3]), TreeError, ("parents[1] = 2", "-1..1")),
    "parent below -1": (of_parents([-2], [3]), TreeError, ("parents[0] = -2", "-1..0")),
    "parent that is a float": (
        of_parents([-1, 0.0], [3, 3]),
        TreeError,
        ("parents", "not an integer", "whole numbers"),
    ),
    "parent that is a list": (of_parents([-1, [0, 0]], [3, 3]), TreeError, ("parents", "integer")),
    "parents in two dimensions": (of_parents([[-1, 0]], [3, 3]), TreeError, ("parents = shape (1, 2)",)),
    "no parents": (of_parents(None, [3]), TreeError, ("parents",)),
    "too few parents": (of_parents([-1], [3, 3]), TreeError, ("parents = 1 entries", "2 nodes", "one parent per node")),
    "negative tokens": (of_parents([-1, 0], [3, -1]), TreeError, ("tokens[1] = -1", "outside 0..")),
    "fractional tokens": (of_parents([-1, 0], [3, 2.5]), TreeError, ("tokens[1] = 2.5", "not an integer", "whole")),
    "whole floats as tokens": (of_parents([-1], np.array([3.0])), TreeError, ("tokens[0] = ", "3.0", "not an integer")),
    "tokens that are words": (of_parents([-1], ["many"]), TreeError, ("tokens[0] = ", "many", "not an integer")),
    "tokens that are missing": (of_parents([-1, 0], [3, None]), TreeError, ("tokens[1] = None", "not an integer")),
    "tokens that are flags": (of_parents([-1], [True]), TreeError, ("tokens[0] = True", "not an integer")),
    "NaN tokens": (of_parents([-1], [float("nan")]), TreeError, ("tokens[0] = nan", "not an integer")),
    "too many tokens of a node": (of_parents([-1], [2**31]), TreeError, ("tokens[0] = 2147483648", "outside")),
    "tokens beyond 64 bits": (
        of_parents([-1, 0], [3, 2**70]),
        TreeError,
        ("tokens[1] = 1180591620717411303424", "outside"),
    ),
    "too many tokens in all": (
        of_parents([-1, -1], [2**31 - 1, 1]),
        TreeError,
        ("tokens = 2147483648", "split the forest"),
    ),
    "no nodes": (of_parents([], []), TreeError, ("tokens = []", "at least one node", "one length per node")),
    "a scalar for tokens": (of_parents([-1], 3), TreeError, ("tokens = 3", "integer")),
    "a set for tokens": (of_parents([-1], {3}), TreeError, ("tokens",)),
    "a generator for tokens": (of_parents([-1], (count for count in [3])), TreeError, ("tokens",)),
    "ragged tokens": (of_parents([-1, 0], [[3], [1, 2]]), TreeError, ("tokens", "one integer per entry")),
    "a row that sees beyond its node": (
        of_parents([-1, 0], [3, 2], rows=[(0, 3), (1, 3)]),
        TreeError,
        ("rows[1] = (1, 3)", "node 1, which has 2 tokens", "lower sees"),
    ),
    "a row that sees a negative number": (
        of_parents([-1], [3], rows=[(0, -1)]),
        TreeError,
        ("rows", "-1", "outside 0.."),
    ),
    "a row that sees half a token": (
        of_parents([-1], [3], rows=[(0, 0.5)]),
        TreeError,
        ("rows", "0.5", "not an integer"),
    ),
    "a row of a node that does not exist": (of_parents([-1], [3], rows=[(1, 0)]), TreeError, ("rows", "1", "0..0")),
    "a row of a negative node": (of_parents([-1], [3], rows=[(-1, 0)]), TreeError, ("rows", "-1", "0..0")),
    "a row of three": (
        of_parents([-1], [3], rows=[(0, 1, 2)]),
        TreeError,
        ("rows[0] = (0, 1, 2)", "(node, sees) pair"),
    ),
    "rows that are nodes": (of_parents([-1], [3], rows=[0]), TreeError, ("rows[0] = 0", "(node, sees) pair")),
    "rows that are words": (of_parents([-1], [3], rows=["01"]), TreeError, ("rows[0] = 01", "(node, sees) pair")),
    "rows that are a number": (of_parents([-1], [3], rows=3), TreeError, ("rows = 3",)),
    "levels without nodes": (
        lambda: Tree.from_levels([1, 0], [3, 3]),
        TreeError,
        ("nodes_per_level[1] = 0", "outside 1.."),
    ),
    "levels without lengths": (lambda: Tree.from_levels([1, 2], [3]), TreeError, ("tokens_per_node = [3]", "2 levels")),
    "no levels": (lambda: Tree.from_levels([], []), TreeError, ("tokens_per_node = []", "0 levels")),
    "negative lengths": (lambda: Tree.from_levels([1, 2], [3, -3]), TreeError, ("tokens_per_node[1] = -3",)),
    "no paths": (lambda: Tree.from_paths([]), TreeError, ("paths = []", "at least one path")),
    "paths that are numbers": (lambda: Tree.from_paths([3, 4]), TreeError, ("paths[0] = 3",)),
    "paths of lists": (lambda: Tree.from_paths([[[1], [2]]]), TreeError, ("paths[0]", "hash")),
    "empty blocks": (lambda: Tree.from_paths(["ab"], block_size=0), TreeError, ("block_size = 0", "not a positive")),
    "half blocks": (lambda: Tree.from_paths(["ab"], block_size=1.5), TreeError, ("block_size = 1.5",)),
    "huge blocks": (
        lambda: Tree.from_paths(["ab"], block_size=2**31),
        TreeError,
        ("block_size = 2147483648", "exceeds"),
    ),
    "a token path without its parent": (
        lambda: Tree.from_token_tree([[0], [1, 0]], 5),
        TreeError,
        ("paths[1] = (1, 0)", "parent (1,) is missing", "list the parent"),
    ),
    "a token path twice": (lambda: Tree.from_token_tree([[0], [0]], 5), TreeError, ("paths[1] = (0,)", "twice")),
    "an empty token path": (lambda: Tree.from_token_tree([[]], 5), TreeError, ("paths[0] = ()", "empty")),
    "a negative prefix": (lambda: Tree.from_token_tree([[0]], -5), TreeError, ("prefix", "-5", "outside 0..")),
    "a fractional prefix": (lambda: Tree.from_token_tree([[0]], 5.5), TreeError, ("prefix", "5.5", "not an integer")),
    "a fractional rank": (lambda: Tree.from_token_tree([[0], [1.5]], 5), TreeError, ("paths[1]", "1.5")),
    "a negative rank": (lambda: Tree.from_token_tree([[0], [-1]], 5), TreeError, ("paths[1]", "-1")),
    "ranks that are words": (lambda: Tree.from_token_tree(["0"], 5), TreeError, ("paths[0]",)),
    "token paths that are numbers": (lambda: Tree.from_token_tree([0], 5), TreeError, ("paths[0] = 0",)),
}


def graph_of(edges: list[tuple[int, int]], nodes: dict[int, dict[str, Any]]) -> networkx.DiGraph:
    graph = networkx.DiGraph(edges)
    graph.add_nodes_from(nodes.items())
    return graph


T3 = {"tokens": 3}
GRAPHS = {
    "several parents": (
        graph_of([(0, 2), (1, 2)], {0: T3, 1: T3, 2: T3}),
        ("graph node 2 = [0, 1]", "several parents"),
    ),
    "a cycle": (graph_of([(0, 1), (1, 0)], {0: T3, 1: T3}), ("cycle", "root")),
    "a loop": (graph_of([(0, 0)], {0: T3}), ("cycle",)),
    "no tokens": (graph_of([(0, 1)], {0: T3}), ("graph node 1", "'tokens'", "every node")),
    "negative tokens": (graph_of([], {0: {"tokens": -3}}), ("tokens[0] = -3",)),
    "fractional tokens": (graph_of([], {0: {"tokens": 0.5}}), ("tokens[0] = 0.5",)),
    "rows beyond": (graph_of([], {0: {"tokens": 3, "rows": [4]}}), ("(0, 4)", "3 tokens")),
    "rows that are a number": (graph_of([], {0: {"tokens": 3, "rows": 2}}), ("graph node 0", "rows")),
    "no nodes": (networkx.DiGraph(), ("at least one node",)),
    "undirected": (networkx.Graph([(0, 1)]), ("graph", "directed")),
    "something else": ({0: [1]}, ("graph",)),
}

TOKENS = np.array([3, 2])
KV: dict[str, tuple[Make, tuple[str, ...]]] = {
    "slots of one node": (lambda: KVRuns.from_slots(TOKENS, [[1, 2, 3]]), ("kv = 1 entries", "2 nodes")),
    "too few slots": (lambda: KVRuns.from_slots(TOKENS, [[1, 2, 3], [4]]), ("kv[1] = 1 entries", "node 1 needs 2")),
    "too many slots": (lambda: KVRuns.from_slots(TOKENS, [[1, 2, 3, 4], [4, 5]]), ("kv[0] = 4 entries", "needs 3")),
    "negative slot": (lambda: KVRuns.from_slots(TOKENS, [[1, 2, -3], [4, 5]]), ("kv[0][2] = -3", "outside 0..")),
    "fractional slot": (lambda: KVRuns.from_slots(TOKENS, [[1, 2, 3], [4, 0.5]]), ("kv[1][1] = 0.5", "not an integer")),
    "slots for the whole tree": (lambda: KVRuns.from_slots(TOKENS, [1, 2, 3, 4, 5]), ("kv[0]", "one-dimensional")),
    "too few pages": (lambda: KVRuns.from_pages(TOKENS, [[1], [4]], 2), ("kv[0] = 1 entries", "node 0 needs 2")),
    "negative page": (lambda: KVRuns.from_pages(TOKENS, [[1, -2], [4]], 2), ("kv[0][1] = -2", "outside 0..")),
    "page beyond 2^31 slots": (
        lambda: KVRuns.from_pages(TOKENS, [[1, 2**30], [4]], 2),
        ("kv[0][1] = 1073741824", "outside"),
    ),
    "no page size": (lambda: KVRuns.from_pages(TOKENS, [[1], [2]], 0), ("page_size = 0", "not a positive")),
    "fractional page size": (lambda: KVRuns.from_pages(TOKENS, [[1], [2]], 4.5), ("page_size = 4.5",)),
    "runs that are too short": (
        lambda: KVRuns.from_runs(TOKENS, [[(0, 3)], [(3, 1)]]),
        ("kv[1] = 1", "node 1 needs 2"),
    ),
    "runs past the last slot": (lambda: KVRuns.from_runs(TOKENS, [[(2**31 - 2, 3)], [(0, 2)]]), ("kv",)),
    "runs that are slots": (lambda: KVRuns.from_runs(TOKENS, [[0, 1, 2], [3, 4]]), ("kv",)),
    "kv in a tree": (of_parents([-1, 0], [3, 2], kv=[[1, 2, 3], [4]]), ("kv[1] = 1 entries", "needs 2")),
    "kv that is a number": (of_parents([-1, 0], [3, 2], kv=7), ("kv = 7",)),
    "kv moved": (lambda: Tree.parse("3(2)").with_kv([[1, 2, 3], [4, -5]]), ("kv[1][1] = -5",)),
}


@pytest.mark.parametrize("case", TREES)
def test_trees(case: str) -> None:
    make, error, words = TREES[case]
    rejected(make, error, *words)


@pytest.mark.parametrize("case", GRAPHS)
def test_graphs(case: str) -> None:
    graph, words = GRAPHS[case]
    rejected(lambda: Tree.from_networkx(graph), TreeError, *words)


@pytest.mark.parametrize("case", KV)
def test_kv(case: str) -> None:
    make, words = KV[case]
    rejected(make, TreeError, *words)
