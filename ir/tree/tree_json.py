"""The JSON form of a tree: parents, tokens, rows as [node, sees], and KV runs as [start, length] per node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from treegen.ir.errors import FormatError
from treegen.ir.json_form import read_object, write_object
from treegen.ir.tree.build import Parts
from treegen.ir.tree.kv import KVRuns

if TYPE_CHECKING:
    from treegen.ir.tree import Tree

_REQUIRED = frozenset({"parents", "tokens"})
_FIELDS = _REQUIRED | {"rows", "kv"}


def read(text: str) -> tuple[Parts, list[list[tuple[int, int]]] | None]:
    """Returns the parts of the tree, and its KV runs per node (None if contiguous). Raises FormatError."""
    value = read_object(text, "tree", _FIELDS, _REQUIRED)
    for name in ("parents", "tokens"):
        if not isinstance(value[name], list):
            raise FormatError(f"tree.{name}", value[name], "is not a list", "give one integer per node")
    rows = None if value.get("rows") is None else _pairs("tree.rows", value["rows"])
    runs = value.get("kv")
    if runs is not None:
        if not isinstance(runs, list):
            raise FormatError("tree.kv", runs, "is not a list", "give one list of runs per node")
        runs = [_pairs(f"tree.kv[{node}]", node_runs) for node, node_runs in enumerate(runs)]
    return Parts(value["parents"], value["tokens"], rows), runs


def _pairs(name: str, value: Any) -> list[tuple[int, int]]:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise FormatError(name, value, "is not a list of pairs", "give [first, second] for every entry")
    return [(first, second) for first, second in value]


def write(tree: Tree) -> str:
    """Returns the JSON text. KV runs are left out where nodes lie one after another from slot 0."""
    fields: dict[str, Any] = {
        "parents": tree.parent.tolist(),
        "tokens": tree.tokens.tolist(),
        "rows": np.stack([tree.row_node, tree.row_sees], axis=1).tolist(),
    }
    default = KVRuns.contiguous(tree.tokens)
    if not (np.array_equal(tree.kv.start, default.start) and np.array_equal(tree.kv.length, default.length)):
        runs = np.stack([tree.kv.start, tree.kv.length], axis=1).tolist()
        fields["kv"] = [runs[tree.kv.indptr[v] : tree.kv.indptr[v + 1]] for v in range(len(tree.tokens))]
    return write_object("tree", fields)
