"""Bad input to trees, KV locations, text, JSON, shapes, strategies, targets and `compile`.

Every error is a TreegenError whose message is one line: `argument = value: reason; fix`.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import treegen
from support.forests import examples
from support.rejections import Make, rejected
from treegen import KVRuns, Shape, Tree, strategies
from treegen.ir.errors import (
    BackendError,
    FormatError,
    InputError,
    PlanError,
    ShapeError,
    StrategyError,
    TreeError,
    TreegenError,
)
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.tree import tree_text
from treegen.schedule.lower import lower
from treegen.strategies import strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import target_from


def complaint(make: Make) -> str:
    """The message of the TreegenError that `make` raises, empty when it raises nothing; any other error passes."""
    try:
        make()
    except TreegenError as error:
        return str(error)
    return ""


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

TEXTS = {
    "": ("number of tokens", "the end"),
    "   ": ("number of tokens", "the end"),
    "a": ("number of tokens", "'a' at position 0"),
    "-5": ("number of tokens", "'-' at position 0"),
    "1.5": ("'.' at position 1",),
    "100(10*4": ("',' or ')'", "the end"),
    "100(": ("number of tokens", "the end"),
    "100(10,": ("number of tokens", "the end"),
    "100()": ("number of tokens", "')' at position 4"),
    "100)": ("'+' or the end", "')' at position 3"),
    "100(10))": ("'+' or the end", "')' at position 7"),
    "100(10)(10)": ("'+' or the end", "'(' at position 7"),
    "100(10 20)": ("',' or ')'", "'2' at position 7"),
    "100(10+20)": ("',' or ')'", "'+' at position 6"),
    "100,10": ("'+' or the end", "',' at position 3"),
    "100+": ("number of tokens", "the end"),
    "+100": ("number of tokens", "'+' at position 0"),
    "100*": ("positive number of copies", "the end"),
    "100*0": ("positive number of copies", "'0' at position 4"),
    "100**2": ("positive number of copies", "'*' at position 4"),
    "100*2*3": ("'+' or the end", "'*' at position 5"),
    "*2": ("number of tokens", "'*' at position 0"),
    "1,4/100,": ("number of tokens", "the end"),
    "/100": ("'/' at position 0",),
    "1,4//100,10": ("number of tokens", "'/' at position 4"),
    "12345678901": ("too large", "2^31"),
    "1*12345678901": ("too large", "2^31"),
    "1*10000001": ("10000001 nodes", "at or below"),
    "1(1*9999)*9999": ("nodes", "at or below"),
    "9999999999/1": ("nodes", "at or below"),
    "[1, 2]": ("number of tokens", "'[' at position 0"),
    "((": ("number of tokens", "'(' at position 0"),
}

NODE_LISTS = {
    "": ("node count",),
    "hello": ("node count",),
    "2 3\n-1 0 5 0\n-1 1 5 0": ("node count",),
    "2\n-1 0 5 1": ("1 node lines", "promises 2", "complete"),
    "1\n-1 0 5 1\n0 1 5 0": ("2 node lines", "promises 1"),
    "2\n-1 0 5 1\n0 1 5": ("0 1 5", "line 3 is not four integers", "parent id seqlen children"),
    "1\n-1 0 5.5 0": ("line 2 is not four integers",),
    "1\n-1 0 five 0": ("line 2 is not four integers",),
    "1\n-1 0 -5 0": ("line 2", "length is out of range"),
    "2\n-1 0 5 0\n-1 0 5 0": ("line 3 repeats a node", "0..1 once"),
    "2\n-1 0 5 0\n-1 2 5 0": ("line 3", "id", "out of range"),
    "2\n-1 0 5 2\n0 1 5 0": ("node 0 has 1 children, its line says 2",),
    "2\n-1 0 5 0\n0 1 5 0": ("node 0 has 1 children, its line says 0",),
}

GOOD = {"format": 1, "kind": "tree", "parents": [-1, 0], "tokens": [3, 2]}
JSONS: dict[str, tuple[object, type[TreegenError], tuple[str, ...]]] = {
    "unknown field": ({**GOOD, "token": [1]}, FormatError, ("tree.token = [1]", "unknown field", "'tokens'")),
    "unknown field of two lines": ({**GOOD, "a\nb": 1}, FormatError, ("unknown field",)),
    "unknown field of great length": ({**GOOD, "a" * 5000: 1}, FormatError, ("unknown field",)),
    "future version": ({**GOOD, "format": 2}, FormatError, ("tree.format = 2", "newer than 1", "upgrade treegen")),
    "version 0": ({**GOOD, "format": 0}, FormatError, ("tree.format = 0", "not a format version", "give 1")),
    "version that is a word": ({**GOOD, "format": "1"}, FormatError, ("tree.format = 1", "not a format version")),
    "version that is a float": ({**GOOD, "format": 1.0}, FormatError, ("tree.format = 1.0", "not a format version")),
    "version that is a flag": ({**GOOD, "format": True}, FormatError, ("tree.format = True", "not a format version")),
    "no version": ({"parents": [-1], "tokens": [3]}, FormatError, ("tree.format = None", "not a format version")),
    "another kind": ({**GOOD, "kind": "plan"}, FormatError, ("tree.kind", "another kind than 'tree'")),
    "kind that is a list": ({**GOOD, "kind": ["tree"]}, FormatError, ("tree.kind", "another kind than 'tree'")),
    "no tokens": ({"format": 1, "parents": [-1]}, FormatError, ("tree.tokens", "missing")),
    "no parents": ({"format": 1, "tokens": [3]}, FormatError, ("tree.parents", "missing")),
    "tokens that are a number": ({**GOOD, "tokens": 5}, FormatError, ("tree.tokens = 5", "not a list")),
    "tokens that are a word": ({**GOOD, "tokens": "32"}, FormatError, ("tree.tokens = 32", "not a list")),
    "tokens that are an object": ({**GOOD, "tokens": {"0": 3}}, FormatError, ("tree.tokens", "not a list")),
    "tokens that are null": ({**GOOD, "tokens": None}, FormatError, ("tree.tokens = None", "not a list")),
    "fractional tokens": ({**GOOD, "tokens": [3, 2.5]}, TreeError, ("tokens[1] = 2.5", "not an integer")),
    "negative tokens": ({**GOOD, "tokens": [3, -2]}, TreeError, ("tokens[1] = -2",)),
    "nested tokens": ({**GOOD, "tokens": [[3], [2]]}, TreeError, ("tokens", "one-dimensional")),
    "infinite tokens": ({**GOOD, "tokens": [3, float("inf")]}, TreeError, ("tokens[1] = inf", "not an integer")),
    "huge tokens": ({**GOOD, "tokens": [3, 2**200]}, TreeError, ("tokens[1]", "outside")),
    "cycle": ({**GOOD, "parents": [1, 0]}, TreeError, ("parents[0] = 1", "cycle")),
    "no nodes": ({**GOOD, "parents": [], "tokens": []}, TreeError, ("tokens", "at least one node")),
    "rows that are numbers": ({**GOOD, "rows": [1, 2]}, FormatError, ("tree.rows = [1, 2]", "list of pairs")),
    "rows that are a number": ({**GOOD, "rows": 1}, FormatError, ("tree.rows = 1", "list of pairs")),
    "rows of three": ({**GOOD, "rows": [[0, 1, 2]]}, FormatError, ("tree.rows = [[0, 1, 2]]", "list of pairs")),
    "rows of words": ({**GOOD, "rows": [["0", 1]]}, TreeError, ("rows", "0", "not an integer")),
    "rows beyond": ({**GOOD, "rows": [[1, 3]]}, TreeError, ("rows[0] = (1, 3)", "2 tokens")),
    "kv that is a number": ({**GOOD, "kv": 1}, FormatError, ("tree.kv = 1", "not a list")),
    "kv of numbers": ({**GOOD, "kv": [0, 3]}, FormatError, ("tree.kv[0] = 0", "list of pairs")),
    "kv of one node": ({**GOOD, "kv": [[[0, 3]]]}, TreeError, ("kv = 1 entries", "2 nodes")),
    "kv of too few tokens": ({**GOOD, "kv": [[[0, 3]], [[3, 1]]]}, TreeError, ("kv[1] = 1 entries", "node 1 needs 2")),
    "kv at a negative slot": ({**GOOD, "kv": [[[-1, 3]], [[3, 2]]]}, TreeError, ("kv", "-1", "outside 0..")),
    "kv of an empty run": ({**GOOD, "kv": [[[0, 3], [9, 0]], [[3, 2]]]}, TreeError, ("kv", "0", "outside 1..")),
    "kv of a fractional run": ({**GOOD, "kv": [[[0, 3.0]], [[3, 2]]]}, TreeError, ("kv", "3.0", "not an integer")),
    "kv past the last slot": ({**GOOD, "kv": [[[2**31 - 2, 3]], [[3, 2]]]}, TreeError, ("kv",)),
    "list": ([GOOD], FormatError, ("tree", "not a JSON object", "to_json")),
    "number": (5, FormatError, ("tree = 5", "not a JSON object")),
    "null": (None, FormatError, ("tree = null", "not a JSON object")),
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

SHAPES = {
    "heads that do not divide": ((6, 4, 64), {}, ("num_qo_heads = 6", "multiple of num_kv_heads = 4")),
    "more kv heads": ((4, 8, 64), {}, ("num_qo_heads = 4", "multiple of num_kv_heads = 8")),
    "no heads": ((0, 1, 64), {}, ("num_qo_heads = 0", "positive integer")),
    "negative kv heads": ((8, -8, 64), {}, ("num_kv_heads = -8", "positive integer")),
    "fractional heads": ((8.0, 8, 64), {}, ("num_qo_heads = 8.0", "positive integer")),
    "heads that are a word": (("8", 8, 64), {}, ("num_qo_heads = 8", "positive integer")),
    "heads that are a flag": ((True, True, 64), {}, ("num_qo_heads = True", "positive integer")),
    "no head dim": ((8, 8, 0), {}, ("head_dim = 0", "positive integer")),
    "odd head dim": ((8, 8, 65), {}, ("head_dim = 65", "multiple of 8")),
    "large head dim": ((8, 8, 1024), {}, ("head_dim = 1024", "576")),
    "odd head dim of v": ((8, 8, 64), {"head_dim_v": 60}, ("head_dim_v = 60", "multiple of 8")),
    "large head dim of v": ((8, 8, 64), {"head_dim_v": 1024}, ("head_dim_v = 1024", "512")),
    "unknown dtype": ((8, 8, 64), {"dtype": "int8"}, ("dtype = int8", "not a supported type", "fp16, bf16, fp32")),
    "dtype that is no type": ((8, 8, 64), {"dtype": None}, ("dtype = None", "not a supported type")),
    "unknown kv dtype": ((8, 8, 64), {"kv_dtype": "fp8"}, ("kv_dtype = fp8", "not a supported type")),
    "mixed dtypes": ((8, 8, 64), {"kv_dtype": "fp16"}, ("kv_dtype = fp16", "differs from dtype = bf16")),
    "no page size": ((8, 8, 64), {"page_size": 0}, ("page_size = 0", "positive integer")),
    "large pages": ((8, 8, 64), {"page_size": 4096}, ("page_size = 4096", "1024")),
    "unknown layout": ((8, 8, 64), {"kv_layout": "HDN"}, ("kv_layout = HDN", "is unknown", "NHD, HND")),
}

TREE = Tree.parse("3(2)")
OTHERS: dict[str, tuple[Make, type[TreegenError], tuple[str, ...]]] = {
    "unknown strategy": (
        lambda: strategy_from("deft"),
        StrategyError,
        ("strategy = deft", "not registered", "deft-node"),
    ),
    "strategy that is a list": (
        lambda: strategy_from(["query"]),
        StrategyError,
        ("strategy = ['query']", "not registered"),
    ),
    "strategy that is None": (lambda: strategy_from(None), StrategyError, ("strategy = None", "not registered")),
    "factory for a strategy": (
        lambda: strategy_from(strategies.query),
        StrategyError,
        ("strategy = ", "not registered"),
    ),
    "taken name": (
        lambda: treegen.register_strategy("query", strategies.query),
        StrategyError,
        ("name = query", "taken", "other than"),
    ),
    "split of nothing": (lambda: strategies.query(split=0), StrategyError, ("split = 0", "not a positive integer")),
    "negative chunk": (
        lambda: strategies.deft_node_chunk(chunk=-1),
        StrategyError,
        ("chunk = -1", "not a positive integer"),
    ),
    "fractional block": (
        lambda: strategies.deft_flatten(block=1.5),
        StrategyError,
        ("block = 1.5", "not a positive integer"),
    ),
    "block that is a flag": (lambda: strategies.deft_flatten(block=True), StrategyError, ("block = True",)),
    "chunk that is None": (lambda: strategies.deft_node_chunk(chunk=None), StrategyError, ("chunk = None",)),
    "unknown target": (lambda: target_from("h2000"), BackendError, ("target = h2000", "not known", "h200", "cpu")),
    "target that is a number": (lambda: target_from(90), BackendError, ("target = 90", "not known")),
    "target that is a list": (lambda: target_from(["h200"]), BackendError, ("target = ['h200']", "not known")),
    "compile: tree": (lambda: treegen.compile("3(2)"), TreeError, ("tree = 3(2)", "not a Tree", "treegen.Tree.parse")),
    "compile: strategy": (lambda: treegen.compile(TREE, strategy="best"), StrategyError, ("strategy = best",)),
    "compile: shape": (
        lambda: treegen.compile(TREE, shape=(8, 8, 64)),
        InputError,
        ("shape = (8, 8, 64)", "not a Shape"),
    ),
    "compile: target": (lambda: treegen.compile(TREE, target="z80"), BackendError, ("target = z80", "not known")),
    "compile: backend": (
        lambda: treegen.compile(TREE, backend="cuda"),
        BackendError,
        ("backend = cuda", "unknown", "torch"),
    ),
    "compile: NaN sm_scale": (
        lambda: treegen.compile(TREE, sm_scale=float("nan")),
        InputError,
        ("sm_scale = nan", "finite"),
    ),
    "compile: negative sm_scale": (
        lambda: treegen.compile(TREE, sm_scale=-0.1),
        InputError,
        ("sm_scale = -0.1", "at least 0", "negate q"),
    ),
    "compile: sm_scale": (lambda: treegen.compile(TREE, sm_scale="0.1"), InputError, ("sm_scale = 0.1",)),
    "update": (
        lambda: treegen.compile(TREE, backend="torch").update("3(2)"),
        TreeError,
        ("tree = 3(2)", "not a Tree", "treegen.Tree.parse"),
    ),
}


SHAPE = Shape(8, 8, 64)
PLAN = strategies.deft_flatten().plan(Problem(TREE, SHAPE, target_from(None)))
FORMS = {
    Tree: TREE.with_kv([[5, 6, 7], [2, 1]]).to_json(),
    Plan: PLAN.to_json(),
    Schedule: lower(PLAN, Problem(TREE, SHAPE, target_from(None))).to_json(),
}


@pytest.mark.parametrize("case", TREES)
def test_trees(case: str) -> None:
    make, error, words = TREES[case]
    rejected(make, error, *words)


@pytest.mark.parametrize("case", GRAPHS)
def test_graphs(case: str) -> None:
    graph, words = GRAPHS[case]
    rejected(lambda: Tree.from_networkx(graph), TreeError, *words)


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text: str) -> None:
    rejected(lambda: Tree.parse(text), FormatError, "tree = ", *TEXTS[text])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0/5", ("nodes_per_level[0] = 0",)),
        ("1,2/5", ("tokens_per_node = [5]", "2 levels")),
        ("1/5,6", ("tokens_per_node = [5, 6]", "1 levels")),
        ("9999999999", ("tokens[0] = 9999999999", "outside")),
        ("2147483647*2", ("tokens = 4294967294", "split the forest")),
    ],
)
def test_texts_of_impossible_trees(text: str, words: tuple[str, ...]) -> None:
    rejected(lambda: Tree.parse(text), TreeError, *words)


@pytest.mark.parametrize("text", [None, 5, b"5", ["5"]])
def test_texts_that_are_not_text(text: object) -> None:
    rejected(lambda: Tree.parse(text), FormatError, "tree = ")
    rejected(lambda: Tree.from_json(text), FormatError, "tree = ")


@pytest.mark.parametrize("text", NODE_LISTS)
def test_node_lists(text: str) -> None:
    rejected(lambda: tree_text.parse_node_list(text), FormatError, *NODE_LISTS[text])


@pytest.mark.parametrize(
    ("text", "words"),
    [("2\n1 0 5 1\n0 1 5 1", ("parents[0] = 1", "cycle")), ("1\n7 0 5 0", ("parents[0] = 7",))],
)
def test_node_lists_of_impossible_trees(text: str, words: tuple[str, ...]) -> None:
    rejected(lambda: Tree.from_parents(*tree_text.parse_node_list(text)), TreeError, *words)


@pytest.mark.parametrize("case", JSONS)
def test_json(case: str) -> None:
    value, error, words = JSONS[case]
    rejected(lambda: Tree.from_json(json.dumps(value)), error, *words)


@pytest.mark.parametrize("kind", [Tree, Plan, Schedule])
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "{",
        '{"format": 1',
        "[" * 100_000,
        '{"a":' * 100_000,
        "1" * 5000,
        '{"format": 1} {}',
        "not json",
        "\x00",
        "'a'",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_broken_json(kind: type[Tree] | type[Plan] | type[Schedule], text: str) -> None:
    rejected(lambda: kind.from_json(text), FormatError, f"{kind.__name__.lower()} = ", "JSON", "to_json")


def test_json_with_a_number_of_5000_digits() -> None:
    rejected(lambda: Tree.from_json(f'{{"format": 1, "parents": [-1], "tokens": [{"9" * 5000}]}}'), TreegenError)


@pytest.mark.parametrize("kind", [Tree, Plan, Schedule])
@pytest.mark.parametrize("depth", [500, 100_000])
def test_deep_json_inside_a_field(kind: type[Tree] | type[Plan] | type[Schedule], depth: int) -> None:
    text = f'{{"format": 1, "parents": {"[" * depth}{"]" * depth}, "tokens": [3]}}'
    rejected(lambda: kind.from_json(text), TreegenError)


def test_deep_json_inside_tokens() -> None:
    for depth in (40, 300):
        text = f'{{"format": 1, "parents": [-1], "tokens": {"[" * depth}3{"]" * depth}}}'
        rejected(lambda text=text: Tree.from_json(text), TreegenError, "tokens")


@given(cut=st.integers(0, 10_000))
@examples(100)
def test_truncated_json(cut: int) -> None:
    text = Tree.from_parents([-1, 0], [3, 2], rows=[(1, 1)], kv=[[9, 8, 7], [1, 2]]).to_json()
    rejected(lambda: Tree.from_json(text[: cut % len(text)]), FormatError, "tree = ", "complete JSON")


@given(cut=st.integers(0, 10_000))
@examples(60)
def test_truncated_text(cut: int) -> None:
    """Every proper beginning either is a tree itself or is rejected with its place."""
    text = "4000(400(10*2,7)*10)+3(2)"
    begin = text[: cut % len(text)]
    if begin.count("(") == begin.count(")") and begin[-1:].isalnum() | begin.endswith(")"):
        assert Tree.parse(begin).num_rows >= 1
    else:
        rejected(lambda: Tree.parse(begin), FormatError, "tree = ", "found the end" if begin else "")


@given(text=st.text(alphabet="0123456789(),*+/_ -x\n", max_size=30))
@example("1*9999999*9999999")
@example("2\n1 0 3 0")
@examples(300)
def test_no_text_breaks_the_parsers(text: str) -> None:
    """Whatever the text, the result is a tree or a one-line TreegenError, never anything else."""
    for read in (Tree.parse, Tree.from_json, tree_text.parse_node_list):
        if read is Tree.parse and re.search(r"\d{5}", text):
            continue  # a hundred thousand nodes are legal and slow
        assert "\n" not in complaint(lambda read=read: read(text))


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers(-3, 5) | st.floats() | st.text(max_size=3) | st.just(2**40)
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=6)


@pytest.mark.parametrize("kind", [Tree, Plan, Schedule])
@given(data=st.data())
@examples(150)
def test_no_json_breaks_the_readers(kind: type[Tree] | type[Plan] | type[Schedule], data: st.DataObject) -> None:
    """Forms with some fields replaced by anything: read, or rejected in one line."""
    form = json.loads(FORMS[kind])
    for name in data.draw(st.lists(st.sampled_from(sorted(form)), min_size=1, max_size=2)):
        form[name] = data.draw(json_values())
    assert "\n" not in complaint(lambda: kind.from_json(json.dumps(form)))


@pytest.mark.parametrize("case", KV)
def test_kv(case: str) -> None:
    make, words = KV[case]
    rejected(make, TreeError, *words)


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case: str) -> None:
    arguments, named, words = SHAPES[case]
    rejected(lambda: Shape(*arguments, **named), ShapeError, *words)


def test_shapes_take_torch_types() -> None:
    torch = pytest.importorskip("torch")
    assert Shape(8, 8, 64, dtype=torch.float16) == Shape(8, 8, 64, dtype="fp16")
    assert Shape(8, 8, 64, dtype="torch.bfloat16", head_dim_v=64, kv_dtype="bfloat16") == Shape(8, 8, 64)
    rejected(lambda: Shape(8, 8, 64, dtype=torch.int32), ShapeError, "dtype = torch.int32", "fp16, bf16, fp32")


@pytest.mark.parametrize("case", OTHERS)
def test_strategies_targets_and_compile(case: str) -> None:
    make, error, words = OTHERS[case]
    rejected(make, error, *words)


def test_late_and_unknown_options_are_not_ignored() -> None:
    for call in (
        lambda: treegen.compile(TREE, stratgy="query"),
        lambda: treegen.compile(TREE, "query"),
        lambda: Tree.from_parents([-1], [3], row=[(0, 1)]),
        lambda: Shape(8, 8, 64, layout="NHD"),
        lambda: strategies.deft_flatten(blocks=3),
    ):
        with pytest.raises(TypeError):
            call()


def test_files(tmp_path: Path) -> None:
    """A file's errors are the text's, and name the file or the field."""
    rejected(lambda: Tree.load(tmp_path / "missing.json"), FormatError, "missing.json", "does not exist")
    (tmp_path / "short.json").write_text(TREE.to_json()[:-9])
    rejected(lambda: Tree.load(tmp_path / "short.json"), FormatError, "short.json", "complete JSON")
    (tmp_path / "short.txt").write_text("3\n-1 0 5 2\n0 1 5 0\n")
    rejected(lambda: Tree.load(tmp_path / "short.txt"), FormatError, "short.txt", "promises 3")
    (tmp_path / "future.json").write_text(json.dumps({**GOOD, "format": 9}))
    rejected(lambda: Tree.load(tmp_path / "future.json"), FormatError, "future.json", "newer than 1")
    (tmp_path / "empty.json").write_text("")
    rejected(lambda: Tree.load(tmp_path / "empty.json"), FormatError, "empty.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    rejected(lambda: Tree.load(tmp_path / "bytes.json"), FormatError, "bytes.json")
    rejected(lambda: Tree.load(tmp_path), FormatError, str(tmp_path)[-20:])


# The errors themselves


def test_long_and_many_line_values_are_shortened() -> None:
    error = TreegenError("argument", "a\n b\t" + "c" * 500, "is long", "cut it")
    assert str(error).startswith("argument = a b ccc")
    assert str(error).endswith("...: is long; cut it")
    assert len(str(error)) < 100
    assert error.value == "a\n b\t" + "c" * 500
    assert str(TreegenError("argument", np.zeros((3, 3)), "is a matrix", "flatten it")).count("\n") == 0


@pytest.mark.parametrize(
    "error", [BackendError, FormatError, InputError, PlanError, ShapeError, StrategyError, TreeError]
)
def test_errors_are_values(error: type[TreegenError]) -> None:
    """One root, a ValueError for callers who know nothing of treegen, and fit to cross process borders."""
    made = error("argument", 3, "is odd", "give 4")
    assert issubclass(error, treegen.TreegenError)
    assert isinstance(made, ValueError)
    back = pickle.loads(pickle.dumps(made))
    assert type(back) is error
    assert str(back) == str(made) == "argument = 3: is odd; give 4"
    assert (back.argument, back.value, back.reason, back.fix) == ("argument", 3, "is odd", "give 4")
